"""The transpose of `pairs.make_pairs`: from gradients of rows, cols, total and products to gradients of the tokens.

The gradient of the log decay needs no gradient of the decay itself. A term that reaches from token j to token i carries
exp(sum of the log decay over j+1 .. i), so with G the running sum over the chunk, i's share of dG is what the term adds
to (row factor) . (its gradient), and j's share is minus (column factor) . (its gradient): both are products of q or k
with gradients that are at hand. The gradient of the log decay is the suffix sum of dG.
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
        return PairGradients(
            self.rows.view(X, C, 2, K), self.cols.view(X, C, K), total, self.products.view(X, C, 2, C)
        )


def pairs_backward(
    tokens: Tokens, pairs: Pairs, grads: PairGradients, work: Work
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q [X, C, K], k [X, C, K] and the log decay [X, C, K or 1] (None without decay)."""
    if tokens.per_channel:
        return _channel_backward(tokens, pairs, grads, work)
    return _head_backward(tokens, pairs, grads, work)


def suffix_sum_(x: Tensor) -> Tensor:
    """Sum over tokens s .. C-1, in place, x [X, C, K]; halves of growing blocks, as everywhere here."""
    X, C, K = x.shape
    half = 1
    while half < C:
        halves = x.view(X, C // (2 * half), 2, half, K)
        halves[:, :, 0] += halves[:, :, 1, :1]
        half *= 2
    return x


def _channel_backward(
    tokens: Tokens, pairs: Pairs, grads: PairGradients, work: Work
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = tokens.q, tokens.k
    X, C, K = k.shape
    grad_q, grad_rows, grad_cols = (work.get(f"grad_{name}", X, C, K).zero_() for name in ("q", "key_rows", "key_cols"))
    prefix = work.get("prefix", X, C, K).copy_(tokens.alpha)  # decay from the block's start to each token
    suffix = work.get("suffix", X, C, K).fill_(1)  # decay from each token to the block's end
    half = 1
    while half < C:
        N = X * (C // (2 * half))
        before, after = (x.view(N, 2, half, K) for x in (suffix, prefix))
        left, right = before[:, 0], after[:, 1]
        rows, cols = work.get("half_rows", N, half, 2, K), work.get("half_cols", N, half, K)
        torch.mul(k.view(N, 2, half, K)[:, 1], right, out=rows[:, :, 0])
        torch.mul(q.view(N, 2, half, K)[:, 1], right, out=rows[:, :, 1])
        torch.mul(k.view(N, 2, half, K)[:, 0], left, out=cols)
        block = work.get("grad_block", N, 2 * half, half)
        block.view(X, -1, half, 2, half).copy_(block_view(grads.products, half))
        to_rows = torch.bmm(block, cols, out=work.get("to_rows", N, 2 * half, K)).view(N, half, 2, K)
        rows = rows.view(N, 2 * half, K)
        to_cols = torch.bmm(block.transpose(1, 2), rows, out=work.get("to_cols", N, half, K))
        grad_rows.view(N, 2, half, K)[:, 1].addcmul_(right, to_rows[:, :, 0])
        grad_q.view(N, 2, half, K)[:, 1].addcmul_(right, to_rows[:, :, 1])
        grad_cols.view(N, 2, half, K)[:, 0].addcmul_(left, to_cols)
        left.mul_(after[:, 1, -1:])
        right.mul_(after[:, 0, -1:])
        half *= 2
    grad_rows.addcmul_(prefix, grads.rows[:, :, 0])
    grad_q.addcmul_(prefix, grads.rows[:, :, 1])
    grad_cols.addcmul_(suffix, grads.cols)
    log_alpha = torch.sub(grad_rows, grad_cols, out=work.get("grad_log", X, C, K)).mul_(k).addcmul_(q, grad_q)
    # The chunk's end is the row of every term that goes into the next state.
    log_alpha[:, -1] += torch.mul(pairs.cols, grads.cols, out=grads.cols).sum(1).addcmul_(pairs.total, grads.total)
    diagonal = grads.products[:, :, 1].diagonal(0, 1, 2)[..., None]  # q_i . k_i has no decay in it
    grad_q.addcmul_(diagonal, k)
    grad_k = grad_rows.add_(grad_cols).addcmul_(diagonal, q)
    return grad_q, grad_k, suffix_sum_(log_alpha)


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
        # Terms between i and j: their sum over j is i's share, their sum over i is minus j's. q_i . k_i cancels.
        shares = torch.mul(grads.products, pairs.products).sum(2)
        shares.diagonal(0, 1, 2).zero_()
        log_alpha = shares.sum(2) - shares.sum(1)
        log_alpha += torch.mul(pairs.rows, grads.rows).sum((2, 3))
        to_end = torch.mul(pairs.cols, grads.cols).sum(2)
        log_alpha -= to_end
        log_alpha[:, -1] += to_end.sum(1).addcmul_(pairs.total[:, 0], grads.total[:, 0])
        decay, prefix, suffix = head_decay(tokens.alpha, work)
        grads.products.mul_(decay[:, :, None])
        grads.rows.mul_(prefix[..., None])
        grads.cols.mul_(suffix)
        log_alpha = suffix_sum_(log_alpha[..., None])
    block = grads.products.view(X, 2 * C, C)
    both = work.get("undecayed", X, C, 2, K)
    both[:, :, 0], both[:, :, 1] = k, q
    grad_both = torch.baddbmm(grads.rows.view(X, 2 * C, K), block, k).view(X, C, 2, K)
    grad_k = torch.baddbmm(grads.cols, block.transpose(1, 2), both.view(X, 2 * C, K)).add_(grad_both[:, :, 0])
    return grad_both[:, :, 1], grad_k, log_alpha
