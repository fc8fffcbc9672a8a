"""Kimi Delta Attention: a fixed-size memory per head, edited by the delta rule, forgetting per channel.

Source: Kimi Linear (arXiv 2510.26692); Kimi K3 release, `KimiDeltaAttention`; kimi_k3.md 3.
"""

import torch
from torch import Tensor, nn

from ...ops.kda import kda
from ...ops.kda_decode import kda_decode
from ..cache import TokenInputs, recurrent_layer
from ..norms import KimiGatedRMSNorm
from ..sequence import MaskInfo, PackedDocuments, PaddedRows, SequenceLayout
from .short_convolution import ShortConvolution, convolve


class KimiDeltaAttention(nn.Module):
    """KDA with either decay gate (softplus, or bounded by `gate_lower_bound`) and either output gate.

    H heads of K = V channels, P = H K. The state S (B, H, K, V) is fp32 whatever the activations are.

    Args:
        config: a `KimiLinearConfig`.
        layer_idx: 0-based, the cache layer this mixer owns.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        linear = config.linear_attn_config
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.conv_size = linear["short_conv_kernel_size"]
        self.lower_bound = linear.get("gate_lower_bound")
        width, inner = config.hidden_size, self.num_heads * self.head_dim

        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.q_conv1d = ShortConvolution(inner, self.conv_size)
        self.k_conv1d = ShortConvolution(inner, self.conv_size)
        self.v_conv1d = ShortConvolution(inner, self.conv_size)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.f_a_proj = nn.Linear(width, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.b_proj = nn.Linear(width, self.num_heads, bias=False)
        self.full_rank_gate = bool(linear.get("use_full_rank_gate"))
        if self.full_rank_gate:
            self.g_proj = nn.Linear(width, inner, bias=False)
        else:
            self.g_a_proj = nn.Linear(width, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.o_norm = KimiGatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self, hidden_states: Tensor, mask_info: MaskInfo | None = None, past_key_values=None, **kwargs
    ) -> tuple[Tensor, None]:
        """(B, T, D) -> (B, T, D), None. Continues from the cache's state and window, and leaves the new ones there."""
        layout = None if mask_info is None else mask_info.layout
        raw = (
            self.q_proj(hidden_states),
            self.k_proj(hidden_states),
            self.v_proj(hidden_states),
            self.f_b_proj(self.f_a_proj(hidden_states)),
            self.b_proj(hidden_states),
        )
        gate = self.g_proj(hidden_states) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(hidden_states))
        layer = recurrent_layer(past_key_values, self.layer_idx)
        real = layout.real if isinstance(layout, PaddedRows) else None
        one = hidden_states.shape[1] == 1 and not isinstance(layout, PackedDocuments)
        if one and (memory := self._memory_to_step(layer)) is not None:
            step = self._step(*(x[:, 0] for x in (*raw, gate)), *memory, None if real is None else real[:, 0])
            return self.o_proj(step[:, None]), None
        inputs = TokenInputs(raw, real)
        if layer is None:
            mixed, _, _ = self.advance(inputs, None, None, layout, keep=False)
        else:
            mixed = layer.run(inputs, self.advance, layout)
        heads = (*hidden_states.shape[:2], self.num_heads, self.head_dim)
        mixed = self.o_norm(mixed.view(heads), gate.view(heads))
        return self.o_proj(mixed.flatten(2)), None

    def _memory_to_step(self, layer) -> tuple[Tensor, Tensor] | None:
        """The cache's window and state if one token may be run over them in place, else None.

        The step reads the weights of the convolutions and the norm by itself, so a module that is wrapped or has hooks
        (offloading, sharding, a user's) sends the token the general way.
        """
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        as_built = all(_is_plain(conv, ShortConvolution) for conv in convs) and _is_plain(self.o_norm, KimiGatedRMSNorm)
        if layer is None or not as_built:
            return None
        return layer.memory_to_step()

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        gate: Tensor,
        window: Tensor,
        state: Tensor,
        real: Tensor | None,
    ) -> Tensor:
        """One token of each row: projections (B, P), beta (B, H), real (B,) or None -> normed, gated output (B, P)."""
        return kda_decode(
            q,
            k,
            v,
            g,
            beta,
            gate,
            window,
            state,
            conv_weights=(self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            norm_weight=self.o_norm.weight,
            eps=self.o_norm.eps,
            real=real,
        )

    def advance(
        self,
        inputs: TokenInputs,
        window: Tensor | None,
        state: Tensor | None,
        layout: SequenceLayout | None,
        keep: bool,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the recurrence over `inputs`.

        Args:
            inputs: raw q, k, v (B, T, P) before the convolution, decay logits (B, T, P), write logits (B, T, H).
            window: (B, 3P, W) earlier raw inputs of the three convolutions [q; k; v], or None.
            state: (B, H, K, V) fp32, or None.
            layout: where sequences begin and which tokens are padding.
            keep: also return the window and state after the last token.
            inplace: write the new state over `state` (no gradients).
        Returns:
            o (B, T, P); window and state, or None.
        """
        raw = list(inputs.parts)
        cu_seqlens = None
        if layout is not None:
            raw = [layout.pack(x) for x in raw]
            raw[3], raw[4] = layout.shut(raw[3]), layout.shut(raw[4])
            cu_seqlens = layout.cu_seqlens
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        mixed, window = convolve(convs, raw[:3], window, layout, keep)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in mixed)
        o, state = kda(
            q,
            k,
            v,
            raw[3].unflatten(-1, (self.num_heads, self.head_dim)),
            raw[4],
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            initial_state=state,
            output_final_state=keep,
            cu_seqlens=cu_seqlens,
            inplace_state=inplace and state is not None,
        )
        o = o.flatten(2)
        if layout is not None:
            o = layout.unpack(o)
        return o, window, state if keep else None


def _is_plain(module: nn.Module, kind: type) -> bool:
    """Whether calling `module` does nothing but what `kind` does."""
    return type(module) is kind and not (
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    )
