"""Kimi Delta Attention in plain PyTorch: chunks of 64 as batched matrix products, single steps for a few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.delta_rule.chunked import chunked_backward, chunked_forward
from kimi_hf.ops.delta_rule.steps import STEPS_AT_MOST, delta_steps
from kimi_hf.ops.kda.gate import kda_log_decay, l2_normalize
from kimi_hf.ops.kda.rule import KdaRule


class _ChunkedKda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lower_bound, bounds, initial_state, *inputs):
        rule = KdaRule(list(inputs), lower_bound)
        keep = any(ctx.needs_input_grad)
        o, final, kept = chunked_forward(rule, initial_state, bounds, rule.dtype, keep)
        ctx.save_for_backward(*inputs, *kept)
        ctx.lower_bound, ctx.bounds, ctx.has_state = lower_bound, bounds, initial_state is not None
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_o, grad_final):
        inputs, kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        rule = KdaRule(list(inputs), ctx.lower_bound)
        grad_state = chunked_backward(rule, list(kept), ctx.bounds, grad_o, grad_final, rule.dtype)
        return None, None, grad_state if ctx.has_state else None, *rule.finished_gradients()


def kda_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.kda.kda`."""
    inputs = (q, k, v, g, beta, A_log, dt_bias)
    if cu_seqlens is None and q.shape[1] <= STEPS_AT_MOST and not checks.needs_gradient(initial_state, *inputs):
        dtype = checks.compute_dtype(q.dtype)
        queries = l2_normalize(q) * q.shape[-1] ** -0.5
        decay = kda_log_decay(g.to(dtype), A_log, dt_bias, lower_bound).exp_()
        write = torch.sigmoid(beta.to(dtype))
        o, final = delta_steps(queries, l2_normalize(k), v, decay, write, initial_state, inplace_state)
        return o, final if output_final_state or inplace_state else None
    bounds = None if cu_seqlens is None else checks.sequence_bounds("kda", cu_seqlens, q.shape[1])
    o, final = _ChunkedKda.apply(lower_bound, bounds, initial_state, *inputs)
    if inplace_state:
        final = initial_state.copy_(final)
    return o, final if output_final_state or inplace_state else None
