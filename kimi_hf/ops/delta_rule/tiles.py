"""Cutting packed or batched sequences into tiles that fit the cache, and moving tokens in and out of them.

A tile is some sequences x some heads ("lanes") x some consecutive chunks. Sequences are taken longest first, so that the
ones that have ended are always the last lanes and drop out of the scan. Tokens past the end of a sequence are padding:
zero keys, queries and values, and a decay of 1 (see `Tile.padding`), which leave the state alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of one [lanes, chunks, C, K] array of a tile. Some twelve of them are live at once; at 1 MB each they stay in
# the last-level cache, and the part a single step of the scan touches (a quarter) in the second level.
TILE_ELEMENTS = 1 << 18
SCAN_SHARE = 4
LONGEST_CHUNK = 32


class Span(NamedTuple):
    """One sequence: tokens start .. start + length of a row of the batch."""

    row: int
    start: int
    length: int


@dataclass
class Group:
    """Lanes that are scanned together: positions (in the sorted order) and heads, with their segments of chunks."""

    sequences: list[int]  # indices of the original sequences, longest first
    heads: slice
    tiles: list[Tile]

    @property
    def lanes(self) -> int:
        return len(self.sequences) * (self.heads.stop - self.heads.start)


class Tile:
    """`rounds` chunks of `chunk` tokens from chunk number `first` on, of some sequences and heads."""

    def __init__(self, spans: list[Span], heads: slice, first: int, rounds: int, chunk: int, device: torch.device):
        self.spans, self.heads, self.rounds, self.chunk = spans, heads, rounds, chunk
        self.sequences, self.num_heads = len(spans), heads.stop - heads.start
        self.lanes = self.sequences * self.num_heads
        self.chunks = self.lanes * rounds
        self.begin = first * chunk
        ends = [min(self.begin + rounds * chunk, span.length) for span in spans]
        self.valid = [end - self.begin for end in ends]
        full = rounds * chunk
        rows = [span.row for span in spans]
        self._block = len(set(ends)) == 1 and rows == list(range(rows[0], rows[0] + len(rows)))
        self.padding: Tensor | None = None  # [rounds, sequences, 1, C] bool, None when there is no padding
        if min(self.valid) < full:
            past = torch.arange(full, device=device) >= torch.tensor(self.valid, device=device)[:, None]
            self.padding = past.view(self.sequences, rounds, 1, chunk).transpose(0, 1)
        if not self._block:
            self._gather_index(device)

    def _gather_index(self, device: torch.device) -> None:
        """Token positions in the packed row, sequences after each other; padding points at a token of its sequence."""
        offsets = torch.arange(self.rounds * self.chunk, device=device)
        starts = torch.tensor([span.start + self.begin for span in self.spans], device=device)[:, None]
        last = torch.tensor(self.valid, device=device)[:, None] - 1
        self._index = starts + torch.minimum(offsets, last)  # [sequences, rounds * C]
        self._real = (offsets <= last).view(-1).nonzero().squeeze(1)
        self._real_index = self._index.view(-1)[self._real]

    def take(self, x: Tensor) -> Tensor:
        """x [B, T, H, ...] -> [rounds, sequences, heads, C, ...], zero at padding. A view where that is possible."""
        full = self.rounds * self.chunk
        if self._block:
            y = self._slice(x)
            if self.valid[0] < full:
                padded = y.new_zeros(y.shape[0], full, *y.shape[2:])
                padded[:, : self.valid[0]] = y
                y = padded
        else:
            y = x[0, :, self.heads][self._index]
            if self.padding is not None:
                past = self.padding.transpose(0, 1).reshape(self.sequences, full)
                y[past] = 0
        y = y.unflatten(1, (self.rounds, self.chunk))  # [sequences, rounds, C, heads, ...]
        return y.permute(1, 0, 3, 2, *range(4, y.dim()))

    def put(self, target: Tensor, values: Tensor) -> None:
        """The inverse of `take`: write [rounds, sequences, heads, C, ...] to target [B, T, H, ...], without padding."""
        values = values.permute(1, 0, 3, 2, *range(4, values.dim()))  # [sequences, rounds, C, heads, ...]
        if not self._block:
            flat = values.flatten(0, 2).index_select(0, self._real)
            target[0, :, self.heads][self._real_index] = flat.to(target.dtype)
            return
        y = self._slice(target)
        whole, rest = divmod(self.valid[0], self.chunk)
        if whole:
            y[:, : whole * self.chunk].unflatten(1, (whole, self.chunk)).copy_(values[:, :whole])
        if rest:
            y[:, whole * self.chunk :].copy_(values[:, whole, :rest])

    def _slice(self, x: Tensor) -> Tensor:
        span = self.spans[0]
        begin = span.start + self.begin
        return x[span.row : span.row + self.sequences, begin : begin + self.valid[0], self.heads]


def spans_of(batch: int, tokens: int, bounds: list[int] | None) -> list[Span]:
    """The sequences of a batch (bounds None) or of one packed row."""
    if bounds is None:
        return [Span(row, 0, tokens) for row in range(batch)]
    return [Span(0, start, end - start) for start, end in zip(bounds, bounds[1:], strict=False)]


def chunk_length(spans: list[Span]) -> int:
    """`LONGEST_CHUNK`, or the smallest power of two that holds the longest sequence."""
    longest = max((span.length for span in spans), default=1)
    return min(LONGEST_CHUNK, 1 << max(longest - 1, 0).bit_length())


def plan(spans: list[Span], heads: int, width: int, chunk: int, device: torch.device) -> Iterator[Group]:
    """Groups of lanes and their tiles. `width` is the larger head dimension.

    Every (sequence, head) with at least one token is in exactly one group.
    """
    order = sorted((i for i, span in enumerate(spans) if span.length > 0), key=lambda i: -spans[i].length)
    if not order:
        return
    most_rounds = math.ceil(spans[order[0]].length / chunk)
    capacity = max(1, TILE_ELEMENTS // (chunk * width))  # lanes x rounds of a tile
    lanes = max(1, capacity // min(most_rounds, SCAN_SHARE))
    head_groups = math.ceil(heads / min(heads, lanes))
    per_group = max(1, lanes // math.ceil(heads / head_groups))
    for start in range(0, len(order), per_group):
        members = order[start : start + per_group]
        for part in range(head_groups):
            cut = slice(part * heads // head_groups, (part + 1) * heads // head_groups)
            tiles = list(_segments([spans[i] for i in members], cut, capacity, chunk, device))
            yield Group(members, cut, tiles)


def _segments(spans: list[Span], heads: slice, capacity: int, chunk: int, device: torch.device) -> Iterator[Tile]:
    """Consecutive chunks, cut where the tile is full or where a sequence ends."""
    rounds = [math.ceil(span.length / chunk) for span in spans]
    first = 0
    while first < rounds[0]:
        active = sum(r > first for r in rounds)
        most = max(1, capacity // (active * (heads.stop - heads.start)))
        stop = min(first + most, rounds[active - 1])
        yield Tile(spans[:active], heads, first, stop - first, chunk, device)
        first = stop
