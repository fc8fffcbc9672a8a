"""Kimi Delta Attention in plain PyTorch: chunks as batched matrix products, single steps for a few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.delta_rule.chunked import chunked_backward, chunked_forward, forward_outputs
from kimi_hf.ops.delta_rule.steps import delta_steps, steps_serve
from kimi_hf.ops.kda.gate import EPS, kda_log_decay
from kimi_hf.ops.kda.rule import KdaRule
from kimi_hf.ops.registered import registered


def _forward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, lower_bound, keep):
    bounds = None if cu_seqlens is None else checks.sequence_bounds("kda", cu_seqlens, q.shape[1])
    with no_autocast(q):
        return chunked_forward(KdaRule([q, k, v, g, beta, A_log, dt_bias], lower_bound), initial_state, bounds, keep)


def _backward(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, lower_bound, kept, grad_o, grad_final):
    rule = KdaRule([q, k, v, g, beta, A_log, dt_bias], lower_bound)
    bounds = None if cu_seqlens is None else checks.sequence_bounds("kda", cu_seqlens, q.shape[1])
    with no_autocast(q):
        grad_state = chunked_backward(rule, kept, bounds, grad_o, grad_final)
        return *rule.finished_gradients(), grad_state


def _fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, lower_bound, keep):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return forward_outputs(q, v, checks.compute_dtype(q.dtype), sequences, keep)


def _backward_fake(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, lower_bound, kept, grad_o, grad_final):
    dtype = checks.compute_dtype(q.dtype)
    fresh = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta, A_log, dt_bias)]
    return *fresh, torch.empty_like(grad_final, dtype=dtype, memory_format=torch.contiguous_format)


def _remember(ctx, inputs, output):
    *tensors, initial_state, cu_seqlens, lower_bound, _ = inputs
    ctx.save_for_backward(*tensors, cu_seqlens, output[2])
    ctx.lower_bound, ctx.has_state = lower_bound, initial_state is not None
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, backward, grad_o, grad_final, _):
    *tensors, cu_seqlens, kept = ctx.saved_tensors
    *grads, grad_state = backward(*tensors, cu_seqlens, ctx.lower_bound, kept, grad_o, grad_final)
    return *grads, grad_state if ctx.has_state else None, None, None, None


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor dt_bias"
_chunked = registered(
    "kimi_hf::kda_chunked",
    schema=f"({_INPUTS}, Tensor? initial_state, Tensor? cu_seqlens, float? lower_bound, bool keep)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    backward_schema=f"({_INPUTS}, Tensor? cu_seqlens, float? lower_bound, Tensor kept, Tensor grad_o, Tensor grad_final)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    backward=_backward,
    backward_fake=_backward_fake,
    remember=_remember,
    differentiate=_differentiate,
)


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
    if steps_serve(q.shape[1], cu_seqlens, initial_state, *inputs):
        # Everything small is done for key and query at once: at one token the calls themselves are what takes time.
        dtype = checks.compute_dtype(q.dtype)
        sides = torch.stack([k, q], 3).to(dtype)
        inverse = torch.linalg.vector_norm(sides, dim=-1, keepdim=True).square_().add_(EPS).rsqrt_()
        inverse[..., 1, :].mul_(q.shape[-1] ** -0.5)
        decay = kda_log_decay(g.to(dtype), A_log, dt_bias, lower_bound).exp_()
        write = torch.sigmoid(beta.to(dtype))
        o, final = delta_steps(sides * inverse, v, decay, write, initial_state, inplace_state)
        return o, final if output_final_state or inplace_state else None
    keep = checks.needs_gradient(initial_state, *inputs)
    o, final, _ = _chunked(*inputs, initial_state, cu_seqlens, lower_bound, keep)
    if inplace_state:
        final = initial_state.copy_(final)
    return o, final if output_final_state or inplace_state else None
