"""The definition of latent attention: expand keys and values, then plain attention with the release's roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.latent_attention.masks import masked_softmax, visibility


def latent_attention_reference(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b_weight: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    form: str | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.latent_attention.latent_attention`; kv_b_weight is [A, n + v, R], `form` is not read."""
    heads, _, rank = kv_b_weight.shape
    nope = q_nope.shape[-1]
    batch, keys = latent.shape[:2]
    expanded = latent @ kv_b_weight.reshape(-1, rank).T
    key, value = expanded.view(batch, keys, heads, -1).transpose(1, 2).split([nope, kv_b_weight.shape[1] - nope], -1)
    key = torch.cat([key, k_rope.unsqueeze(1).expand(-1, heads, -1, -1)], dim=-1)  # [B, A, S, n + r]
    query = torch.cat([q_nope, q_rope], dim=-1).transpose(1, 2)
    scores = (query @ key.mT) * scale  # [B, A, T, S], rounded twice in low precision, as the release does
    visible = visibility(mask, is_causal, query.shape[2], keys, latent.device)
    weights = masked_softmax(scores, visible, mask, checks.compute_dtype(scores.dtype)).to(value.dtype)
    return (weights @ value).transpose(1, 2), weights if need_weights else None
