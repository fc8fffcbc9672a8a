"""Attention over depth in Triton: one program a token, every sealed block read once, softmax taken online.

Forward keeps a running maximum, sum and mix of whole rows in registers. Backward reads each source twice (scores and
dots with dy; then its gradient) and writes it once; nothing but the inputs is saved, and no (tokens, M+1, D) tensor
exists. Sources are passed as a tuple of pointers, so a bank need not be stacked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops.depth_attention.eager import depth_attention_eager, inverse_rms_eager
from kimi_hf.ops.kernels_common import Config, choose, contiguous, launch, next_power_of_2, wide

FORWARD = (Config("w16", num_warps=16, num_stages=1), Config("w8", num_warps=8, num_stages=1, suits=("fp32",)))
BACKWARD = (Config("w8", num_warps=8, num_stages=1), Config("w16", num_warps=16, num_stages=1))
PROGRAMS = 528  # of the backward: four for each of a large GPU's 132 processors


@triton.jit(do_not_specialize=["tokens"])
def depth_attention_forward_kernel(
    bank, inv_rms_ptr, prefix_ptr, weight_ptr, y_ptr, tokens, eps,
    M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BD)
    real = col < D
    weight = tl.load(weight_ptr + col, mask=real, other=0.0).to(tl.float32)
    v = tl.load(prefix_ptr + token * D + col, mask=real, other=0.0).to(tl.float32)
    top = tl.sum(v * weight, 0) * tl.rsqrt(tl.sum(v * v, 0) / D + eps)  # running maximum of the scores
    total = 1.0
    mixed = v
    for m in tl.static_range(M):
        v = tl.load(bank[m] + token * D + col, mask=real, other=0.0).to(tl.float32)
        score = tl.sum(v * weight, 0) * tl.load(inv_rms_ptr + m * tokens.to(tl.int64) + token).to(tl.float32)
        new_top = tl.maximum(top, score)
        keep, add = tl.exp(top - new_top), tl.exp(score - new_top)
        mixed = mixed * keep + v * add
        total = total * keep + add
        top = new_top
    tl.store(y_ptr + token * D + col, (mixed / total).to(y_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def depth_attention_backward_kernel(
    bank, dbank, inv_rms_ptr, dinv_rms_ptr, prefix_ptr, dprefix_ptr, weight_ptr, dweight_ptr, dy_ptr, tokens, eps,
    M: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BD)
    real = col < D
    source = tl.arange(0, BM)  # 0 .. M-1 sealed, M the prefix, the rest padding
    weight = tl.load(weight_ptr + col, mask=real, other=0.0).to(tl.float32)
    dweight = tl.zeros([BD], tl.float32)
    for index in range(program, tokens, tl.num_programs(0)):
        token = wide(index)
        at = token * D + col
        dy = tl.load(dy_ptr + at, mask=real, other=0.0).to(tl.float32)
        own = tl.load(prefix_ptr + at, mask=real, other=0.0).to(tl.float32)
        own_inverse = tl.rsqrt(tl.sum(own * own, 0) / D + eps)
        sealed = source < M
        inverse_at = source * tokens.to(tl.int64) + token
        inverse = tl.load(inv_rms_ptr + inverse_at, mask=sealed, other=0.0).to(tl.float32)
        inverse = tl.where(source == M, own_inverse, inverse)
        dots = tl.where(source == M, tl.sum(own * weight, 0), 0.0)  # v . w
        dp = tl.where(source == M, tl.sum(own * dy, 0), 0.0)  # v . dy
        for m in tl.static_range(M):
            v = tl.load(bank[m] + at, mask=real, other=0.0).to(tl.float32)
            dots = tl.where(source == m, tl.sum(v * weight, 0), dots)
            dp = tl.where(source == m, tl.sum(v * dy, 0), dp)
        scores = tl.where(source <= M, dots * inverse, float("-inf"))
        p = tl.exp(scores - tl.max(scores, 0))
        p = p / tl.sum(p, 0)
        dscore = p * (dp - tl.sum(p * dp, 0))
        ddot, dinverse = dscore * inverse, dscore * dots
        tl.store(dinv_rms_ptr + inverse_at, dinverse, mask=sealed)
        # Rows come from the cache again: kept in registers over the softmax they would spill.
        tl.debug_barrier()
        dy = tl.load(dy_ptr + at, mask=real, other=0.0).to(tl.float32)
        for m in tl.static_range(M):
            v = tl.load(bank[m] + at, mask=real, other=0.0).to(tl.float32)
            p_m, ddot_m = tl.sum(tl.where(source == m, p, 0.0), 0), tl.sum(tl.where(source == m, ddot, 0.0), 0)
            dweight += ddot_m * v
            dv = p_m * dy + ddot_m * weight
            tl.store(dbank[m] + at, dv.to(dbank[m].dtype.element_ty), mask=real)
        p_m, ddot_m = tl.sum(tl.where(source == M, p, 0.0), 0), tl.sum(tl.where(source == M, ddot, 0.0), 0)
        # the prefix's own statistic: d rms^-1 / d v = -rms^-3 v / D
        through = tl.sum(tl.where(source == M, dinverse, 0.0), 0) * own_inverse * own_inverse * own_inverse / D
        own = tl.load(prefix_ptr + at, mask=real, other=0.0).to(tl.float32)
        dweight += ddot_m * own
        dv = p_m * dy + ddot_m * weight - through * own
        tl.store(dprefix_ptr + at, dv.to(dprefix_ptr.dtype.element_ty), mask=real)
    tl.store(dweight_ptr + program.to(tl.int64) * D + col, dweight, mask=real)


@triton.jit
def inverse_rms_forward_kernel(x_ptr, y_ptr, eps, D: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BD)
    x = tl.load(x_ptr + row * D + col, mask=col < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, tl.rsqrt(tl.sum(x * x, 0) / D + eps))


@triton.jit
def inverse_rms_backward_kernel(x_ptr, y_ptr, dy_ptr, dx_ptr, D: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BD)
    x = tl.load(x_ptr + row * D + col, mask=col < D, other=0.0).to(tl.float32)
    y, dy = tl.load(y_ptr + row), tl.load(dy_ptr + row)
    dx = x * (-dy * y * y * y / D)
    tl.store(dx_ptr + row * D + col, dx.to(dx_ptr.dtype.element_ty), mask=col < D)


class _DepthAttention(torch.autograd.Function):
    """Saves references to its inputs."""

    @staticmethod
    def forward(ctx, inv_rms: Tensor, weight: Tensor, eps: float, prefix: Tensor, *bank: Tensor) -> Tensor:
        inv_rms, weight, prefix, *bank = contiguous(inv_rms, weight, prefix, *bank)
        D = prefix.shape[-1]
        BD, tokens = next_power_of_2(D), prefix.numel() // D
        y = torch.empty_like(prefix)
        config = choose(
            depth_attention_forward_kernel, FORWARD, f"D{BD}", prefix.device,
            kind="fp32" if prefix.dtype == torch.float32 else "",
        )  # fmt: skip
        launch(
            depth_attention_forward_kernel, (tokens,), config, prefix.device,
            bank=tuple(bank), inv_rms_ptr=inv_rms, prefix_ptr=prefix, weight_ptr=weight, y_ptr=y, tokens=tokens,
            eps=eps, M=len(bank), D=D, BD=BD,
        )  # fmt: skip
        ctx.save_for_backward(inv_rms, weight, prefix, *bank)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        inv_rms, weight, prefix, *bank = ctx.saved_tensors
        D, M = prefix.shape[-1], len(bank)
        BD, tokens = next_power_of_2(D), prefix.numel() // D
        programs = min(tokens, PROGRAMS)
        dprefix, *dbank = (torch.empty_like(source) for source in (prefix, *bank))
        dinv_rms = torch.empty(inv_rms.shape, dtype=torch.float32, device=prefix.device)
        dweight = torch.empty(programs, D, dtype=torch.float32, device=prefix.device)
        config = choose(depth_attention_backward_kernel, BACKWARD, f"D{BD}", prefix.device)
        launch(
            depth_attention_backward_kernel, (programs,), config, prefix.device,
            bank=tuple(bank), dbank=tuple(dbank), inv_rms_ptr=inv_rms, dinv_rms_ptr=dinv_rms, prefix_ptr=prefix,
            dprefix_ptr=dprefix, weight_ptr=weight, dweight_ptr=dweight, dy_ptr=dy.contiguous(), tokens=tokens,
            eps=ctx.eps, M=M, BM=next_power_of_2(M + 1), D=D, BD=BD,
        )  # fmt: skip
        return dinv_rms.to(inv_rms.dtype), dweight.sum(0).to(weight.dtype), None, dprefix, *dbank


class _InverseRms(torch.autograd.Function):
    """Saves a reference to x and the result."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        D = x.shape[-1]
        launch(
            inverse_rms_forward_kernel, (y.numel(),), FORWARD[0], x.device,
            x_ptr=x, y_ptr=y, eps=eps, D=D, BD=next_power_of_2(D),
        )  # fmt: skip
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, y = ctx.saved_tensors
        D = x.shape[-1]
        dx = torch.empty_like(x)
        launch(
            inverse_rms_backward_kernel, (y.numel(),), FORWARD[0], x.device,
            x_ptr=x, y_ptr=y, dy_ptr=dy.contiguous(), dx_ptr=dx, D=D, BD=next_power_of_2(D),
        )  # fmt: skip
        return dx, None


def depth_attention_triton(
    bank: Sequence[Tensor] | Tensor, inv_rms: Tensor, prefix: Tensor, weight: Tensor, *, eps: float
) -> Tensor:
    """See `kimi_hf.ops.depth_attention.depth_attention`."""
    if torch.compiler.is_compiling():  # which fuses it with its neighbours
        return depth_attention_eager(bank, inv_rms, prefix, weight, eps=eps)
    if isinstance(bank, Tensor):
        bank = bank.unbind(0)
    return _DepthAttention.apply(inv_rms, weight, eps, prefix, *bank)


def inverse_rms_triton(x: Tensor, eps: float) -> Tensor:
    """See `kimi_hf.ops.depth_attention.inverse_rms`."""
    if torch.compiler.is_compiling():  # which fuses it with its neighbours
        return inverse_rms_eager(x, eps)
    return _InverseRms.apply(x, eps)
