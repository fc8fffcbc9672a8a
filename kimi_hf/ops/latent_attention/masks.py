"""Masks of latent attention in one form: None, or a bool tensor broadcastable to [B, 1, T, S], plus additive values."""

from __future__ import annotations

import torch
from torch import Tensor


def visibility(mask: Tensor | None, is_causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which keys a query may see: bool broadcastable to [B, 1, T, S] (4-D), or None when all see all."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    if not is_causal or (queries == 1 and keys >= 1):
        return None
    return causal(queries, keys, device)


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, T, S], bottom-right aligned: query t sees keys 0 .. S - T + t."""
    last = torch.arange(keys - queries, keys, device=device)
    return (torch.arange(keys, device=device) <= last[:, None])[None, None]


def masked_softmax(scores: Tensor, visible: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Softmax over the last dim in `dtype`; additive masks are added, closed keys and queries without any key get 0."""
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(scores.dtype)
    if visible is None:
        return torch.softmax(scores, dim=-1, dtype=dtype)
    # A row that is closed everywhere would be 0/0: the lowest finite value keeps it finite, the second fill zeroes it.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, dtype=dtype).masked_fill(~visible, 0.0)
