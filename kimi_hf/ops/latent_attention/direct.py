"""The direct form: keys and values expanded from the latent, then attention in blocks of heads and queries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from kimi_hf.ops.latent_attention.masks import Window, windows

# Without gradients, elements of expanded keys and values held at a time: 32 MiB in fp32. Larger temporaries are mapped
# anew on every call and touched for the first time, which costs as much as the arithmetic.
EXPANDED = 1 << 23


def direct_form(
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
    """Inputs as in `latent_attention_eager` -> context [B, T, A, v]; without gradients a few heads at a time."""
    inputs = (q_nope, q_rope, latent, k_rope, kv_b_weight)
    heads, nope_and_v, _ = kv_b_weight.shape
    batch, queries, _, nope = q_nope.shape
    keys = latent.shape[1]
    # gradients keep all expanded heads anyway, and a compiled graph wants one piece
    recorded = torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
    # Low precision without gradients: the fused CPU kernel multiplies in fp32 there, plain products are 1.6 times
    # faster and round where the release does.
    plain = not recorded and latent.device.type == "cpu" and latent.dtype in (torch.bfloat16, torch.float16)
    attend = _attend_plain if plain else _attend_fused
    blocks = list(windows(mask, is_causal, queries, keys, q_nope, square=not plain))
    group = heads
    if not recorded:
        width = 2 * (nope + q_rope.shape[3]) + nope_and_v
        group = max(1, EXPANDED // max(1, batch * keys * width))
    if group >= heads:
        return attend(*_expanded(*inputs), blocks, scale)
    out = q_nope.new_empty(batch, queries, heads, nope_and_v - nope)
    for start in range(0, heads, group):
        some = slice(start, start + group)
        expanded = _expanded(q_nope[:, :, some], q_rope[:, :, some], latent, k_rope, kv_b_weight[some])
        out[:, :, some] = attend(*expanded, blocks, scale)
    return out


def _expanded(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, A, T, n + r], key [B, A, S, n + r] and value [B, A, S, v] of the heads in `weight` [A, n + v, R]."""
    heads, nope_and_v, rank = weight.shape
    nope = q_nope.shape[-1]
    expanded = linear(latent, weight.reshape(-1, rank)).unflatten(-1, (heads, -1))
    key, value = expanded.split([nope, nope_and_v - nope], dim=-1)
    key = torch.cat([key, k_rope.unsqueeze(2).expand(-1, -1, heads, -1)], dim=-1)
    query = torch.cat([q_nope, q_rope], dim=-1)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, blocks: list[Window], scale: float) -> Tensor:
    """-> context [B, T, A, v] by `scaled_dot_product_attention`."""
    v_head_dim = value.shape[-1]
    # The CPU flash kernel is taken only for values as wide as the keys; zero columns change nothing.
    width = max(key.shape[-1], v_head_dim)
    query, key, value = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    parts = []
    for block in blocks:
        part = scaled_dot_product_attention(
            query[:, :, block.queries],
            key[:, :, block.keys],
            value[:, :, block.keys],
            attn_mask=block.bias,
            is_causal=block.is_causal,
            scale=scale,
        )
        parts.append(part if block.alive is None else part.masked_fill(~block.alive, 0.0))
    context = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return context[..., :v_head_dim].transpose(1, 2)


@torch.no_grad()
def _attend_plain(query: Tensor, key: Tensor, value: Tensor, blocks: list[Window], scale: float) -> Tensor:
    """-> context [B, T, A, v] by two products and a softmax a block, rounded as in the reference."""
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, heads, value.shape[-1])
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    for block in blocks:
        scores = torch.bmm(query[:, block.queries], key[:, block.keys].mT).mul_(scale)
        shaped = scores.unflatten(0, (batch, heads))
        if block.bias is not None and block.bias.dtype == torch.bool:
            shaped.masked_fill_(~block.bias, float("-inf"))
        elif block.bias is not None:
            shaped += block.bias
        context = torch.bmm(torch.softmax(scores, dim=-1), value[:, block.keys]).unflatten(0, (batch, heads))
        if block.alive is not None:
            context.masked_fill_(~block.alive, 0.0)
        out[:, block.queries] = context.transpose(1, 2)
    return out
