"""Cutting pointwise work into pieces whose temporaries stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

# 256 KB of fp32 a temporary: a handful of them fit the second-level cache.
BLOCK_ELEMENTS = 1 << 16


def blocks(rows: int, width: int, least: int = 1) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) of at least `least` rows that hold about `BLOCK_ELEMENTS` elements of `width` a row."""
    size = max(least, BLOCK_ELEMENTS // max(width, 1))
    for start in range(0, rows, size):
        yield start, min(start + size, rows)
