"""The transpose of `pairs.make_pairs`: from gradients of rows, cols, total and products to gradients of the tokens.

The gradient of the log decay needs no gradient of the decay itself. A term that reaches from token j to token i carries
exp(log decay of j+1 + ... + log decay of i), so every step in between gets (the term's factor) . (that factor's
gradient) added: for a block split in its middle, a row's share goes to all steps from the middle to the row, a column's
share to all steps from the column to the middle. `spread_shares` adds them up without a subtraction anywhere, so that
steps which decay strongly get their tiny gradients right: they are multiplied by the gate's slope and its size next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hf.ops.delta_rule.pairs import Pairs, Tokens, Work, block_view, head_decay


@dataclass
class PairGradients:
    """Gradients of `Pairs`; per step of the scan while they are made, then flattened to the shapes of `Pairs`."""

    rows: Tensor
    cols: Tensor
    total: Tensor | None
    products: Tensor

    def flattened(self, X: int, C: int, K: int) -> PairGradients:
        total = None if self.total is None else self.total.view(X, -1)
        return PairGradients(self.rows.view(X, C, 2, K), self.cols.view(X, C, K), total, self.products.view(X, C, 2, C))


def pairs_backward(
    tokens: Tokens, pairs: Pairs, grads: PairGradients, work: Work
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q [X, C, K], k [X, C, K] and the log decay [X, C, K or 1] (None without decay)."""
    if tokens.per_channel:
        return _channel_backward(tokens, pairs, grads, work)
    return _head_backward(tokens, pairs, grads, work)


