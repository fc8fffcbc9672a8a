"""The gated norm in Triton: one pass over rows forward, one pass backward that recomputes the statistic.

Forward reads x and gate and writes y; backward reads x, gate, dy and writes dx, dgate: no other row-sized tensor.
The weight's gradient is summed in registers over the rows of a program, then over programs by one small reduction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops.gated_norm.eager import gated_norm_eager
from kimi_hf.ops.kernels_common import (
    Config,
    activate,
    activate_slope,
    cdiv,
    choose,
    contiguous,
    launch,
    next_power_of_2,
    wide,
)

CONFIGS = (
    Config("tile4k_w4", {"TILE": 4096}, num_warps=4, num_stages=1),
    Config("tile2k_w4", {"TILE": 2048}, num_warps=4, num_stages=1),
    Config("tile8k_w8", {"TILE": 8192}, num_warps=8, num_stages=1),
    Config("tile8k_w16", {"TILE": 8192}, num_warps=16, num_stages=1, suits=("wide",)),
)
WIDE = 4096  # rows above this are held by 16 warps
PROGRAMS = 1024  # of the backward: enough to fill a GPU, few enough for a cheap last reduction of the weight gradient


@triton.jit(do_not_specialize=["rows"])
def gated_norm_forward_kernel(
    x_ptr, weight_ptr, gate_ptr, y_ptr, rows, eps,
    V: tl.constexpr, BV: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = TILE // BV if TILE > BV else 1
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    col = tl.arange(0, BV)
    inside = (row < rows)[:, None] & (col < V)[None, :]
    at = row[:, None] * V + col[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [BM, BV]
    weight = tl.load(weight_ptr + col, mask=col < V, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None] * weight[None, :]
    if gate_ptr is not None:
        y *= activate(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles"])
def gated_norm_backward_kernel(
    x_ptr, weight_ptr, gate_ptr, dy_ptr, dx_ptr, dgate_ptr, dweight_ptr, rows, tiles, eps,
    V: tl.constexpr, BV: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = TILE // BV if TILE > BV else 1
    program = tl.program_id(0)
    col = tl.arange(0, BV)
    weight = tl.load(weight_ptr + col, mask=col < V, other=0.0).to(tl.float32)
    dweight = tl.zeros([BV], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        row = wide(tile) * BM + tl.arange(0, BM)
        inside = (row < rows)[:, None] & (col < V)[None, :]
        at = row[:, None] * V + col[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
        unit = x * inverse  # rows of RMS 1
        if gate_ptr is not None:
            logits = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
            dgate = dy * unit * weight[None, :] * activate_slope(logits, ACTIVATION)
            tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
            dy *= activate(logits, ACTIVATION)
        dweight += tl.sum(dy * unit, 0)
        dunit = dy * weight[None, :]
        dx = (dunit - unit * (tl.sum(dunit * unit, 1) / V)[:, None]) * inverse
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + program.to(tl.int64) * V + col, dweight, mask=col < V)


class _GatedNorm(torch.autograd.Function):
    """Saves the inputs alone."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, activation: str) -> Tensor:
        x, weight, gate = contiguous(x, weight, gate)
        y = torch.empty_like(x)
        V = x.shape[-1]
        BV, rows = next_power_of_2(V), x.numel() // V
        config = choose(gated_norm_forward_kernel, CONFIGS, f"V{BV}", x.device, kind="wide" if BV > WIDE else "")
        launch(
            gated_norm_forward_kernel, (cdiv(rows, max(1, config.constants["TILE"] // BV)),), config, x.device,
            x_ptr=x, weight_ptr=weight, gate_ptr=gate, y_ptr=y, rows=rows, eps=eps, V=V, BV=BV, ACTIVATION=activation,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, gate)
        ctx.options = eps, activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, gate = ctx.saved_tensors
        eps, activation = ctx.options
        V = x.shape[-1]
        BV, rows = next_power_of_2(V), x.numel() // V
        config = choose(gated_norm_backward_kernel, CONFIGS, f"V{BV}", x.device, kind="wide" if BV > WIDE else "")
        tiles = cdiv(rows, max(1, config.constants["TILE"] // BV))
        programs = min(tiles, PROGRAMS)
        dx, dgate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
        dweight = torch.empty(programs, V, dtype=torch.float32, device=x.device)
        launch(
            gated_norm_backward_kernel, (programs,), config, x.device,
            x_ptr=x, weight_ptr=weight, gate_ptr=gate, dy_ptr=dy.contiguous(), dx_ptr=dx, dgate_ptr=dgate,
            dweight_ptr=dweight, rows=rows, tiles=tiles, eps=eps, V=V, BV=BV, ACTIVATION=activation,
        )  # fmt: skip
        return dx, dweight.sum(0).to(weight.dtype), dgate, None, None


def gated_norm_triton(x: Tensor, weight: Tensor, gate: Tensor | None, *, eps: float, activation: str) -> Tensor:
    """See `kimi_hf.ops.gated_norm.gated_norm`."""
    if torch.compiler.is_compiling():  # which fuses it with its neighbours
        return gated_norm_eager(x, weight, gate, eps=eps, activation=activation)
    return _GatedNorm.apply(x, weight, gate, eps, activation)
