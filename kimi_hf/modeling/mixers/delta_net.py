"""DeltaNet: a memory that is edited instead of added to. Writing a key again replaces what it held.

Source: Linear Transformers Are Secretly Fast Weight Programmers (arXiv 2102.11174); its chunked form from DeltaNet
(arXiv 2406.06484).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ...ops.delta_rule import delta_rule
from ...ops.kda import l2_normalize
from ..cache import TokenInputs
from ..norms import KimiGatedRMSNorm
from ..sequence import SequenceLayout
from .recurrent import RecurrentMixer
from .short_convolution import ShortConvolution, convolve


class DeltaNet(RecurrentMixer):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, o_t = S_t^T q_t; q, k = l2norm(silu(.)), beta = sigmoid(.).

    Recurrent and chunked computation are the operation's business. By the configuration: a short convolution in front
    of q, k and v (it brings the SiLU; without it v stays linear), an RMS norm and a SiLU gate on the output.

    Args:
        config: a `LadderConfig`.
        layer_idx: 0-based, the cache layer this mixer owns.
    """

    name = "delta_net"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        options = config.delta_options(self.name)
        width, keys, values = config.hidden_size, self.num_heads * self.head_dim, self.num_heads * self.value_dim
        self.q_proj = nn.Linear(width, keys, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, values, bias=False)
        self.b_proj = nn.Linear(width, self.num_heads, bias=False)
        self.convolved = options["short_conv_kernel_size"] > 0
        if self.convolved:
            self.q_conv1d = ShortConvolution(keys, options["short_conv_kernel_size"])
            self.k_conv1d = ShortConvolution(keys, options["short_conv_kernel_size"])
            self.v_conv1d = ShortConvolution(values, options["short_conv_kernel_size"])
        self.g_proj = nn.Linear(width, values, bias=False) if options["output_gate"] else None
        self.o_norm = None
        if options["output_norm"]:
            self.o_norm = KimiGatedRMSNorm(self.value_dim, config.norm_eps, activation="silu")
        self.o_proj = nn.Linear(values, width, bias=False)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (
            self.q_proj(hidden_states),
            self.k_proj(hidden_states),
            self.v_proj(hidden_states),
            self.b_proj(hidden_states),
        )

    def log_decay(self, logits: tuple[Tensor, ...]) -> Tensor | None:
        """What the inputs behind the write logits say about forgetting, (B, T, H) <= 0; DeltaNet forgets nothing."""
        return None

    def advance(
        self,
        inputs: TokenInputs,
        window: Tensor | None,
        state: Tensor | None,
        layout: SequenceLayout | None,
        keep: bool,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        raw, gates = inputs.parts[:3], inputs.parts[3:]
        if layout is not None:
            raw = tuple(layout.pack(x) for x in raw)
            gates = tuple(layout.shut(layout.pack(x)) for x in gates)  # padding writes nothing and forgets nothing
        if self.convolved:
            convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            (q, k, v), window = convolve(convs, raw, window, layout, keep)
        else:
            q, k, v = silu(raw[0]), silu(raw[1]), raw[2]
        q, k, v = map(self._heads, (q, k, v))
        o, state = delta_rule(
            l2_normalize(q),
            l2_normalize(k),
            v,
            torch.sigmoid(gates[0].float() if gates[0].dtype != torch.float64 else gates[0]),
            g=self.log_decay(gates[1:]),
            initial_state=state,
            output_final_state=keep,
            cu_seqlens=None if layout is None else layout.cu_seqlens,
            inplace_state=inplace and state is not None,
        )
        o = o.flatten(2)
        if layout is not None:
            o = layout.unpack(o)
        return o, window, state if keep else None

    def finish(self, mixed: Tensor, hidden_states: Tensor) -> Tensor:
        gate = None if self.g_proj is None else self.g_proj(hidden_states)
        if self.o_norm is not None:
            mixed = self.o_norm(self._heads(mixed), None if gate is None else self._heads(gate)).flatten(2)
        elif gate is not None:
            mixed = mixed * silu(gate)
        return self.o_proj(mixed)
