"""SiTU in plain PyTorch that keeps only its inputs for the backward and works in cache-sized pieces.

The forward follows the reference's order of roundings, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops import checks
from kimi_hf.ops.situ.reference import situ_glu_reference, situ_reference

# Elements a piece: five fp32 temporaries of 256 KiB stay in the second-level cache and are reused, where whole-tensor
# temporaries would touch fresh memory a dozen times.
PIECE = 1 << 16


def situ_eager(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `kimi_hf.ops.situ.situ`."""
    if torch.compiler.is_compiling():
        return situ_reference(gate, up, beta=beta, linear_beta=linear_beta)  # the compiler fuses it by itself
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _Situ.apply(gate, up, beta, linear_beta)
    return _forward(gate, up, beta, linear_beta)


def situ_glu_eager(gate_up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `kimi_hf.ops.situ.situ_glu`."""
    if torch.compiler.is_compiling():
        return situ_glu_reference(gate_up, beta=beta, linear_beta=linear_beta)
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SituGlu.apply(gate_up, beta, linear_beta)
    return _forward(*gate_up.chunk(2, dim=-1), beta, linear_beta)


class _Situ(torch.autograd.Function):
    """Saves gate and up; the backward recomputes the two tanh and the sigmoid."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = beta, linear_beta
        return _forward(gate, up, beta, linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        d_up = torch.empty_like(d_gate)
        _backward(gate, up, grad, d_gate, d_up, *ctx.bounds)
        return d_gate, d_up, None, None


class _SituGlu(torch.autograd.Function):
    """The same for the two halves of one tensor, whose gradient is written in place."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.bounds = beta, linear_beta
        return _forward(*gate_up.chunk(2, dim=-1), beta, linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (gate_up,) = ctx.saved_tensors
        d_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        _backward(*gate_up.chunk(2, dim=-1), grad, *d_gate_up.chunk(2, dim=-1), *ctx.bounds)
        return d_gate_up, None, None


def _forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dtype = checks.compute_dtype(gate.dtype)
    for g, u, o in _pieces(gate, up, out):
        g, u = g.to(dtype), u.to(dtype)
        product = torch.div(g, beta).tanh_().mul_(beta).mul_(torch.sigmoid(g))
        if linear_beta is not None:
            u = torch.div(u, linear_beta).tanh_().mul_(linear_beta)
        if o.dtype == dtype:
            torch.mul(product, u, out=o)
        else:
            o.copy_(product.mul_(u))
    return out


def _backward(
    gate: Tensor, up: Tensor, grad: Tensor, d_gate: Tensor, d_up: Tensor, beta: float, linear_beta: float | None
) -> None:
    """Writes d_gate and d_up. d/dG beta tanh(G / beta) s(G) = s (1 - t^2) + beta t s (1 - s), t = tanh(G / beta)."""
    dtype = checks.compute_dtype(gate.dtype)
    for g, u, d, dg, du in _pieces(gate, up, grad, d_gate, d_up):
        g, u, d = g.to(dtype), u.to(dtype), d.to(dtype)
        t, s = torch.div(g, beta).tanh_(), torch.sigmoid(g)
        slope = torch.rsub(s, 1).mul_(t).mul_(beta).addcmul_(t, t, value=-1).add_(1).mul_(s).mul_(d)
        value = t.mul_(s).mul_(d).mul_(beta)
        if linear_beta is None:
            dg.copy_(slope.mul_(u))
            du.copy_(value)
        else:
            bounded = torch.div(u, linear_beta).tanh_()
            dg.copy_(slope.mul_(bounded).mul_(linear_beta))
            du.copy_(torch.addcmul(value, value, bounded.square_(), value=-1))


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching row blocks of about PIECE elements of each tensor. Those written to are views: their rows are even."""
    if tensors[0].numel() <= PIECE:
        yield tensors
        return
    width = tensors[0].shape[-1]
    rows = [tensor.reshape(-1, width) for tensor in tensors]
    step = max(1, PIECE // width)
    for start in range(0, rows[0].shape[0], step):
        yield tuple(row[start : start + step] for row in rows)
