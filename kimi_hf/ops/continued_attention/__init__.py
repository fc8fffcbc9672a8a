"""Causal softmax attention of new tokens that follow a cached past, without a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["continued_attention", "worth_continuing"]

OPERATION = Operation(
    "continued_attention",
    Backend("reference", "kimi_hf.ops.continued_attention.reference", "continued_attention_reference"),
    Backend("eager", "kimi_hf.ops.continued_attention.eager", "continued_attention_eager"),
)


def worth_continuing(like: Tensor, queries: int, past: int) -> bool:
    """Whether `continued_attention` should take the place of attention with a dense [T, S] mask.

    It does where torch's fused CPU kernel runs, which reports the softmax's normaliser; that kernel gives no gradients
    through it, and a compiled graph wants shapes that do not depend on the past.
    """
    plain = like.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return plain and queries > 1 and past > 0


def continued_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, backend: str | None = None) -> Tensor:
    """o_t = sum_s softmax_s(scale q_t . k_s) v_s over s <= S - T + t: the last T of S positions ask.

    Eagerly in two parts, the past that all queries see and the causal square of the new tokens, merged by their
    normalisers: o = (z1 o1 + z2 o2) / (z1 + z2). No [T, S] mask is made. No gradients.

    Args:
        q: [B, A, T, d]. k: [B, A, S, d], S >= T. v: [B, A, S, v].
        scale: factor of the scores.
        backend: None for automatic.
    Returns: [B, T, A, v] in q's dtype.
    Raises: ShapeError for shapes, and when a gradient is asked for.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.require_rank("continued_attention", name, x, 4, "[B, A, S, d]")
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    checks.require_shape("continued_attention", "k", k, (batch, heads, keys, width), "[B, A, S, d]")
    checks.require_shape("continued_attention", "v", v, (batch, heads, keys, v.shape[3]), "[B, A, S, v]")
    checks.require_floating("continued_attention", q=q, k=k, v=v)
    if keys < queries:
        raise ShapeError(f"continued_attention: {queries} queries but {keys} keys; the queries' own are among the keys")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ShapeError("continued_attention gives no gradients; use it under torch.no_grad()")
    return OPERATION.pick(q, backend)(q, k, v, scale=scale)
