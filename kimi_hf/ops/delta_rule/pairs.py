"""Decayed products between the tokens of a chunk, and the triangular inverse, by halves of growing blocks.

Every product k_i . diag(decay from j to i) . k_j of a chunk is needed once, for i > j. A block of 2L tokens is split in
its middle: for i in the second half and j in the first, the decay is (from the middle to i) x (from j to the middle),
both at most 1, so the whole L x L block is one matrix product that cannot overflow whatever the gate. L = 1, 2, 4, ...
covers every pair. The two factors are running products that double with L; no exponential is taken of a difference, so
their relative error does not grow with the size of the decay. README.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Work:
    """Scratch tensors by name, grown on demand and reused by every tile of a call: fresh memory is slow to touch."""

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self._device, self._dtype = like.device, dtype
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor of `shape`; the same name returns the same memory."""
        size = 1
        for extent in shape:
            size *= extent
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(shape)


@dataclass
class Tokens:
    """What a rule loads for a tile of X = rounds x lanes chunks, finished and in the compute dtype.

    q (scaled), k: [X, C, K]; v: [rounds, sequences, heads, C, V], any dtype, may be a view of the caller's tensor;
    beta: [X, C]; alpha: decay per step in [0, 1], [X, C, K] or [X, C, 1], None for no decay.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    alpha: Tensor | None

    @property
    def per_channel(self) -> bool:
        return self.alpha is not None and self.alpha.shape[-1] > 1


@dataclass
class Pairs:
    """rows [X, C, 2, K]: k and q, interleaved, decayed from the chunk's start; cols [X, C, K]: k decayed to its end;
    total [X, K or 1]: decay over the chunk (None: no decay); products [X, C, 2, C]: k.k (strictly lower) and q.k (lower).
    """

    rows: Tensor
    cols: Tensor
    total: Tensor | None
    products: Tensor


def block_view(products: Tensor, half: int) -> Tensor:
    """products [X, C, 2, C] -> a view [X, C/2L, L, 2, L] of its blocks (second half x first half), L = half."""
    X, C = products.shape[0], products.shape[1]
    count = C // (2 * half)
    split = products.view(X, count, 2, half, 2, count, 2, half)
    return split[:, :, 1, :, :, :, 0].diagonal(0, 1, 4).permute(0, 4, 1, 2, 3)


def unit_lower_inverse(strict: Tensor, beta: Tensor, work: Work) -> Tensor:
    """(I + diag(beta) strict)^-1 for strictly lower `strict` [X, C, C] (a strided view is fine) -> [X, C, C].

    Doubling: the inverse of [[P, 0], [A, R]] is [[P^-1, 0], [-R^-1 A P^-1, R^-1]]. Exact up to rounding, no pivoting.
    """
    X, C = beta.shape
    inverse = work.get("inverse1", X * C, 1, 1).fill_(1)
    half = 1
    while half < C:
        count = C // (2 * half)
        split = strict.unflatten(1, (count, 2, half)).unflatten(4, (count, 2, half))
        block = split[:, :, 1, :, :, 0].diagonal(0, 1, 3).permute(0, 3, 1, 2)  # [X, count, L, L]
        A = work.get("inverse_block", X, count, half, half)
        torch.mul(block, beta.view(X, count, 2, half, 1)[:, :, 1], out=A)
        A = A.view(X * count, half, half)
        parts = inverse.view(X * count, 2, half, half)
        inverse = work.get(f"inverse{2 * half}", X * count, 2 * half, 2 * half).zero_()
        inverse[:, :half, :half] = parts[:, 0]
        inverse[:, half:, half:] = parts[:, 1]
        corner = torch.bmm(torch.bmm(parts[:, 1], A), parts[:, 0]) if half > 1 else A
        torch.neg(corner, out=inverse[:, half:, :half])
        half *= 2
    return inverse.view(X, C, C)


def make_pairs(tokens: Tokens, work: Work, consume: bool = False) -> Pairs:
    """Everything the scan needs of a tile's tokens, whatever kind of decay they have.

    `consume`: tokens.k will not be read again, so `cols` may take its memory.
    """
    cols = tokens.k if consume else work.get("cols", *tokens.k.shape).copy_(tokens.k)
    return _channel_pairs(tokens, cols, work) if tokens.per_channel else _head_pairs(tokens, cols, work)


def _channel_pairs(tokens: Tokens, cols: Tensor, work: Work) -> Pairs:
    """A decay per channel: the products are formed block by block, while rows and cols take in their decay."""
    q, k, alpha = tokens.q, tokens.k, tokens.alpha
    X, C, K = k.shape
    rows = work.get("rows", X, C, 2, K)
    products = work.get("products", X, C, 2, C).zero_()
    scratch = torch.mul(q, k, out=work.get("scratch", X, C, K))
    products[:, :, 1].diagonal(0, 1, 2).copy_(scratch.sum(-1))
    torch.mul(k, alpha, out=rows[:, :, 0])
    torch.mul(q, alpha, out=rows[:, :, 1])
    total, half = alpha, 1
    while half < C:
        count = C // (2 * half)
        second = rows.view(X * count, 2, 2 * half, K)[:, 1]  # k and q of the second halves, decayed from the middle
        first = cols.view(X * count, 2, half, K)[:, 0]  # k of the first halves, decayed to the middle
        block = work.get("block", X * count, 2 * half, half)
        if half > 1:
            torch.bmm(second, first.transpose(1, 2), out=block)
        else:  # two times one product: cheaper as such
            torch.sum(torch.mul(second, first, out=scratch.view(X * count, 2, K)), 2, keepdim=True, out=block)
        block_view(products, half).copy_(block.view(X, count, half, 2, half))
        totals = total.view(X * count, 2, 1, K)
        second.mul_(totals[:, 0])
        first.mul_(totals[:, 1])
        total = totals[:, 0] * totals[:, 1]
        half *= 2
    return Pairs(rows, cols, total.view(X, K), products)


def _head_pairs(tokens: Tokens, cols: Tensor, work: Work) -> Pairs:
    """One decay for all channels: one product for the chunk, times the decay between its tokens."""
    q, k, alpha = tokens.q, tokens.k, tokens.alpha
    X, C, K = k.shape
    rows = work.get("rows", X, C, 2, K)
    rows[:, :, 0].copy_(k)
    rows[:, :, 1].copy_(q)
    products = work.get("products", X, C, 2, C)
    torch.bmm(rows.view(X, 2 * C, K), k.transpose(1, 2), out=products.view(X, 2 * C, C))
    total = None
    if alpha is None:
        products.mul_(torch.ones(C, C, dtype=k.dtype, device=k.device).tril_()[:, None])
    else:
        decay, prefix, suffix = head_decay(alpha, work)
        products.mul_(decay[:, :, None])
        rows.mul_(prefix[..., None])
        cols.mul_(suffix)
        total = prefix[:, -1]
    products[:, :, 0].diagonal(0, 1, 2).zero_()
    return Pairs(rows, cols, total, products)


def head_decay(alpha: Tensor, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """alpha [X, C, 1] -> decay between tokens [X, C, C] (1 on the diagonal, 0 above), from the start to each token
    [X, C, 1], from each token to the end [X, C, 1]; by the same halving as `_channel_pairs`."""
    X, C, _ = alpha.shape
    between = work.get("between", X, C, C).zero_()
    between.diagonal(0, 1, 2).fill_(1)
    prefix, suffix = alpha.clone(), torch.ones_like(alpha)
    half = 1
    while half < C:
        count = C // (2 * half)
        left = suffix.view(X, count, 2, half)[:, :, 0]
        right = prefix.view(X, count, 2, half)[:, :, 1]
        blocks = between.view(X, count, 2, half, count, 2, half)[:, :, 1, :, :, 0].diagonal(0, 1, 3)
        blocks.permute(0, 3, 1, 2).copy_(right[..., None] * left[:, :, None])
        left.mul_(right[..., -1:])
        right.mul_(prefix.view(X, count, 2, half)[:, :, 0, -1:])
        half *= 2
    return between, prefix, suffix
