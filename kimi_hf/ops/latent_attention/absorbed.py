"""The absorbed form: queries and contexts are taken through kv_b_weight, keys and values stay the latent."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.continued_attention import continued_attention, worth_continuing
from kimi_hf.ops.latent_attention.masks import masked_softmax, visibility

# Without gradients, elements of absorbed scores held at a time.
SCORES = 1 << 22
# Rows (heads x queries) up to which fp32 scores are computed keys-first, where a matrix-matrix product with few rows
# reads the latent faster. Low precision always goes keys-first: the other way round the whole latent is re-ordered.
FEW_ROWS = 16
# Rows from which, and ranks up to which, the fused kernel pays although it copies the latent once: with a small rank the
# passes over the scores cost more than the products.
MANY_ROWS, SMALL_RANK = 64, 128


def absorbed_form(
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
    """All heads share one key and one value, the latent: heads and queries are rows of one product per batch row."""
    batch, queries, heads, nope = q_nope.shape
    keys = latent.shape[1]
    absorbed = torch.einsum("btan,anr->batr", q_nope, kv_b_weight[:, :nope])
    rope = q_rope.transpose(1, 2)  # [B, A, T, r]
    causal = mask is None and is_causal and not need_weights
    thin = heads * queries >= MANY_ROWS and latent.shape[2] <= SMALL_RANK
    if causal and thin and worth_continuing(latent, queries, keys - queries):
        context = _fused(absorbed, rope, latent, k_rope, scale)
        return torch.einsum("btar,avr->btav", context, kv_b_weight[:, nope:]), None
    visible = visibility(mask, is_causal, queries, keys, latent.device)
    step = queries
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        step = max(1, SCORES // max(1, batch * heads * keys))
    contexts, weights = [], []
    for start in range(0, queries, step):
        some = slice(start, start + step)
        scores = _latent_scores(absorbed[:, :, some], rope[:, :, some], latent, k_rope, scale)
        cut = [x[:, :, some] if x is not None and x.shape[2] > 1 else x for x in (visible, mask)]
        probabilities = masked_softmax(scores, *cut, checks.compute_dtype(scores.dtype)).to(latent.dtype)
        context = probabilities.flatten(1, 2) @ latent
        contexts.append(context.view(batch, heads, -1, latent.shape[2]))
        weights.append(probabilities if need_weights else None)
    if len(contexts) > 1:
        contexts = [torch.cat(contexts, dim=2)]
        weights = [torch.cat(weights, dim=2) if need_weights else None]
    return torch.einsum("batr,avr->btav", contexts[0], kv_b_weight[:, nope:]), weights[0]


def _fused(absorbed: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, scale: float) -> Tensor:
    """Context [B, T, A, R] after a past; the keys [c | k_r] serve as values too, so nothing is held per head."""
    heads = absorbed.shape[1]
    both = torch.cat([latent, k_rope], dim=-1)[:, None].expand(-1, heads, -1, -1)
    context = continued_attention(torch.cat([absorbed, rope], dim=-1), both, both, scale=scale)
    return context[..., : latent.shape[2]]


def _latent_scores(absorbed: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, scale: float) -> Tensor:
    """scale (absorbed . c_s + q_r . k_r,s): [B, A, T, R] and [B, A, T, r] -> [B, A, T, S]."""
    batch, heads, queries, _ = absorbed.shape
    absorbed, rope = absorbed.flatten(1, 2), rope.reshape(batch, heads * queries, -1)
    if heads * queries <= FEW_ROWS or latent.dtype in (torch.bfloat16, torch.float16):
        scores = torch.baddbmm(latent @ absorbed.mT, k_rope, rope.mT, beta=scale, alpha=scale).mT
    else:
        scores = torch.baddbmm(absorbed @ latent.mT, rope, k_rope.mT, beta=scale, alpha=scale)
    return scores.unflatten(1, (heads, queries))
