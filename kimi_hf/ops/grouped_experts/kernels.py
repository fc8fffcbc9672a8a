"""Routed experts with MXFP4 matrices in Triton: pairs sorted by expert, dequantised in registers.

A few tokens take the matrix-vector form, which reads each chosen expert once and sorts nothing; more take the grouped
form. Nothing is read back from the device, and the launch grids depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops.kernels_common import Config, cdiv, launch, wide
from kimi_hf.ops.mxfp4.kernels import (
    FEW_ROWS,
    GroupedProduct,
    RowTiles,
    grouped_product,
    grouped_transposed,
    packed_gemv,
)
from kimi_hf.ops.mxfp4.packed import PackedWeight

CONFIG = Config("d1024_w4", {"BD": 1024}, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Pairs:
    """The (token, slot) pairs of indices [N, k], sorted by expert; pairs of no expert come last and have no tile.

    order [P]: the pair at a sorted row. back [P]: the sorted row of a pair, negative for pairs of no expert.
    """

    order: Tensor
    back: Tensor
    tiles: RowTiles

    @classmethod
    def of(cls, indices: Tensor, experts: int) -> Pairs:
        flat = indices.reshape(-1)
        absent = (flat < 0) | (flat >= experts)
        ordered, order = flat.masked_fill(absent, experts).sort(stable=True)
        firsts = torch.arange(experts + 1, device=flat.device, dtype=flat.dtype)
        bound = torch.searchsorted(ordered, firsts, out_int32=True)
        rows = torch.arange(flat.numel(), device=flat.device)
        back = torch.empty_like(order).scatter_(0, order, rows).masked_fill(absent, -1)
        return cls(order, back, RowTiles.of(bound, flat.numel()))


@triton.jit
def combine_kernel(y_ptr, weight_ptr, back_ptr, out_ptr, k, D: tl.constexpr, BD: tl.constexpr):
    """out[n] = sum_j weight[n, j] y[back[n k + j]] in fp32, one cast; without weights a plain sum."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    n = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)
    out = tl.zeros([BD], tl.float32)
    for slot in range(0, k):
        row = tl.load(back_ptr + n * k + slot)
        width = tl.where(row >= 0, D, 0)  # nothing of a pair of no expert
        part = tl.load(y_ptr + wide(row) * D + col, mask=col < width, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            part *= tl.load(weight_ptr + n * k + slot).to(tl.float32)
        out += part
    tl.store(out_ptr + wide(n) * D + col, out.to(out_ptr.dtype.element_ty), mask=col < D)


@triton.jit
def combine_grad_kernel(
    y_ptr, weight_ptr, back_ptr, dout_ptr, dy_ptr, dweight_ptr, k, D: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """dy[back[p]] = weight[p] dout[n], dweight[p] = y[back[p]] . dout[n] for pair p of token n."""
    p = tl.program_id(0)
    row = tl.load(back_ptr + p)
    weight = tl.load(weight_ptr + p).to(tl.float32)
    dot = tl.zeros([BD], tl.float32)
    for first in range(0, D, BD):
        col = first + tl.arange(0, BD)
        inside = col < tl.where(row >= 0, D, 0)
        dout = tl.load(dout_ptr + wide(p // k) * D + col, mask=col < D, other=0.0).to(tl.float32)
        dot += dout * tl.load(y_ptr + wide(row) * D + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dy_ptr + wide(row) * D + col, (weight * dout).to(dy_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + p, tl.sum(dot, 0).to(dweight_ptr.dtype.element_ty))


def combine(y: Tensor, weights: Tensor | None, back: Tensor, tokens: int) -> Tensor:
    """[tokens, D] from pair rows y [P, D]; weights [tokens, k] or None; back [P]."""
    D = y.shape[1]
    out = torch.empty(tokens, D, dtype=y.dtype, device=y.device)
    launch(
        combine_kernel, (tokens * cdiv(D, CONFIG.constants["BD"]),), CONFIG, y.device,
        y_ptr=y, weight_ptr=weights, back_ptr=back, out_ptr=out, k=back.numel() // max(1, tokens), D=D,
    )  # fmt: skip
    return out


class _Combine(torch.autograd.Function):
    """`combine` with gradients for y and the weights."""

    @staticmethod
    def forward(ctx, y: Tensor, weights: Tensor, back: Tensor) -> Tensor:
        weights = weights.contiguous()
        ctx.save_for_backward(y, weights, back)
        return combine(y, weights, back, len(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        y, weights, back = ctx.saved_tensors
        dy, dweights = torch.zeros_like(y), torch.empty_like(weights)
        launch(
            combine_grad_kernel, (back.numel(),), CONFIG, y.device,
            y_ptr=y, weight_ptr=weights, back_ptr=back, dout_ptr=dout.contiguous(), dy_ptr=dy, dweight_ptr=dweights,
            k=weights.shape[1], D=y.shape[1],
        )  # fmt: skip
        return dy, dweights, None


class _GatheredProduct(torch.autograd.Function):
    """Rows of tokens times their experts' matrices, gathered inside the kernel: x [N, in] -> [P, out]."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, scale: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(packed, scale)
        ctx.pairs, ctx.tokens = pairs, len(x)
        return grouped_product(x, packed, scale, pairs.tiles, pairs.order, pairs.order.numel())

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        dx = grouped_transposed(g, *ctx.saved_tensors, ctx.pairs.tiles)
        return combine(dx, None, ctx.pairs.back, ctx.tokens), None, None, None


def grouped_experts_triton(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_proj: PackedWeight,
    down_proj: PackedWeight,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    """See `kimi_hf.ops.grouped_experts.grouped_experts`; for `PackedWeight` stacks."""
    tokens, k = indices.shape
    if indices.numel() == 0:
        return torch.zeros_like(hidden)
    if tokens <= FEW_ROWS and not (torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad)):
        flat = indices.reshape(-1).contiguous()
        gate_up = packed_gemv(hidden, gate_up_proj.packed, gate_up_proj.scale, flat, flat.numel())
        y = packed_gemv(act(gate_up), down_proj.packed, down_proj.scale, flat, flat.numel())
        pair = torch.arange(flat.numel(), device=flat.device)
        pair = pair.masked_fill((flat < 0) | (flat >= gate_up_proj.shape[0]), -1)
        return combine(y, weights.contiguous(), pair, tokens)
    pairs = Pairs.of(indices, gate_up_proj.shape[0])
    gate_up = _GatheredProduct.apply(hidden, gate_up_proj.packed, gate_up_proj.scale, pairs)
    y = GroupedProduct.apply(act(gate_up), down_proj.packed, down_proj.scale, pairs.tiles)
    return _Combine.apply(y, weights, pairs.back)
