"""Latent attention in plain PyTorch: fused attention over expanded keys, or plain products against the latent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kimi_hf.ops import checks
from kimi_hf.ops.latent_attention.masks import masked_softmax, visibility
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
    """See `kimi_hf.ops.latent_attention.latent_attention`; kv_b_weight is [A, n + v, R]."""
    inputs = (q_nope, q_rope, latent, k_rope, kv_b_weight)
    if need_weights and form != "absorbed":
        return latent_attention_reference(
            *inputs, scale=scale, mask=mask, is_causal=is_causal, form=form, need_weights=True
        )
    if form is None:
        v_head_dim = kv_b_weight.shape[1] - q_nope.shape[-1]
        flops = count_flops(
            q_nope.shape[1], latent.shape[1], q_nope.shape[-1], q_rope.shape[-1], v_head_dim, latent.shape[2]
        )
        form = min(flops, key=flops.get)
    if form == "absorbed":
        return _absorbed(*inputs, scale=scale, mask=mask, is_causal=is_causal, need_weights=need_weights)
    return _direct(*inputs, scale=scale, mask=mask, is_causal=is_causal), None


def count_flops(queries: int, keys: int, nope: int, rope: int, v_head_dim: int, rank: int) -> dict[str, int]:
    """Flops of one head of each form. Causality halves the pairs of both alike, so pairs are counted in full."""
    expansion = 2 * rank * (nope + v_head_dim)  # a key in the direct form, a query in the absorbed one
    # the fused kernel wants values as wide as keys, so the padding is paid for
    direct = expansion * keys + 2 * (nope + rope + max(nope + rope, v_head_dim)) * queries * keys
    return {"absorbed": expansion * queries + 2 * (2 * rank + rope) * queries * keys, "direct": direct}


def _direct(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b_weight: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    heads, _, rank = kv_b_weight.shape
    batch, queries, _, nope = q_nope.shape
    keys, v_head_dim = latent.shape[1], kv_b_weight.shape[1] - nope
    expanded = (latent @ kv_b_weight.reshape(-1, rank).T).view(batch, keys, heads, -1)
    key, value = expanded.split([nope, v_head_dim], dim=-1)
    key = torch.cat([key, k_rope.unsqueeze(2).expand(-1, -1, heads, -1)], dim=-1)
    query = torch.cat([q_nope, q_rope], dim=-1)
    # The CPU flash kernel is taken only for values as wide as the keys; zero columns change nothing.
    width = max(key.shape[-1], v_head_dim)
    query, key, value = (pad(x, (0, width - x.shape[-1])).transpose(1, 2) for x in (query, key, value))
    square = mask is None and is_causal and queries == keys
    bias, alive = (None, None) if square else _sdpa_mask(mask, is_causal, queries, keys, query)
    context = scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=square, scale=scale)
    if alive is not None:
        context = context.masked_fill(~alive, 0.0)
    return context[..., :v_head_dim].transpose(1, 2)


def _sdpa_mask(mask: Tensor | None, is_causal: bool, queries: int, keys: int, like: Tensor):
    """The mask for sdpa with closed rows opened (their softmax would be 0/0), and [B, 1, T, 1] which rows are alive."""
    visible = visibility(mask, is_causal, queries, keys, like.device)
    if visible is None:
        return None, None
    if mask is None and keys >= queries:
        return visible, None  # causal and no query without a key
    alive = visible.any(-1, keepdim=True)
    if mask is None or mask.dtype == torch.bool:
        return visible | ~alive, alive
    bias = torch.where(visible, mask.to(like.dtype), float("-inf"))
    return bias.masked_fill(~alive, 0.0), alive


def _absorbed(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b_weight: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """All heads share one key and value, the latent: heads and queries are rows of one product per batch row."""
    batch, queries, heads, nope = q_nope.shape
    keys, rank = latent.shape[1:]
    up_key, up_value = kv_b_weight[:, :nope], kv_b_weight[:, nope:]
    absorbed = torch.einsum("btan,anr->batr", q_nope, up_key).reshape(batch, heads * queries, rank)
    scores = torch.baddbmm(
        absorbed @ latent.mT, q_rope.transpose(1, 2).reshape(batch, heads * queries, -1), k_rope.mT
    )
    visible = visibility(mask, is_causal, queries, keys, latent.device)
    scores = scores.view(batch, heads, queries, keys) * scale
    weights = masked_softmax(scores, visible, mask, checks.compute_dtype(scores.dtype)).to(latent.dtype)
    context = (weights.view(batch, heads * queries, keys) @ latent).view(batch, heads, queries, rank)
    out = torch.einsum("batr,avr->btav", context, up_value)
    return out, weights if need_weights else None