def spread_shares(rows: Tensor, cols: Tensor, shares: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Gradient of the log decay [X, C, K] from the shares of all terms, overwriting `rows`, `cols` [X, C, K].

    A share in rows[i] belongs to every step from the chunk's start to i, one in cols[j] to every step after j to the
    chunk's end. shares[level] = (row shares of the second halves, column shares of the first halves), each
    [X * blocks, L, K] with L = 2^level, belong to the steps between the block's middle and the row or column.

    Downwards from the whole chunk: what a half owes entirely is moved to the last row of that half; the rest is the
    same task for each half alone. When blocks have one token, `rows` is the answer.
    """
    X, C, K = rows.shape
    half = C // 2
    for of_rows, of_cols in reversed(shares):
        row_halves, col_halves = rows.view(-1, 2, half, K), cols.view(-1, 2, half, K)
        row_halves[:, 0, -1] += row_halves[:, 1].sum(1)
        row_halves[:, 1, -1] += col_halves[:, 0].sum(1)
        row_halves[:, 1] += of_rows
        col_halves[:, 0] += of_cols
        half //= 2
    return rows


def _channel_backward(tokens: Tokens, pairs: Pairs, grads: PairGradients, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    q, k = tokens.q, tokens.k
    X, C, K = k.shape
    diagonal = grads.products[:, :, 1].diagonal(0, 1, 2)[..., None]  # q_i . k_i has no decay in it
    grad_q = torch.mul(diagonal, k, out=work.get("grad_q", X, C, K))
    grad_k = torch.mul(diagonal, q, out=work.get("grad_k", X, C, K))
    prefix = work.get("prefix", X, C, K).copy_(tokens.alpha)  # decay from the block's start to each token
    suffix = work.get("suffix", X, C, K).fill_(1)  # decay from each token to the block's end
    shares, half = [], 1
    while half < C:
        N = X * (C // (2 * half))
        q2, k2, grad_q2, grad_k2, before, after = (
            x.view(N, 2, half, K) for x in (q, k, grad_q, grad_k, suffix, prefix)
        )
        left, right = before[:, 0], after[:, 1]
        rows, cols = work.get("half_rows", N, half, 2, K), work.get("half_cols", N, half, K)
        torch.mul(k2[:, 1], right, out=rows[:, :, 0])
        torch.mul(q2[:, 1], right, out=rows[:, :, 1])
        torch.mul(k2[:, 0], left, out=cols)
        block = work.get("grad_block", N, 2 * half, half)
        block.view(X, -1, half, 2, half).copy_(block_view(grads.products, half))
        to_rows, to_cols = _block_backward(block, rows, cols, work)
        grad_k2[:, 1].addcmul_(right, to_rows[:, :, 0])
        grad_q2[:, 1].addcmul_(right, to_rows[:, :, 1])
        grad_k2[:, 0].addcmul_(left, to_cols)
        of_both = rows.mul_(to_rows)
        of_rows = torch.add(of_both[:, :, 0], of_both[:, :, 1], out=work.get(f"row_shares{half}", N, half, K))
        shares.append((of_rows, torch.mul(cols, to_cols, out=work.get(f"col_shares{half}", N, half, K))))
        left.mul_(after[:, 1, -1:])
        right.mul_(after[:, 0, -1:])
        half *= 2
    grad_k.addcmul_(prefix, grads.rows[:, :, 0]).addcmul_(suffix, grads.cols)
    grad_q.addcmul_(prefix, grads.rows[:, :, 1])
    of_both = grads.rows.mul_(pairs.rows)
    of_rows, of_cols = of_both[:, :, 0].add_(of_both[:, :, 1]).contiguous(), grads.cols.mul_(pairs.cols)
    of_rows[:, -1].addcmul_(pairs.total, grads.total)
    return grad_q, grad_k, spread_shares(of_rows, of_cols, shares)


def _block_backward(block: Tensor, rows: Tensor, cols: Tensor, work: Work) -> tuple[Tensor, Tensor]:
    """block [N, 2L, L] is the gradient of rows cols^T; returns the gradients of rows [N, L, 2, K] and cols [N, L, K]."""
    N, half, _, K = rows.shape
    to_rows, to_cols = work.get("to_rows", N, 2 * half, K), work.get("to_cols", N, half, K)
    if half > 1:
        torch.bmm(block, cols, out=to_rows)
        torch.bmm(block.transpose(1, 2), rows.view(N, 2 * half, K), out=to_cols)
    else:  # a matrix product with an inner dimension of one is slow
        torch.mul(block, cols, out=to_rows)
        torch.mul(rows[:, :, 0], block[:, :1], out=to_cols).addcmul_(rows[:, :, 1], block[:, 1:])
    return to_rows.view(N, half, 2, K), to_cols


def _head_backward(
    tokens: Tokens, pairs: Pairs, grads: PairGradients, work: Work
) -> tuple[Tensor, Tensor, Tensor | None]:
    q, k = tokens.q, tokens.k
    X, C, K = k.shape
    log_alpha = None
    grads.products[:, :, 0].diagonal(0, 1, 2).zero_()
    if tokens.alpha is None:
        grads.products.mul_(torch.ones(C, C, dtype=k.dtype, device=k.device).tril_()[:, None])
    else:
        log_alpha = _head_log_decay(pairs, grads)
        decay, prefix, suffix = head_decay(tokens.alpha, work)
        grads.products.mul_(decay[:, :, None])
        grads.rows.mul_(prefix[..., None])
        grads.cols.mul_(suffix)
    block = grads.products.view(X, 2 * C, C)
    both = work.get("undecayed", X, C, 2, K)
    both[:, :, 0], both[:, :, 1] = k, q
    grad_both = torch.baddbmm(grads.rows.view(X, 2 * C, K), block, k).view(X, C, 2, K)
    grad_k = torch.baddbmm(grads.cols, block.transpose(1, 2), both.view(X, 2 * C, K)).add_(grad_both[:, :, 0])
    return grad_both[:, :, 1], grad_k, log_alpha


def _head_log_decay(pairs: Pairs, grads: PairGradients) -> Tensor:
    """The same sums as in `_channel_backward`, over all channels at once: [X, C, 1]."""
    X, C = pairs.products.shape[:2]
    terms = torch.mul(grads.products, pairs.products)  # above the diagonal pairs.products is 0
    shares, half = [], 1
    while half < C:
        block = block_view(terms, half).sum(3)  # [X, blocks, L, L], keys' and queries' terms together
        shares.append((block.sum(3).view(-1, half, 1), block.sum(2).view(-1, half, 1)))
        half *= 2
    of_rows = torch.mul(pairs.rows, grads.rows).sum((2, 3)).unsqueeze(2)
    of_cols = torch.mul(pairs.cols, grads.cols).sum(2, keepdim=True)
    of_rows[:, -1] += pairs.total * grads.total
    return spread_shares(of_rows, of_cols, shares)
