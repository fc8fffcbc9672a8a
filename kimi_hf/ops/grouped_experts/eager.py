"""Routed experts in plain PyTorch: pairs sorted by expert once, each chosen expert's rows as one product.

CPU: per-expert slices in small segments (torch's grouped product is a loop over the same slices there). GPUs and
compiled graphs: `whole.py`, with torch's grouped product where it takes the dtype and the alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops import checks
from kimi_hf.ops.grouped_experts.plan import Plan, make_plan
from kimi_hf.ops.grouped_experts.stack import FetchedStack, Stack, add_gradient, multiply, product
from kimi_hf.ops.grouped_experts.whole import grouped_experts_whole
from kimi_hf.ops.mxfp4.packed import PackedWeight

Activation = Callable[[Tensor], Tensor]


def grouped_experts_eager(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor | PackedWeight,
    down_proj: Tensor | PackedWeight,
    act: Activation,
) -> Tensor:
    """See `kimi_hf.ops.grouped_experts.grouped_experts`."""
    if torch.compiler.is_compiling() or hidden.device.type != "cpu":
        return grouped_experts_whole(hidden, indices, weights, gate_up_proj, down_proj, act)
    first, second = Stack.of(gate_up_proj), Stack.of(down_proj)
    tensors = (hidden, weights, *first.tensors, *second.tensors)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if len(hidden) == 1 and not recorded:
        return _one_token(hidden, indices, weights, act, first, second)
    plan = make_plan(indices, gate_up_proj.shape[0], gate_up_proj.shape[1])
    if recorded:
        return _GroupedExperts.apply(hidden, weights, plan, act, first, second, *first.tensors, *second.tensors)
    return _forward(hidden, weights, plan, act, first, second, None)


def fetched_experts_eager(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: FetchedStack, down: FetchedStack, act: Activation
) -> Tensor:
    """See `kimi_hf.ops.grouped_experts.fetched_experts`; one expert after another, so that each is fetched once."""
    plan = make_plan(indices, gate_up.experts, gate_up.rows, alone=True)
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        return _GroupedExperts.apply(hidden, weights, plan, act, gate_up, down)
    return _forward(hidden, weights, plan, act, gate_up, down, None)


class _GroupedExperts(torch.autograd.Function):
    """Saves the inputs and gate_up of every pair [pairs, 2F]; the backward recomputes the activation from it.

    With d_n the gradient of y_n and u = down[e]^T d_n, a pair's gradients are: of its weight act . u, of its activation
    weight * u; so expert outputs are neither kept nor recomputed.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weights: Tensor, plan: Plan, act: Activation, first: Stack, second: Stack, *tensors: Tensor
    ):
        kept = hidden.new_empty(plan.pairs, first.rows)
        out = _forward(hidden, weights, plan, act, first, second, kept)
        ctx.save_for_backward(hidden, weights, kept, *tensors)
        # the stacks without their tensors, which autograd keeps
        ctx.plan, ctx.act, ctx.stacks = plan, act, (replace(first, tensors=()), replace(second, tensors=()))
        ctx.split = len(first.tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, weights, kept, *tensors = ctx.saved_tensors
        first = replace(ctx.stacks[0], tensors=tuple(tensors[: ctx.split]))
        second = replace(ctx.stacks[1], tensors=tuple(tensors[ctx.split :]))
        wide = checks.compute_dtype(hidden.dtype)
        d_hidden = hidden.new_zeros(hidden.shape, dtype=wide) if ctx.needs_input_grad[0] else None
        d_weights = weights.new_zeros(weights.numel(), dtype=wide)
        d_tensors = [torch.zeros_like(t) if n else None for t, n in zip(tensors, ctx.needs_input_grad[6:], strict=True)]
        d_first, d_second = (d_tensors[0], d_tensors[ctx.split]) if tensors else (None, None)
        flat_weights = weights.reshape(-1)
        for segment in ctx.plan.segments:
            pair, token = ctx.plan.pair[segment.span], ctx.plan.token[segment.span]
            gate_up, d = kept[segment.span], grad.index_select(0, token)
            with torch.enable_grad():
                leaf = gate_up.detach().requires_grad_()
                inner = ctx.act(leaf)
            u = multiply(d, second, segment.experts, transposed=True)
            scale = flat_weights.index_select(0, pair).to(wide)[:, None]
            d_weights[pair] = (inner.detach().to(wide) * u).sum(-1)
            d_inner = (u * scale).to(u.dtype)
            (d_gate_up,) = torch.autograd.grad(inner, leaf, d_inner)
            if d_hidden is not None:
                d_x = multiply(d_gate_up, first, segment.experts, transposed=True)
                d_hidden.index_add_(0, token, d_x.to(wide))
            weighted = (inner.detach() * scale).to(inner.dtype) if d_second is not None else None
            x = hidden.index_select(0, token) if d_first is not None else None
            for expert, rows in segment.experts:
                if weighted is not None:
                    add_gradient(d_second[expert], d[rows], weighted[rows])
                if x is not None:
                    add_gradient(d_first[expert], d_gate_up[rows], x[rows])
        d_weights = d_weights.view(weights.shape).to(weights.dtype)
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weights, None, None, None, None, *d_tensors


def _one_token(
    hidden: Tensor, indices: Tensor, weights: Tensor, act: Activation, first: Stack, second: Stack
) -> Tensor:
    """Decoding: nothing to sort, gather or scatter, so that reading k experts is all that is left."""
    wide = checks.compute_dtype(hidden.dtype)
    chosen = [(slot, expert) for slot, expert in enumerate(indices[0].tolist()) if 0 <= expert < first.experts]
    gate_up = hidden.new_zeros(indices.shape[1], first.rows)
    for slot, expert in chosen:
        product(hidden, first, expert, out=gate_up[slot : slot + 1])
    inner = act(gate_up)
    y = hidden.new_zeros(indices.shape[1], second.rows)
    for slot, expert in chosen:
        product(inner[slot : slot + 1], second, expert, out=y[slot : slot + 1])
    return (weights.to(wide) @ y.to(wide)).to(hidden.dtype)


def _forward(
    hidden: Tensor, weights: Tensor, plan: Plan, act: Activation, first: Stack, second: Stack, kept: Tensor | None
) -> Tensor:
    """`kept` [pairs, 2F], where given, receives gate_up."""
    wide = checks.compute_dtype(hidden.dtype)
    out = hidden.new_zeros(hidden.shape, dtype=wide)
    flat_weights = weights.reshape(-1)
    for segment in plan.segments:
        token = plan.token[segment.span]
        x = hidden.index_select(0, token)
        inner = act(multiply(x, first, segment.experts, None if kept is None else kept[segment.span]))
        y = multiply(inner, second, segment.experts)
        scale = flat_weights.index_select(0, plan.pair[segment.span]).to(wide)[:, None]
        out.index_add_(0, token, y.mul_(scale) if y.dtype == wide else y.to(wide).mul_(scale))
    return out.to(hidden.dtype)
