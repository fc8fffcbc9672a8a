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
from kimi_hf.ops.delta_rule.tiles import LONGEST_CHUNK, Group, Tile, chunk_length, plan, spans_of


class Rule(Protocol):
    """How an operation's raw inputs become `Tokens`, and gradients of tokens become gradients of the raw inputs.

    A rule is made anew for every call. inputs[0] is q [B, T, H, K], inputs[2] is v [B, T, H, V].
    """

    inputs: Sequence[Tensor | None]
    dtype: torch.dtype  # of the arithmetic and the state

    def load(self, tile: Tile, work: Work) -> Tokens: ...

    def unload(self, tile: Tile, tokens: Tokens, grads: TileGradients, work: Work) -> None:
        """Write or add the tile's part to `gradients`."""
        ...

    def start_backward(self) -> None:
        """Allocate `gradients`, one entry an input."""
        ...

    gradients: list[Tensor | None]


def chunked_forward(
    rule: Rule, initial_state: Tensor | None, bounds: list[int] | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, V] in v.dtype, the final state [N, H, K, V], and with `keep` the state at each tile's start."""
    q, v = rule.inputs[0], rule.inputs[2]
    groups, work = _groups(rule, bounds), Work(q, rule.dtype)
    sequences = q.shape[0] if bounds is None else len(bounds) - 1
    o, final, kept = forward_outputs(q, v, rule.dtype, sequences, keep)
    if initial_state is None:
        final.zero_()
    else:
        final.copy_(initial_state)
    row = 0
    for group in groups:
        S = final[group.sequences, group.heads].flatten(0, 1)  # indexing copies
        for tile in group.tiles:
            active = S[: tile.lanes]
            if keep:
                kept[row : row + tile.lanes] = active
                row += tile.lanes
            tile.put(o, forward_tile(tile, rule.load(tile, work), active, work))
        final[group.sequences, group.heads] = S.unflatten(0, (len(group.sequences), -1))
    return o, final, kept


def chunked_backward(rule: Rule, kept: Tensor, bounds: list[int] | None, grad_o: Tensor, grad_final: Tensor) -> Tensor:
    """Fills `rule.gradients`; returns the gradient of the initial state [N, H, K, V]."""
    q = rule.inputs[0]
    groups, work = _groups(rule, bounds), Work(q, rule.dtype)
    rule.start_backward()
    grad_state = grad_final.to(rule.dtype, copy=True, memory_format=torch.contiguous_format)
    row = 0
    for group in groups:
        rows = []
        for tile in group.tiles:
            rows.append(row)
            row += tile.lanes
        Z = grad_state[group.sequences, group.heads].flatten(0, 1)
        for tile, start in zip(reversed(group.tiles), reversed(rows), strict=True):
            tokens = rule.load(tile, work)
            S = work.get("S", tile.lanes, *kept.shape[1:]).copy_(kept[start : start + tile.lanes])
            grads = backward_tile(tile, tokens, S, tile.take(grad_o), Z[: tile.lanes], work)
            rule.unload(tile, tokens, grads, work)
        grad_state[group.sequences, group.heads] = Z.unflatten(0, (len(group.sequences), -1))
    return grad_state


def forward_outputs(
    q: Tensor, v: Tensor, dtype: torch.dtype, sequences: int, keep: bool, extra: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised o, final state and kept states, the last with room for one state a lane and chunk.

    The number of tiles depends on the lengths of the sequences; room that is not needed is never touched. The sizes
    follow from shapes alone, so that a compiler can know them. `extra` widens the states.
    """
    B, T, H, K = q.shape
    V = v.shape[3] + extra
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    rows = H * (sequences + B * T // LONGEST_CHUNK) if keep else 0
    return o, q.new_empty(sequences, H, K, V, dtype=dtype), q.new_empty(rows, K, V, dtype=dtype)


def _groups(rule: Rule, bounds: list[int] | None) -> list[Group]:
    q, v = rule.inputs[0], rule.inputs[2]
    spans = spans_of(q.shape[0], q.shape[1], bounds)
    return list(plan(spans, q.shape[2], max(q.shape[3], v.shape[3]), chunk_length(spans), q.device))
