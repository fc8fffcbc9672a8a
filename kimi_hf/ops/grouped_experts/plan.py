"""Which rows each expert gets: (token, slot) pairs sorted by expert, in segments whose temporaries stay small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of gate_up in a segment: small enough to be reused from the heap (never mapped anew), large enough that
# a segment of short experts makes one call to the activation.
SEGMENT = 1 << 19


@dataclass(frozen=True)
class Segment:
    """Consecutive sorted pairs, and the rows in it of each of its experts."""

    span: slice
    experts: tuple[tuple[int, slice], ...]


@dataclass(frozen=True)
class Plan:
    """`pair` [pairs]: position in the flattened [N, k]; `token` [pairs]: its row of hidden; both sorted by expert."""

    pair: Tensor
    token: Tensor
    segments: tuple[Segment, ...]

    @property
    def pairs(self) -> int:
        return len(self.pair)


def make_plan(indices: Tensor, experts: int, twice_inner: int, alone: bool = False) -> Plan:
    """Sort the pairs of indices [N, k] once; those of no expert are dropped. `alone`: one expert a segment."""
    flat, pair = indices.reshape(-1).sort(stable=True)
    bounds = torch.searchsorted(flat, torch.arange(experts + 1, device=flat.device)).tolist()
    pair = pair[bounds[0] : bounds[-1]]
    limit = max(1, SEGMENT // max(1, twice_inner))
    segments: list[Segment] = []
    start, members = 0, []
    for expert in range(experts):
        begin, end = bounds[expert] - bounds[0], bounds[expert + 1] - bounds[0]
        while begin < end:
            if begin - start >= limit or (members and (alone or end - start > limit)):
                segments.append(Segment(slice(start, begin), tuple(members)))
                start, members = begin, []
            stop = min(end, start + limit)
            members.append((expert, slice(begin - start, stop - start)))
            begin = stop
    if members:
        segments.append(Segment(slice(start, len(pair)), tuple(members)))
    return Plan(pair, pair // indices.shape[1], tuple(segments))
