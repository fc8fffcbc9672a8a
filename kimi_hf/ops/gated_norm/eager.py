"""The gated norm in plain PyTorch: a hand-written backward that keeps only the inputs and one statistic per head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_hf.ops import checks


class _GatedNorm(torch.autograd.Function):
    """Saves x, gate (as given, so bf16 stays bf16) and the inverse RMS; everything else is recomputed."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, activation: str) -> Tensor:
        dtype = checks.compute_dtype(x.dtype)
        wide = x.to(dtype)
        inv_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = wide * inv_rms * weight.to(dtype)
        if gate is not None:
            y.mul_((torch.sigmoid if activation == "sigmoid" else silu)(gate.to(dtype)))
        ctx.save_for_backward(x, weight, gate, inv_rms)
        ctx.activation = activation
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, gate, inv_rms = ctx.saved_tensors
        dtype = inv_rms.dtype
        grad, unit = grad.to(dtype), x.to(dtype) * inv_rms  # unit: x with RMS 1
        wide_weight = weight.to(dtype)
        grad_gate = None
        if gate is not None:
            logits = gate.to(dtype)
            sigmoid = torch.sigmoid(logits)
            slope = sigmoid * (1 - sigmoid)
            opening = sigmoid
            if ctx.activation == "silu":
                slope, opening = sigmoid + logits * slope, logits * sigmoid
            grad_gate = (grad * unit * wide_weight * slope).to(gate.dtype) if ctx.needs_input_grad[2] else None
            grad = grad * opening
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_unit = grad * wide_weight
            grad_x = (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True)) * inv_rms
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_weight, grad_gate, None, None


def gated_norm_eager(x: Tensor, weight: Tensor, gate: Tensor | None, *, eps: float, activation: str) -> Tensor:
    """See `kimi_hf.ops.gated_norm.gated_norm`."""
    return _GatedNorm.apply(x, weight, gate, eps, activation)
