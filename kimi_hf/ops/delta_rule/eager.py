"""DeltaNet and Gated DeltaNet in plain PyTorch: chunks as batched matrix products, single steps for a few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.delta_rule.chunked import chunked_backward, chunked_forward, forward_outputs
from kimi_hf.ops.delta_rule.rule import DeltaRule
from kimi_hf.ops.delta_rule.steps import delta_steps, steps_serve
from kimi_hf.ops.registered import registered


def _forward(q, k, v, beta, g, initial_state, cu_seqlens, scale, keep):
    bounds = None if cu_seqlens is None else checks.sequence_bounds("delta_rule", cu_seqlens, q.shape[1])
    with no_autocast(q):
        return chunked_forward(DeltaRule([q, k, v, beta, g], scale), initial_state, bounds, keep)


def _backward(q, k, v, beta, g, cu_seqlens, scale, kept, grad_o, grad_final):
    rule = DeltaRule([q, k, v, beta, g], scale)
    bounds = None if cu_seqlens is None else checks.sequence_bounds("delta_rule", cu_seqlens, q.shape[1])
    with no_autocast(q):
        grad_state = chunked_backward(rule, kept, bounds, grad_o, grad_final)
        *grads, grad_g = rule.finished_gradients()
        return *grads, q.new_empty(0) if grad_g is None else grad_g, grad_state


def _fake(q, k, v, beta, g, initial_state, cu_seqlens, scale, keep):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return forward_outputs(q, v, checks.compute_dtype(q.dtype), sequences, keep)


def _backward_fake(q, k, v, beta, g, cu_seqlens, scale, kept, grad_o, grad_final):
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, beta)]
    grad_g = q.new_empty(0) if g is None else torch.empty_like(g, memory_format=torch.contiguous_format)
    dtype = checks.compute_dtype(q.dtype)
    return *grads, grad_g, torch.empty_like(grad_final, dtype=dtype, memory_format=torch.contiguous_format)


def _remember(ctx, inputs, output):
    *tensors, initial_state, cu_seqlens, scale, _ = inputs
    ctx.save_for_backward(*tensors, cu_seqlens, output[2])
    ctx.scale, ctx.has_state, ctx.gated = scale, initial_state is not None, tensors[4] is not None
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, backward, grad_o, grad_final, _):
    *tensors, cu_seqlens, kept = ctx.saved_tensors
    *grads, grad_g, grad_state = backward(*tensors, cu_seqlens, ctx.scale, kept, grad_o, grad_final)
    grads.append(grad_g if ctx.gated else None)
    return *grads, grad_state if ctx.has_state else None, None, None, None


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g"
_chunked = registered(
    "kimi_hf::delta_rule_chunked",
    schema=f"({_INPUTS}, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool keep)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    backward_schema=f"({_INPUTS}, Tensor? cu_seqlens, float scale, Tensor kept, Tensor grad_o, Tensor grad_final)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    backward=_backward,
    backward_fake=_backward_fake,
    remember=_remember,
    differentiate=_differentiate,
)


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
    if steps_serve(q.shape[1], cu_seqlens, initial_state, *inputs):
        dtype = checks.compute_dtype(q.dtype)
        decay = None if g is None else g.to(dtype).exp()[..., None]
        sides = torch.stack([k.to(dtype), q.to(dtype) * scale], 3)
        o, final = delta_steps(sides, v, decay, beta.to(dtype), initial_state, inplace_state)
        return o, final if output_final_state or inplace_state else None
    keep = checks.needs_gradient(initial_state, *inputs)
    o, final, _ = _chunked(*inputs, initial_state, cu_seqlens, scale, keep)
    if inplace_state:
        final = initial_state.copy_(final)
    return o, final if output_final_state or inplace_state else None
