"""Masks of latent attention: which keys a query sees, in blocks of queries for the fused kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Queries a masked block. The fused CPU kernel skips the closed half only for its own square causal mask; blocks of
# this size, each with its keys cut to the visible range, come within 5 % of that for any mask.
BLOCK = 256
LONG = 2048  # from here on blocks of 2 * BLOCK, so that a gradient's per-block pieces stay few


@dataclass(frozen=True)
class Window:
    """A block of queries, the range of keys any of them sees, and the mask in between."""

    queries: slice
    keys: slice
    bias: Tensor | None = None  # bool or additive, [B or 1, 1, queries, keys]; closed rows are opened
    is_causal: bool = False
    alive: Tensor | None = None  # bool [B or 1, 1, queries, 1]: rows that see a key; None when all do


def visibility(mask: Tensor | None, is_causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which keys a query may see: bool, 4-D, broadcastable to [B, 1, T, S], or None when all see all."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    if not is_causal or queries == 1:
        return None
    return _causal(0, queries, queries, keys, device)


def masked_softmax(scores: Tensor, visible: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Softmax over the last dim in `dtype`; additive masks are added, closed keys and queries without any key get 0."""
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(scores.dtype)
    if visible is None:
        return torch.softmax(scores, dim=-1, dtype=dtype)
    # A row that is closed everywhere would be 0/0: the lowest finite value keeps it finite, the second fill zeroes it.
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, dtype=dtype).masked_fill(~visible, 0.0)


def windows(
    mask: Tensor | None, is_causal: bool, queries: int, keys: int, like: Tensor, *, square: bool
) -> Iterator[Window]:
    """The blocks in which `queries` queries attend to `keys` keys; additive masks come in `like`'s dtype.

    `square`: whether the plain causal square may come as one block marked `is_causal`.
    """
    everything = slice(0, queries), slice(0, keys)
    if mask is None and (not is_causal or queries == 1):
        yield Window(*everything)
    elif square and mask is None and queries == keys:
        yield Window(*everything, is_causal=True)
    elif torch.compiler.is_compiling() or like.is_cuda:  # one block: its extent must not depend on the mask's values
        visible = visibility(mask, is_causal, queries, keys, like.device)
        yield _window(*everything, visible, mask, like.dtype)
    else:
        step = BLOCK if queries <= LONG else 2 * BLOCK
        for start in range(0, queries, step):
            yield _trimmed(mask, slice(start, min(start + step, queries)), queries, keys, like)


def _causal(start: int, stop: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, stop - start, S], bottom-right aligned: query t sees keys 0 .. S - T + t."""
    last = torch.arange(keys - queries + start, keys - queries + stop, device=device)
    return (torch.arange(keys, device=device) <= last[:, None])[None, None]


def _trimmed(mask: Tensor | None, block: slice, queries: int, keys: int, like: Tensor) -> Window:
    """The window of one block of queries, its keys cut to those that some query of some row sees."""
    if mask is None:
        visible = _causal(block.start, block.stop, queries, keys, like.device)
        return _window(block, slice(0, max(1, keys - queries + block.stop)), visible, None, like.dtype)
    mask = mask[:, :, block] if mask.shape[2] > 1 else mask
    visible = visibility(mask, False, queries, keys, like.device)
    seen = visible.any(dim=2).flatten(0, 1).any(dim=0).expand(keys).nonzero()
    span = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
    return _window(block, span, visible, mask, like.dtype)


def _window(block: slice, span: slice, visible: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Window:
    if visible.shape[-1] > 1:
        visible = visible[..., span]
        mask = None if mask is None else mask[..., span] if mask.shape[-1] > 1 else mask
    alive = visible.any(-1, keepdim=True)
    if mask is None or mask.dtype == torch.bool:
        bias = visible | ~alive
    else:
        bias = mask.to(dtype).masked_fill(~visible, float("-inf")).masked_fill(~alive, 0.0)
    shape = (-1, -1, block.stop - block.start, span.stop - span.start)
    return Window(block, span, bias.expand(shape), alive=alive)
