"""SiTU in plain PyTorch that keeps only its two inputs for the backward and works in cache-sized pieces."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops import checks
from kimi_hf.ops.situ.reference import situ_reference

# Elements a piece: five fp32 temporaries of 256 KiB stay in the second-level cache and are reused, where whole-tensor
# temporaries would touch fresh memory a dozen times.
PIECE = 1 << 16


def situ_eager(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `kimi_hf.ops.situ.situ`."""
    if torch.compiler.is_compiling():
        return situ_reference(gate, up, beta=beta, linear_beta=linear_beta)  # the compiler fuses it by itself
    return _Situ.apply(gate, up, beta, linear_beta)


class _Situ(torch.autograd.Function):
    """Saves gate and up; the backward recomputes the two tanh and the sigmoid."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = beta, linear_beta
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dtype = checks.compute_dtype(gate.dtype)
        for g, u, o in _pieces(gate, up, out):
            g, u = g.to(dtype), u.to(dtype)
            product = torch.sigmoid(g).mul_(torch.tanh(g / beta)).mul_(beta)
            if linear_beta is not None:
                u = torch.tanh(u / linear_beta).mul_(linear_beta)
            o.copy_(product.mul_(u))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.bounds
        dtype = checks.compute_dtype(gate.dtype)
        d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        d_up = torch.empty_like(d_gate)
        for g, u, d, dg, du in _pieces(gate, up, grad, d_gate, d_up):
            g, u, d = g.to(dtype), u.to(dtype), d.to(dtype)
            t, s = torch.tanh(g / beta), torch.sigmoid(g)
            # d/dG beta tanh(G/beta) s(G) = s (1 - t^2) + beta t s (1 - s)
            slope = (1 - s).mul_(t).mul_(beta).sub_(t * t).add_(1).mul_(s)
            value = t.mul_(s).mul_(beta)
            if linear_beta is None:
                du.copy_(value.mul_(d))
                dg.copy_(slope.mul_(u).mul_(d))
                continue
            bounded = torch.tanh(u / linear_beta)
            dg.copy_(slope.mul_(bounded).mul_(linear_beta).mul_(d))
            du.copy_(bounded.mul_(bounded).neg_().add_(1).mul_(value).mul_(d))
        return d_gate, d_up, None, None


def _pieces(*tensors: Tensor):
    """Matching row blocks of about PIECE elements of each tensor; the last is, or the last two are, written to."""
    width = tensors[0].shape[-1] if tensors[0].dim() else 1
    rows = [tensor.reshape(-1, width) if width else tensor.reshape(0, 0) for tensor in tensors]
    step = max(1, PIECE // max(width, 1))
    if rows[0].shape[0] <= step:
        yield tuple(rows)
        return
    for start in range(0, rows[0].shape[0], step):
        yield tuple(row[start : start + step] for row in rows)
