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

from kimi_hf.ops import checks
from kimi_hf.ops.kernels_common import Config, cdiv, launch, wide
from kimi_hf.ops.mxfp4.kernels import FEW_ROWS, grouped_product, grouped_transposed, packed_gemv, packed_product
from kimi_hf.ops.mxfp4.packed import PackedWeight
from kimi_hf.ops.registered import registered

CONFIG = Config("d1024_w4", {"BD": 1024}, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Pairs:
    """The (token, slot) pairs of indices [N, k], sorted by expert; pairs of no expert come last and have no tile.

    order [P]: the pair at a sorted row. back [P]: the sorted row of a pair, negative for pairs of no expert.
    bound int32 [E+1]: the first sorted row of each expert.
    """

    order: Tensor
    back: Tensor
    bound: Tensor

    @classmethod
    def of(cls, indices: Tensor, experts: int) -> Pairs:
        flat = indices.reshape(-1)
        absent = (flat < 0) | (flat >= experts)
        ordered, order = flat.masked_fill(absent, experts).sort(stable=True)
        firsts = torch.arange(experts + 1, device=flat.device, dtype=flat.dtype)
        bound = torch.searchsorted(ordered, firsts, out_int32=True)
        rows = torch.arange(flat.numel(), device=flat.device)
        back = torch.empty_like(order).scatter_(0, order, rows).masked_fill(absent, -1)
        return cls(order, back, bound)


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
    weights = None if weights is None else weights.contiguous()
    out = torch.empty(tokens, D, dtype=y.dtype, device=y.device)
    launch(
        combine_kernel, (tokens * cdiv(D, CONFIG.constants["BD"]),), CONFIG, y.device,
        y_ptr=y, weight_ptr=weights, back_ptr=back, out_ptr=out, k=back.numel() // max(1, tokens), D=D,
    )  # fmt: skip
    return out


def _combine_backward(y: Tensor, weights: Tensor, back: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    weights = weights.contiguous()
    dy, dweights = torch.zeros_like(y), torch.empty_like(weights)
    launch(
        combine_grad_kernel, (back.numel(),), CONFIG, y.device,
        y_ptr=y, weight_ptr=weights, back_ptr=back, dout_ptr=dout.contiguous(), dy_ptr=dy, dweight_ptr=dweights,
        k=weights.shape[1], D=y.shape[1],
    )  # fmt: skip
    return dy, dweights


def _gathered_backward(g: Tensor, packed: Tensor, scale: Tensor, bound: Tensor, back: Tensor, tokens: int) -> Tensor:
    return combine(grouped_transposed(g, packed, scale, bound), None, back, tokens)


def _remember_gathered(ctx, inputs, output) -> None:
    x, packed, scale, bound, _, back = inputs
    ctx.save_for_backward(packed, scale, bound, back)
    ctx.tokens = x.shape[0]


# Pair rows of y weighed and summed per token, with gradients for both.
combined = registered(
    "kimi_hf::combine_experts_triton",
    schema="(Tensor y, Tensor weights, Tensor back) -> Tensor",
    forward=lambda y, weights, back: combine(y, weights, back, len(weights)),
    fake=lambda y, weights, back: y.new_empty(weights.shape[0], y.shape[1]),
    backward_schema="(Tensor y, Tensor weights, Tensor back, Tensor dout) -> (Tensor, Tensor)",
    backward=_combine_backward,
    backward_fake=lambda y, weights, back, dout: (torch.empty_like(y), torch.empty_like(weights)),
    remember=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    differentiate=lambda ctx, backward, dout: (*backward(*ctx.saved_tensors, dout), None),
)
# Rows of tokens times their experts' matrices, gathered inside the kernel: x [N, in] -> [P, out].
gathered_product = registered(
    "kimi_hf::gathered_product_triton",
    schema="(Tensor x, Tensor packed, Tensor scale, Tensor bound, Tensor order, Tensor back) -> Tensor",
    forward=lambda x, packed, scale, bound, order, back: grouped_product(x, packed, scale, bound, order),
    fake=lambda x, packed, scale, bound, order, back: x.new_empty(order.shape[0], packed.shape[1]),
    backward_schema="(Tensor g, Tensor packed, Tensor scale, Tensor bound, Tensor back, SymInt tokens) -> Tensor",
    backward=_gathered_backward,
    backward_fake=lambda g, packed, scale, bound, back, tokens: g.new_empty(tokens, 2 * packed.shape[2]),
    remember=_remember_gathered,
    differentiate=lambda ctx, backward, g: (backward(g, *ctx.saved_tensors, ctx.tokens), *(None,) * 5),
)


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
    if tokens == 0 or k == 0:
        return torch.zeros_like(hidden)
    if tokens <= FEW_ROWS and not checks.needs_gradient(hidden, weights):
        flat = indices.reshape(-1)
        gate_up = packed_gemv(hidden, gate_up_proj.packed, gate_up_proj.scale, flat, tokens * k)
        y = packed_gemv(act(gate_up), down_proj.packed, down_proj.scale, flat, tokens * k)
        pair = torch.arange(tokens * k, device=flat.device)
        return combined(y, weights, pair.masked_fill((flat < 0) | (flat >= gate_up_proj.shape[0]), -1))
    pairs = Pairs.of(indices, gate_up_proj.shape[0])
    gate_up = gathered_product(hidden, gate_up_proj.packed, gate_up_proj.scale, pairs.bound, pairs.order, pairs.back)
    y = packed_product(act(gate_up), down_proj.packed, down_proj.scale, pairs.bound)
    return combined(y, weights, pairs.back)
