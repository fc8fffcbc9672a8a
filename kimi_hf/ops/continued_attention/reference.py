"""Attention after a past by its definition: all scores, a mask, a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks


def continued_attention_reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """See `kimi_hf.ops.continued_attention.continued_attention`."""
    wide = checks.compute_dtype(q.dtype)
    queries, keys = q.shape[2], k.shape[2]
    scores = q.to(wide) @ k.to(wide).mT * scale
    last = torch.arange(keys - queries, keys, device=q.device)
    later = torch.arange(keys, device=q.device) > last[:, None]
    weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
    return (weights @ v.to(wide)).transpose(1, 2).to(q.dtype)
