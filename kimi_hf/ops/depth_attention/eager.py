"""Attention over depth in plain PyTorch: the bank is read in place, piece by piece, and the backward recomputes.

Saved for the backward: references to the bank, the prefix, `inv_rms` and the weight, and the probabilities, scores and
prefix statistics of shape [M+1, B, T]. Nothing of shape (tokens, M+1, D) is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops import checks
from kimi_hf.ops.depth_attention.reference import inverse_rms_reference

# Elements of one source in a piece: M + 1 fp32 pieces of 128 KiB stay in the second-level cache between the
# product that scores them and the one that mixes them.
PIECE = 1 << 16
# Elements of one source below which (decoding) the sources are copied side by side: a few calls instead of 2 (M + 1).
SMALL = 1 << 14


def depth_attention_eager(
    bank: Sequence[Tensor] | Tensor, inv_rms: Tensor, prefix: Tensor, weight: Tensor, *, eps: float
) -> Tensor:
    """See `kimi_hf.ops.depth_attention.depth_attention`."""
    sources = (*bank, prefix)
    if torch.compiler.is_compiling():
        return _traced(inv_rms, weight, eps, sources)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (inv_rms, weight, *sources)):
        return _DepthAttention.apply(inv_rms, weight, eps, *sources)
    if prefix.numel() <= SMALL:
        return _few_tokens(inv_rms, weight, eps, sources)
    return _forward(inv_rms, weight, eps, sources)[0]


def inverse_rms_eager(x: Tensor, eps: float) -> Tensor:
    """See `kimi_hf.ops.depth_attention.inverse_rms`."""
    if torch.compiler.is_compiling():
        return inverse_rms_reference(x, eps)
    return _InverseRms.apply(x, eps)


def _forward(inv_rms: Tensor, weight: Tensor, eps: float, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The mixture [B, T, D], and 1 / rms, v . w and the probabilities of all sources, each [M+1, tokens]."""
    prefix = sources[-1]
    dtype = checks.compute_dtype(prefix.dtype)
    weight = weight.to(dtype)
    tokens = prefix.shape[0] * prefix.shape[1]
    inverse = torch.empty(len(sources), tokens, dtype=dtype, device=prefix.device)
    inverse[:-1] = inv_rms.reshape(len(sources) - 1, tokens)
    dots, probabilities = torch.empty_like(inverse), torch.empty_like(inverse)
    out = torch.empty(tokens, prefix.shape[-1], dtype=prefix.dtype, device=prefix.device)
    for piece, rows in _pieces(sources):
        wide = [row.to(dtype) for row in rows]
        inverse[-1, piece] = _inverse_rms(wide[-1], eps)
        for v, dot in zip(wide, dots[:, piece], strict=True):
            torch.mv(v, weight, out=dot)
        p = torch.softmax(dots[:, piece] * inverse[:, piece], dim=0)
        probabilities[:, piece] = p
        mixed = wide[0] * p[0, :, None]
        for weights, v in zip(p[1:], wide[1:], strict=True):
            mixed.addcmul_(v, weights[:, None])
        out[piece] = mixed
    return out.view(prefix.shape), inverse, dots, probabilities


def _traced(inv_rms: Tensor, weight: Tensor, eps: float, sources: tuple[Tensor, ...]) -> Tensor:
    """For compiled graphs: pointwise products and sums a compiler fuses, without stacking the sources."""
    prefix = sources[-1]
    dtype = checks.compute_dtype(prefix.dtype)
    inverse = (*inv_rms.to(dtype), inverse_rms_reference(prefix, eps))
    scores = [(v.to(dtype) * weight.to(dtype)).sum(-1) * r for v, r in zip(sources, inverse, strict=True)]
    p = torch.softmax(torch.stack(scores), dim=0)
    return sum(p[j, ..., None] * v.to(dtype) for j, v in enumerate(sources)).to(prefix.dtype)


