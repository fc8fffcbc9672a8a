"""The router in plain PyTorch: no masks, groups by gathering, fp32 copies of low-precision inputs never kept."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from kimi_hf.ops import checks

# Weight elements cast at a time, 4 MiB in fp32: the copy is still in cache for its product, and its memory is reused.
PIECE = 1 << 20


def route_eager(
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
    logits = _wide_linear(hidden, weight)
    scores = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)
    with torch.no_grad():
        choice = scores if bias is None else scores + bias
        if groups is None:
            indices = choice.topk(top_k, dim=-1, sorted=False).indices
        else:
            indices = _grouped_choice(choice, top_k, *groups)
    weights = scores.gather(1, indices)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return indices, weights * scaling if scaling != 1.0 else weights, logits


def _grouped_choice(choice: Tensor, top_k: int, num_groups: int, kept: int) -> Tensor:
    """Top-k among the experts of the best groups: gathers the kept groups instead of masking the others."""
    grouped = choice.view(choice.shape[0], num_groups, -1)  # [N, groups, E / groups]
    size = grouped.shape[-1]
    rank = grouped.topk(min(2, size), dim=-1, sorted=False).values.sum(-1)
    best = rank.topk(kept, dim=-1, sorted=False).indices  # [N, kept]
    candidates = grouped.gather(1, best.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
    local = candidates.topk(top_k, dim=-1, sorted=False).indices
    return best.gather(1, local // size) * size + local % size


def _wide_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    dtype = checks.compute_dtype(hidden.dtype)
    if torch.compiler.is_compiling() or (hidden.dtype == dtype and weight.dtype == dtype):
        return linear(hidden.to(dtype), weight.to(dtype))
    return _WideLinear.apply(hidden, weight, dtype)


class _WideLinear(torch.autograd.Function):
    """hidden weight^T in `dtype` for narrower inputs; saves the inputs as they are, not their wide copies."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = dtype
        wide = hidden.to(dtype)
        if hidden.is_cuda:
            return linear(wide, weight.to(dtype))
        return torch.cat([linear(wide, piece.to(dtype)) for piece in _row_pieces(weight)], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, weight = ctx.saved_tensors
        d_hidden = d_weight = None
        if ctx.needs_input_grad[0]:
            d_hidden = (grad @ weight.to(ctx.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = (grad.T @ hidden.to(ctx.dtype)).to(weight.dtype)
        return d_hidden, d_weight, None


def _row_pieces(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(max(1, PIECE // max(weight.shape[1], 1)))
