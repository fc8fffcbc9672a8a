"""Multi-head latent attention (MLA) over the compressed latent: direct and absorbed forms of one function."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.autocast import autocast_dtype, no_autocast
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["latent_attention"]

FORMS = ("direct", "absorbed")
OPERATION = Operation(
    "latent_attention",
    Backend("reference", "kimi_hf.ops.latent_attention.reference", "latent_attention_reference"),
    Backend("eager", "kimi_hf.ops.latent_attention.eager", "latent_attention_eager"),
    Backend("triton", "kimi_hf.ops.latent_attention.kernels", "latent_attention_triton", kernel_limits.absorbed),
)


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b_weight: Tensor,
    *,
    v_head_dim: int,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = True,
    form: str | None = None,
    need_weights: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale (q_n k_n + q_r k_r)) v with [k_n | v] = kv_b_weight latent per head and k_r shared by the heads.

    The direct form expands keys and values for all S positions; the absorbed form moves the expansion to the query and
    to the context, and reads the latent only: (W_UK^T q_n) . c = q_n . (W_UK c). `form=None` takes the one with fewer
    flops. A query that may see no key gets zeros, with zero gradients.

    Args:
        q_nope: [B, T, A, n]. q_rope: [B, T, A, r] (r may be 0).
        latent: c [B, S, R], after its norm. k_rope: [B, S, r].
        kv_b_weight: [A * (n + v), R], rows per head [k n | v].
        v_head_dim: v.
        scale: factor of the scores, (n + r)^(-1/2) in the release, also in the absorbed form.
        mask: None, or broadcastable to [B, 1, T, S]: bool (True = may attend) or additive (entries at or below the
            dtype's lowest finite value count as closed). A given mask alone decides; `is_causal` is then not read.
        is_causal: without a mask, query t sees keys 0 .. S - T + t (bottom-right aligned).
        form: "direct", "absorbed" or None.
        need_weights: also return the probabilities; computed by plain matmuls, direct unless form says otherwise, with
            scores, scaled scores, probabilities and context rounded to the activation dtype.
        backend: None for automatic.
    All tensors are taken in q_nope.dtype (under autocast in autocast's).

    Returns: context [B, T, A, v], and probabilities [B, A, T, S] or None.
    Raises: ShapeError for shapes, dtypes or an unknown form; BackendError when a named backend cannot serve.
    Source: kimi_k3.md 4 and 5.6.
    """
    checks.require_rank("latent_attention", "q_nope", q_nope, 4, "[B, T, A, n]")
    checks.require_rank("latent_attention", "latent", latent, 3, "[B, S, R]")
    batch, queries, heads, nope = q_nope.shape
    keys, rank = latent.shape[1:]
    if not keys:
        raise ShapeError("latent_attention: latent has no positions, expected at least the query's own")
    checks.require_rank("latent_attention", "q_rope", q_rope, 4, "[B, T, A, r]")
    rope = q_rope.shape[-1]
    checks.require_shape("latent_attention", "q_rope", q_rope, (batch, queries, heads, rope), "[B, T, A, r]")
    checks.require_shape("latent_attention", "latent", latent, (batch, keys, rank), "[B, S, R]")
    checks.require_shape("latent_attention", "k_rope", k_rope, (batch, keys, rope), "[B, S, r]")
    rows = heads * (nope + v_head_dim)
    checks.require_shape("latent_attention", "kv_b_weight", kv_b_weight, (rows, rank), "[A * (n + v), R]")
    checks.require_floating(
        "latent_attention", q_nope=q_nope, q_rope=q_rope, latent=latent, k_rope=k_rope, kv_b_weight=kv_b_weight
    )
    if form is not None and form not in FORMS:
        raise ShapeError(f"latent_attention: form is {form!r}, expected one of {FORMS} or None for the cheaper one")
    if mask is not None:
        _check_mask(mask, (batch, 1, queries, keys))
        mask = mask[(None,) * (4 - mask.dim())]
    dtype = autocast_dtype(q_nope)
    tensors = [x.to(dtype) for x in (q_nope, q_rope, latent, k_rope, kv_b_weight.view(heads, -1, rank))]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    facts = {"form": form, "need_weights": need_weights, "rank": rank, "needs_grad": needs_grad}
    with no_autocast(q_nope):
        return OPERATION.pick(tensors[0], backend, **facts)(
            *tensors, scale=scale, mask=mask, is_causal=is_causal, form=form, need_weights=need_weights
        )


def _check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    fits = mask.dim() <= 4 and all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(shape), strict=False))
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ShapeError(
            f"latent_attention: mask is {mask.dtype} {tuple(mask.shape)}, expected bool (True = may attend) or an "
            f"additive float mask, broadcastable to [B, 1, T, S] = {shape}"
        )
