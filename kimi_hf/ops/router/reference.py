"""The definition of the router."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks


def route_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    activation: str,
    groups: tuple[int, int] | None,
    renormalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kimi_hf.ops.router.route`; `groups` is (num_groups, topk_groups) or None."""
    dtype = checks.compute_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    scores = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().to(dtype)
    if groups is not None:
        num_groups, kept = groups
        grouped = choice.view(len(choice), num_groups, -1)
        rank = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        closed = torch.ones_like(rank, dtype=torch.bool).scatter(1, rank.topk(kept, dim=-1).indices, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
    indices = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, indices)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return indices, weights * scaling, logits
