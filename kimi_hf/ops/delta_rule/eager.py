"""DeltaNet and Gated DeltaNet in plain PyTorch: chunks as batched matrix products, single steps for a few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.delta_rule.chunked import chunked_backward, chunked_forward
from kimi_hf.ops.delta_rule.rule import DeltaRule
from kimi_hf.ops.delta_rule.steps import STEPS_AT_MOST, delta_steps


class _ChunkedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale, bounds, initial_state, *inputs):
        rule = DeltaRule(list(inputs), scale)
        o, final, kept = chunked_forward(rule, initial_state, bounds, rule.dtype, any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, *kept)
        ctx.scale, ctx.bounds, ctx.has_state = scale, bounds, initial_state is not None
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_o, grad_final):
        inputs, kept = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        rule = DeltaRule(list(inputs), ctx.scale)
        grad_state = chunked_backward(rule, list(kept), ctx.bounds, grad_o, grad_final, rule.dtype)
        return None, None, grad_state if ctx.has_state else None, *rule.finished_gradients()


def delta_rule_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.delta_rule.delta_rule`."""
    inputs = (q, k, v, beta, g)
    if cu_seqlens is None and q.shape[1] <= STEPS_AT_MOST and not checks.needs_gradient(initial_state, *inputs):
        dtype = checks.compute_dtype(q.dtype)
        decay = None if g is None else g.to(dtype).exp()[..., None]
        o, final = delta_steps(
            q.to(dtype) * scale, k.to(dtype), v, decay, beta.to(dtype), initial_state, inplace_state
        )
        return o, final if output_final_state or inplace_state else None
    bounds = None if cu_seqlens is None else checks.sequence_bounds("delta_rule", cu_seqlens, q.shape[1])
    o, final = _ChunkedDeltaRule.apply(scale, bounds, initial_state, *inputs)
    if inplace_state:
        final = initial_state.copy_(final)
    return o, final if output_final_state or inplace_state else None
