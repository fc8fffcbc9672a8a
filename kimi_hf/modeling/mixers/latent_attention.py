"""Multi-head latent attention without positions: keys and values live in one small latent per token.

Source: DeepSeek-V2 (arXiv 2405.04434) for the latent; Kimi K3 release, `KimiMLAAttention`; kimi_k3.md 4.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...ops.continued_attention import continued_attention
from ...ops.latent_attention import latent_attention
from ...ops.latent_attention.eager import cheaper_form
from ..norms import KimiRMSNorm
from ..sequence import MaskInfo

# The release builds the two inner norms with their class default, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attention in plain products, rounded to the activation dtype where the release rounds.

    Args:
        query, key: (B, A, T, d), (B, A, S, d). value: (B, A, S, v). attention_mask: additive, (B, 1, T, S) or None.
    Returns:
        context (B, T, A, v), probabilities (B, A, T, S).
    """
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores.float() if scores.dtype != torch.float64 else scores, dim=-1).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class LatentExpansion(nn.Linear):
    """kv_b_proj: expands a latent (..., R) to keys and values per head; without one it hands out its weight.

    The absorbed form multiplies by the weight from the other side. Asking the module for it, instead of reading the
    attribute, keeps hooks that load the weight on demand in charge.
    """

    def forward(self, latent: Tensor | None = None) -> Tensor:
        return self.weight if latent is None else super().forward(latent)


class MultiHeadLatentAttention(nn.Module):
    """MLA with A heads, NoPE, and optionally a sigmoid output gate per channel.

    Only the normed latent c (R) and the shared key part k_r (r) are cached. Long queries expand them to keys and
    values (direct form); short ones against a long cache fold the expansion into the query (absorbed form), whichever
    costs fewer flops.

    Args:
        config: a `KimiLinearConfig`.
        layer_idx: 0-based, the cache layer this mixer owns.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = 1
        self.nope, self.rope, self.v_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        self.scaling = config.qk_head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        width, query = config.hidden_size, self.num_heads * config.qk_head_dim
        self.low_rank_query = config.q_lora_rank is not None
        if self.low_rank_query:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = KimiRMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query, bias=False)
        else:
            self.q_proj = nn.Linear(width, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = KimiRMSNorm(self.rank, LATENT_NORM_EPS)
        self.kv_b_proj = LatentExpansion(self.rank, self.num_heads * (self.nope + self.v_head_dim), bias=False)
        self.g_proj = None
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(width, self.num_heads * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, width, bias=False)

    def forward(
        self, hidden_states: Tensor, mask_info: MaskInfo | None = None, past_key_values=None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) -> (B, T, D), and the attention weights (B, A, T, S) when the attention is "eager"."""
        batch, length = hidden_states.shape[:2]
        if self.low_rank_query:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        else:
            q = self.q_proj(hidden_states)
        q = q.view(batch, length, self.num_heads, self.nope + self.rope)
        latent, shared = self.kv_a_proj_with_mqa(hidden_states).split([self.rank, self.rope], dim=-1)
        latent = self.kv_a_layernorm(latent)
        if past_key_values is not None:
            # One head of width R and one of width r: every cache layer of transformers can hold that.
            latent, shared = past_key_values.update(latent[:, None], shared[:, None], self.layer_idx)
            latent, shared = latent[:, 0], shared[:, 0]
        mask_info = mask_info or MaskInfo()
        mask = mask_info.attention
        # (Flash attention counts causality from the last key, and never gets a mask without padding.)
        flash = "flash" in (self.config._attn_implementation or "")
        if mask is None and 1 < length < latent.shape[1] and not (flash or mask_info.continues):
            # A static cache in its first forward: what lies behind the new tokens is not written yet, and transformers
            # gives no mask because causality counted from the first key says so.
            latent, shared = latent[:, :length], shared[:, :length]
        if mask_info.flash_kwargs is None and self._absorbs(length, latent.shape[1], mask):
            context, weights = latent_attention(
                q[..., : self.nope],
                q[..., self.nope :],
                latent,
                shared,
                self.kv_b_proj(),
                v_head_dim=self.v_head_dim,
                scale=self.scaling,
                mask=mask,
                form="absorbed",
            )
        else:
            kwargs = {**kwargs, **(mask_info.flash_kwargs or {})}
            context, weights = self._direct(q, latent, shared, mask, mask_info.continues, **kwargs)
        context = context.reshape(batch, length, -1)
        if self.g_proj is not None:
            context = context * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(context), weights

    def _absorbs(self, queries: int, keys: int, mask) -> bool:
        """Whether the absorbed form is possible here and costs fewer flops than the direct one."""
        if type(self.kv_b_proj) is not LatentExpansion or self.config._attn_implementation == "eager":
            return False  # an adapter's or quantizer's module has no plain weight; "eager" is asked for its weights
        if self.kv_b_proj._forward_hooks or self.kv_b_proj._forward_pre_hooks:
            return False  # they mean the latents that go in and the keys and values that come out
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
            return False  # flash and flex attention bring masks of their own kind
        if self.training and self.attention_dropout:
            return False
        both = self.nope + self.v_head_dim
        return cheaper_form(queries, keys, self.nope, self.rope, both, self.rank) == "absorbed"

    def _direct(
        self, q: Tensor, latent: Tensor, shared: Tensor, mask, continues: bool, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Expand keys and values and hand them to the chosen attention implementation."""
        expanded = self.kv_b_proj(latent).view(*latent.shape[:2], self.num_heads, self.nope + self.v_head_dim)
        key, value = expanded.split([self.nope, self.v_head_dim], dim=-1)
        key = torch.cat([key, shared[:, :, None].expand(-1, -1, self.num_heads, -1)], dim=-1)
        if continues:
            parts = (x.transpose(1, 2) for x in (q, key, value))
            return continued_attention(*parts, scale=self.scaling), None
        implementation = self.config._attn_implementation
        missing = key.shape[-1] - value.shape[-1]
        if missing > 0 and implementation != "eager":
            # Fused kernels want values as wide as keys; the zero columns are dropped again.
            value = nn.functional.pad(value, (0, missing))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        context, weights = attend(
            self,
            q.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return context[..., : self.v_head_dim], weights
