"""The gated norm in plain PyTorch: block by block in the cache, with a backward that keeps only the inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_hf.ops import checks
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.blocks import blocks
from kimi_hf.ops.gated_norm.reference import gated_norm_reference


def gated_norm_eager(x: Tensor, weight: Tensor, gate: Tensor | None, *, eps: float, activation: str) -> Tensor:
    """See `kimi_hf.ops.gated_norm.gated_norm`."""
    if torch.compiler.is_compiling():  # a compiler fuses the definition by itself
        return gated_norm_reference(x, weight, gate, eps=eps, activation=activation)
    return _GatedNorm.apply(x, weight, gate, eps, activation)


class _GatedNorm(torch.autograd.Function):
    """Saves x and gate as they are (bf16 stays bf16); everything else is recomputed."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, activation: str) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps, ctx.activation = eps, activation
        dtype, V = checks.compute_dtype(x.dtype), x.shape[-1]
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, out = x.reshape(-1, V), y.view(-1, V)
        gates = None if gate is None else gate.reshape(-1, V)
        wide_weight = weight.to(dtype)
        for start, stop in blocks(rows.shape[0], V):
            unit, _ = _unit(rows[start:stop].to(dtype), eps)
            unit.mul_(wide_weight)
            if gates is None:
                out[start:stop] = unit
                continue
            logits = gates[start:stop].to(dtype)
            opening = torch.sigmoid(logits) if activation == "sigmoid" else silu(logits)
            out[start:stop] = unit.mul_(opening)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, gate = ctx.saved_tensors
        dtype, V = checks.compute_dtype(x.dtype), x.shape[-1]
        rows, grads = x.reshape(-1, V), grad.reshape(-1, V)
        gates = None if gate is None else gate.reshape(-1, V)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_gate = None if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros(V, dtype=dtype, device=x.device)
        wide_weight = weight.to(dtype)
        with no_autocast(x):
            for start, stop in blocks(rows.shape[0], V):
                unit, inverse = _unit(rows[start:stop].to(dtype), ctx.eps)
                upstream = grads[start:stop].to(dtype)
                if gates is not None:
                    opening, slope = _opening_and_slope(gates[start:stop].to(dtype), ctx.activation)
                    slope.mul_(unit).mul_(wide_weight).mul_(upstream)
                    grad_gate.view(-1, V)[start:stop] = slope
                    upstream = opening.mul_(upstream)
                along = upstream * unit
                grad_weight += along.sum(0)
                # The norm takes out what lies along the row itself.
                mean = along.mul_(wide_weight).mean(-1, keepdim=True)
                grad_unit = torch.mul(upstream, wide_weight).addcmul_(unit, mean, value=-1)
                grad_x.view(-1, V)[start:stop] = grad_unit.mul_(inverse)
        return grad_x, grad_weight.to(weight.dtype), grad_gate, None, None


def _unit(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows with a root mean square of one, in fresh memory, and what they were multiplied by."""
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    inverse = norm.square_().div_(rows.shape[-1]).add_(eps).rsqrt_()
    return rows * inverse, inverse


def _opening_and_slope(logits: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation and its derivative, both in fresh memory."""
    sigmoid = torch.sigmoid(logits)
    slope = torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1)
    if activation == "sigmoid":
        return sigmoid, slope
    return logits * sigmoid, slope.mul_(logits).add_(sigmoid)
