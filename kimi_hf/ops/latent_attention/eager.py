"""Latent attention in plain PyTorch: fused attention over expanded keys, or plain products against the latent."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.ops.latent_attention.absorbed import absorbed_form
from kimi_hf.ops.latent_attention.direct import direct_form
from kimi_hf.ops.latent_attention.reference import latent_attention_reference


def latent_attention_eager(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b_weight: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    form: str | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.latent_attention.latent_attention`; kv_b_weight is [A, n + v, R], a mask is 4-D."""
    inputs = (q_nope, q_rope, latent, k_rope, kv_b_weight)
    if need_weights and form != "absorbed":
        return latent_attention_reference(
            *inputs, scale=scale, mask=mask, is_causal=is_causal, form=form, need_weights=True
        )
    if form is None:
        form = cheaper_form(
            q_nope.shape[1], latent.shape[1], q_nope.shape[3], q_rope.shape[3], kv_b_weight.shape[1], latent.shape[2]
        )
    if form == "direct":
        return direct_form(*inputs, scale=scale, mask=mask, is_causal=is_causal), None
    return absorbed_form(*inputs, scale=scale, mask=mask, is_causal=is_causal, need_weights=need_weights)


def cheaper_form(queries: int, keys: int, nope: int, rope: int, nope_and_v: int, rank: int) -> str:
    """The form with fewer multiply-adds a head. Causality halves the pairs of both alike, so all pairs are counted.

    Direct: every key is expanded, a pair costs keys n + r and values padded to the same width (the fused kernel wants
    that). Absorbed: every query is expanded instead, a pair costs R + r for the score and R for the value.
    """
    expansion = rank * nope_and_v
    direct = expansion * keys + (nope + rope + max(nope + rope, nope_and_v - nope)) * queries * keys
    absorbed = expansion * queries + (2 * rank + rope) * queries * keys
    return "absorbed" if absorbed < direct else "direct"
