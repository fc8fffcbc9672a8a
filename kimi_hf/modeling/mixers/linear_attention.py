"""Linear attention: softmax's kernel replaced by a feature map, so that the past fits into a fixed sum.

Source: Transformers are RNNs (Katharopoulos et al., arXiv 2006.16236).
"""

import torch
from torch import Tensor, nn

from ...ops.linear_attention import linear_attention
from ..cache import TokenInputs
from ..sequence import PaddedRows, SequenceLayout
from .recurrent import RecurrentMixer


class LinearAttention(RecurrentMixer):
    """S_t = S_{t-1} + f(k_t) v_t^T, z_t = z_{t-1} + f(k_t), o_t = S_t^T f(q_t) / (f(q_t) . z_t), f(x) = elu(x) + 1.

    The cached state is (B, H, K, V + 1) fp32: S, and z as its last column.

    Args:
        config: a `LadderConfig`.
        layer_idx: 0-based, the cache layer this mixer owns.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        width, keys, values = config.hidden_size, self.num_heads * self.head_dim, self.num_heads * self.value_dim
        self.q_proj = nn.Linear(width, keys, bias=config.bias)
        self.k_proj = nn.Linear(width, keys, bias=config.bias)
        self.v_proj = nn.Linear(width, values, bias=config.bias)
        self.o_proj = nn.Linear(values, width, bias=config.bias)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def advance(
        self,
        inputs: TokenInputs,
        window: Tensor | None,
        state: Tensor | None,
        layout: SequenceLayout | None,
        keep: bool,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        q, k, v = inputs.parts if layout is None else map(layout.pack, inputs.parts)
        ragged = isinstance(layout, PaddedRows)
        before = state
        if ragged:
            # f(k) is 0 for a shut key, so padding adds nothing. A row of nothing but padding would divide 0 by 0: its
            # first token stays open, and its state is put back below.
            empty = layout.lengths == 0
            shut = layout.shut(k)
            k = torch.cat([torch.where(empty[:, None, None], k[:, :1], shut[:, :1]), shut[:, 1:]], dim=1)
            inplace = False
        o, final = linear_attention(
            *map(self._heads, (q, k, v)),
            initial_state=None if state is None else (state[..., :-1], state[..., -1]),
            output_final_state=keep,
            cu_seqlens=None if layout is None else layout.cu_seqlens,
            inplace_state=inplace and state is not None,
        )
        o = o.flatten(2)
        if keep and not (inplace and before is not None):
            state = torch.cat([final[0], final[1][..., None]], dim=-1)
            if ragged:
                old = torch.zeros_like(state) if before is None else before
                state = torch.where(empty[:, None, None, None], old, state)
        return o if layout is None else layout.unpack(o), None, state if keep else None

    def finish(self, mixed: Tensor, hidden_states: Tensor) -> Tensor:
        return self.o_proj(mixed)
