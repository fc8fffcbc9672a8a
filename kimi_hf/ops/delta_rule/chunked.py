"""The chunked delta rule as a differentiable function of raw inputs, for any rule that can load and unload tiles.

Forward and backward walk the same tiles. Nothing of the size of the inputs is kept but the inputs themselves and the
state at the start of each tile; the backward pass recomputes a tile from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kimi_hf.ops.delta_rule.chunk import TileGradients, backward_tile, forward_tile
from kimi_hf.ops.delta_rule.pairs import Tokens, Work
from kimi_hf.ops.delta_rule.tiles import Group, Tile, chunk_length, plan, spans_of


class Rule(Protocol):
    """How an operation's raw inputs become `Tokens`, and gradients of tokens become gradients of the raw inputs.

    A rule is made anew for every call. inputs[0] is q [B, T, H, K], inputs[2] is v [B, T, H, V].
    """

    inputs: Sequence[Tensor | None]

    def load(self, tile: Tile, work: Work) -> Tokens: ...

    def unload(self, tile: Tile, tokens: Tokens, grads: TileGradients, work: Work) -> None:
        """Write or add the tile's part to `gradients`."""
        ...

    def start_backward(self) -> None:
        """Allocate `gradients`, one entry an input."""
        ...

    gradients: list[Tensor | None]


def chunked_forward(
    rule: Rule, initial_state: Tensor | None, bounds: list[int] | None, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o [B, T, H, V] in v.dtype, the final state [N, H, K, V], and with `keep` the state at each tile's start."""
    q, v = rule.inputs[0], rule.inputs[2]
    groups, work = _groups(rule, bounds), Work(q, dtype)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    N = q.shape[0] if bounds is None else len(bounds) - 1
    shape = (N, q.shape[2], q.shape[3], v.shape[3])
    final = torch.zeros(shape, dtype=dtype, device=q.device) if initial_state is None else initial_state.clone()
    kept = []
    for group in groups:
        S = final[group.sequences, group.heads].flatten(0, 1)  # indexing copies
        for tile in group.tiles:
            active = S[: tile.lanes]
            if keep:
                kept.append(active.clone())
            tile.put(o, forward_tile(tile, rule.load(tile, work), active, work))
        final[group.sequences, group.heads] = S.unflatten(0, (len(group.sequences), -1))
    return o, final, kept


def chunked_backward(
    rule: Rule,
    kept: list[Tensor],
    bounds: list[int] | None,
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Fills `rule.gradients`; returns the gradient of the initial state [N, H, K, V]."""
    q, v = rule.inputs[0], rule.inputs[2]
    groups, work = _groups(rule, bounds), Work(q, dtype)
    rule.start_backward()
    N = q.shape[0] if bounds is None else len(bounds) - 1
    shape = (N, q.shape[2], q.shape[3], v.shape[3])
    grad_state = torch.zeros(shape, dtype=dtype, device=q.device) if grad_final is None else grad_final.to(dtype).clone()
    tile_starts = iter(kept)
    for group in groups:
        starts = [next(tile_starts) for _ in group.tiles]
        Z = grad_state[group.sequences, group.heads].flatten(0, 1)
        for tile, start in zip(reversed(group.tiles), reversed(starts), strict=True):
            tokens = rule.load(tile, work)
            S = work.get("S", *start.shape).copy_(start)
            grads = backward_tile(tile, tokens, S, tile.take(grad_o), Z[: tile.lanes], work)
            rule.unload(tile, tokens, grads, work)
        grad_state[group.sequences, group.heads] = Z.unflatten(0, (len(group.sequences), -1))
    return grad_state


def _groups(rule: Rule, bounds: list[int] | None) -> list[Group]:
    q, v = rule.inputs[0], rule.inputs[2]
    spans = spans_of(q.shape[0], q.shape[1], bounds)
    return list(plan(spans, q.shape[2], max(q.shape[3], v.shape[3]), chunk_length(spans), q.device))