def _few_tokens(inv_rms: Tensor, weight: Tensor, eps: float, sources: tuple[Tensor, ...]) -> Tensor:
    prefix = sources[-1]
    dtype = checks.compute_dtype(prefix.dtype)
    wide = torch.stack(sources).view(len(sources), -1, prefix.shape[-1]).to(dtype)  # [M+1, tokens, D]
    inverse = torch.cat([inv_rms.reshape(-1, wide.shape[1]), _inverse_rms(wide[-1:], eps)])
    p = torch.softmax((wide @ weight.to(dtype)).mul_(inverse), dim=0)
    return torch.bmm(p.T.unsqueeze(1), wide.transpose(0, 1)).view(prefix.shape).to(prefix.dtype)


class _DepthAttention(torch.autograd.Function):
    """`sources` are bank[0] .. bank[M-1] and the prefix."""

    @staticmethod
    def forward(ctx, inv_rms: Tensor, weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        out, *statistics = _forward(inv_rms, weight, eps, sources)
        ctx.save_for_backward(weight, *sources, *statistics)
        ctx.inv_rms_dtype = inv_rms.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weight, *sources, inverse, dots, probabilities = ctx.saved_tensors
        prefix, dtype = sources[-1], inverse.dtype
        wide_weight = weight.to(dtype)
        d_sources = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in sources]
        flat_d_sources = [d.view(-1, prefix.shape[-1]) for d in d_sources]
        d_inverse = torch.empty_like(inverse)
        d_weight = torch.zeros_like(wide_weight)
        for piece, (d, *rows) in _pieces((grad, *sources)):
            d = d.to(dtype)
            wide = [row.to(dtype) for row in rows]
            p, r = probabilities[:, piece], inverse[:, piece]
            d_p = torch.stack([torch.linalg.vecdot(v, d) for v in wide])
            d_score = p * (d_p - (p * d_p).sum(0))  # through the softmax, [M+1, piece]
            d_dot = d_score * r
            d_inverse[:, piece] = d_score * dots[:, piece]
            # the prefix's own statistic: d(1 / rms) / dx = -(1 / rms)^3 x / D
            own = d_inverse[-1, piece] * r[-1] ** 3 / -prefix.shape[-1]
            for j, v in enumerate(wide):
                d_weight += d_dot[j] @ v
                d_v = torch.addcmul(d * p[j, :, None], d_dot[j, :, None], wide_weight)
                if j == len(wide) - 1:
                    d_v.addcmul_(v, own[:, None])
                flat_d_sources[j][piece] = d_v
        d_inv_rms = d_inverse[:-1].view(-1, *prefix.shape[:2]).to(ctx.inv_rms_dtype)
        return d_inv_rms, d_weight.to(weight.dtype), None, *d_sources


class _InverseRms(torch.autograd.Function):
    """Saves a reference to x and the result; works in pieces so that no wide copy of x is made."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        inverse = torch.empty(x.shape[:-1], dtype=checks.compute_dtype(x.dtype), device=x.device)
        flat = inverse.view(-1)
        for piece, (rows,) in _pieces((x,)):
            flat[piece] = _inverse_rms(rows.to(inverse.dtype), eps)
        ctx.save_for_backward(x, inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, inverse = ctx.saved_tensors
        factor = grad * inverse**3 / -x.shape[-1]
        return (x * factor.unsqueeze(-1)).to(x.dtype), None


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.linalg.vecdot(wide, wide).div_(wide.shape[-1]).add_(eps).rsqrt_()


def _pieces(tensors: Sequence[Tensor]):
    """(slice, [rows of each tensor]) over tokens, about PIECE elements of each tensor at a time."""
    width = tensors[0].shape[-1]
    flat = [tensor.reshape(-1, width) for tensor in tensors]
    step = max(1, PIECE // width)
    for start in range(0, flat[0].shape[0], step):
        piece = slice(start, start + step)
        yield piece, [rows[piece] for rows in flat]
