"""SiTU in Triton: forward reads two tensors and writes one, backward reads three and writes two.

The two halves of one projection are read where they lie: rows may have any stride.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops.kernels_common import Config, cdiv, choose, launch, next_power_of_2, stable_tanh
from kimi_hf.ops.situ.eager import situ_eager, situ_glu_eager

CONFIGS = (
    Config("tile2k_w4", {"TILE": 2048}, num_warps=4, num_stages=1),
    Config("tile4k_w8", {"TILE": 4096}, num_warps=8, num_stages=1),
    Config("tile1k_w4", {"TILE": 1024}, num_warps=4, num_stages=1),
)


@triton.jit
def _place(rows, F: tl.constexpr, BF: tl.constexpr, TILE: tl.constexpr):
    """Row and column indices of this program's tile [TILE // BF, BF], and which of them exist."""
    column_tiles: tl.constexpr = (F + BF - 1) // BF
    program = tl.program_id(0)
    row = (program // column_tiles).to(tl.int64) * (TILE // BF) + tl.arange(0, TILE // BF)
    col = (program % column_tiles) * BF + tl.arange(0, BF)
    return row[:, None], col[None, :], (row < rows)[:, None] & (col < F)[None, :]


@triton.jit(do_not_specialize=["rows"])
def situ_forward_kernel(
    gate_ptr, up_ptr, y_ptr, rows, gate_stride, up_stride, beta, linear_beta,
    F: tl.constexpr, BF: tl.constexpr, TILE: tl.constexpr, BOUNDED_UP: tl.constexpr,
):  # fmt: skip
    row, col, inside = _place(rows, F, BF, TILE)
    g = tl.load(gate_ptr + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    if BOUNDED_UP:
        u = linear_beta * stable_tanh(u / linear_beta)
    y = beta * stable_tanh(g / beta) * tl.sigmoid(g) * u
    tl.store(y_ptr + row * F + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def situ_backward_kernel(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, rows, gate_stride, up_stride, grad_stride, beta, linear_beta,
    F: tl.constexpr, BF: tl.constexpr, TILE: tl.constexpr, BOUNDED_UP: tl.constexpr,
):  # fmt: skip
    row, col, inside = _place(rows, F, BF, TILE)
    g = tl.load(gate_ptr + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + col, mask=inside, other=0.0).to(tl.float32)
    t, s = stable_tanh(g / beta), tl.sigmoid(g)
    value = beta * t * s
    slope = s * (1.0 - t * t) + value * (1.0 - s)  # d value / d g
    du = dy * value
    if BOUNDED_UP:
        bounded = stable_tanh(u / linear_beta)
        u = linear_beta * bounded
        du *= 1.0 - bounded * bounded
    tl.store(dgate_ptr + row * grad_stride + col, (dy * slope * u).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * grad_stride + col, du.to(dup_ptr.dtype.element_ty), mask=inside)


def _rows(x: Tensor) -> Tensor:
    """[rows, F] with unit stride along F: a view wherever one exists, as for halves of a projection."""
    x = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _launch(kernel, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None, **others: Tensor | int) -> None:
    gate, up = _rows(gate), _rows(up)
    rows, F = gate.shape
    if rows * F == 0:
        return
    BF = min(next_power_of_2(F), 1024)
    config = choose(kernel, CONFIGS, f"F{BF}", gate.device)
    launch(
        kernel, (cdiv(rows, config.constants["TILE"] // BF) * cdiv(F, BF),), config, gate.device,
        gate_ptr=gate, up_ptr=up, **others, rows=rows, gate_stride=gate.stride(0), up_stride=up.stride(0),
        beta=beta, linear_beta=linear_beta or 1.0, F=F, BF=BF, BOUNDED_UP=linear_beta is not None,
    )  # fmt: skip


def _forward(gate: Tensor, up: Tensor, bounds: tuple[float, float | None]) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(situ_forward_kernel, gate, up, *bounds, y_ptr=y)
    return y


def _backward(
    gate: Tensor, up: Tensor, dy: Tensor, dgate: Tensor, dup: Tensor, bounds: tuple[float, float | None]
) -> None:
    """Fill dgate and dup, whose rows lie the same distance apart."""
    grad_stride = _rows(dgate).stride(0)
    _launch(
        situ_backward_kernel, gate, up, *bounds, dy_ptr=dy.contiguous(), dgate_ptr=dgate, dup_ptr=dup,
        grad_stride=grad_stride,
    )  # fmt: skip


class _Situ(torch.autograd.Function):
    """Saves gate and up; the backward recomputes both tanh and the sigmoid."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = beta, linear_beta
        return _forward(gate, up, ctx.bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        _backward(gate, up, dy, dgate, dup, ctx.bounds)
        return dgate, dup, None, None


class _SituGlu(torch.autograd.Function):
    """As `_Situ`, with both gradients written into the halves of one tensor."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.bounds = beta, linear_beta
        return _forward(*gate_up.chunk(2, dim=-1), ctx.bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        (gate_up,) = ctx.saved_tensors
        grad = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        _backward(*gate_up.chunk(2, dim=-1), dy, *grad.chunk(2, dim=-1), ctx.bounds)
        return grad, None, None


def situ_triton(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `kimi_hf.ops.situ.situ`."""
    if torch.compiler.is_compiling():  # which fuses it with its neighbours
        return situ_eager(gate, up, beta=beta, linear_beta=linear_beta)
    return _Situ.apply(gate, up, beta, linear_beta)


def situ_glu_triton(gate_up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `kimi_hf.ops.situ.situ_glu`."""
    if torch.compiler.is_compiling():  # which fuses it with its neighbours
        return situ_glu_eager(gate_up, beta=beta, linear_beta=linear_beta)
    return _SituGlu.apply(gate_up, beta, linear_beta)
