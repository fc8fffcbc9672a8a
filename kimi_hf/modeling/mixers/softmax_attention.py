"""Softmax attention over all earlier tokens, with keys and values cached per head.

Source: Attention Is All You Need (arXiv 1706.03762), as GPT-2 has it.
"""

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...ops.continued_attention import continued_attention
from ..sequence import MaskInfo
from .latent_attention import eager_attention


class SoftmaxAttention(nn.Module):
    """o_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s over s <= t, with A heads of d = D / A channels.

    Args:
        config: a `LadderConfig`.
        layer_idx: 0-based, the cache layer this mixer owns.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.num_key_value_groups = 1
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=config.bias)
        self.k_proj = nn.Linear(width, width, bias=config.bias)
        self.v_proj = nn.Linear(width, width, bias=config.bias)
        self.o_proj = nn.Linear(width, width, bias=config.bias)

    def forward(
        self, hidden_states: Tensor, mask_info: MaskInfo | None = None, past_key_values=None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) -> (B, T, D), and the attention weights (B, A, T, S) when the attention is "eager"."""
        mask_info = mask_info or MaskInfo()
        q, k, v = (
            proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if mask_info.continues:
            context = continued_attention(q, k, v, scale=self.scaling)
            return self.o_proj(context.flatten(2)), None
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        context, weights = attend(
            self,
            q,
            k,
            v,
            mask_info.attention,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **{**kwargs, **(mask_info.flash_kwargs or {})},
        )
        return self.o_proj(context.flatten(2)), weights
