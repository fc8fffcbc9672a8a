"""The delta rule over a tile, forward and backward: a scan over chunks made of batched matrix products.

Inside a chunk, with decayed rows kr, qr, decayed columns kc and products M (k.k) and N (q.k) from `pairs`:
    (I + diag(beta) M) d = diag(beta) (v - kr S);   o = qr S + N d;   S <- total S + kc^T d
and the backward below is its transpose, line by line. README.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hf.ops.delta_rule.pairs import Pairs, Tokens, Work, make_pairs, unit_lower_inverse
from kimi_hf.ops.delta_rule.pairs_backward import PairGradients, pairs_backward
from kimi_hf.ops.delta_rule.tiles import Tile


def forward_tile(tile: Tile, tokens: Tokens, S: Tensor, work: Work) -> Tensor:
    """Advance S [lanes, K, V] in place over the tile; returns o [rounds, sequences, heads, C, V] (scratch memory).

    Overwrites tokens.k.
    """
    n, m, C, V = tile.rounds, tile.lanes, tile.chunk, S.shape[-1]
    pairs = make_pairs(tokens, work, consume=True)
    inverse = unit_lower_inverse(pairs.products[:, :, 0], tokens.beta, work)
    steps = _Steps(tile, tokens, pairs, inverse, V)
    o = work.get("o", n, m, C, V)
    from_state, write = work.get("from_state", m, 2 * C, V), work.get("write", m, C, V)
    for c in range(n):
        torch.bmm(steps.rows[c], S, out=from_state)
        predicted, read = from_state.view(m, C, 2, V).unbind(2)
        error = torch.sub(steps.v[c], predicted, out=work.get("error", m, C, V)).mul_(steps.beta[c])
        torch.bmm(steps.inverse[c], error, out=write)
        torch.baddbmm(read, steps.reads[c], write, out=o[c])
        if steps.total is not None:
            S.mul_(steps.total[c])
        S.baddbmm_(steps.cols[c].transpose(1, 2), write)
    return o.view(n, tile.sequences, tile.num_heads, C, V)


class _Steps:
    """The tile's arrays, viewed [rounds, lanes, ...] so that step c of the scan takes entry c of each."""

    def __init__(self, tile: Tile, tokens: Tokens, pairs: Pairs, inverse: Tensor, V: int):
        n, m, C, K = tile.rounds, tile.lanes, tile.chunk, tokens.k.shape[-1]
        self.rows = pairs.rows.view(n, m, 2 * C, K)
        self.cols = pairs.cols.view(n, m, C, K)
        self.strict, self.reads = pairs.products.view(n, m, C, 2, C).unbind(3)
        self.inverse = inverse.view(n, m, C, C)
        self.beta = tokens.beta.view(n, m, C, 1)
        self.total = None if pairs.total is None else pairs.total.view(n, m, -1, 1)
        self.v = tokens.v.reshape(n, m, C, V)  # a view unless several sequences lie side by side


@dataclass
class TileGradients:
    """Gradients of `Tokens`, in scratch memory: q, k [X, C, K]; v [rounds, sequences, heads, C, V]; beta [X, C];
    log_alpha [X, C, K or 1] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_alpha: Tensor | None


def backward_tile(tile: Tile, tokens: Tokens, S: Tensor, grad_o: Tensor, Z: Tensor, work: Work) -> TileGradients:
    """Gradients over a tile that started from S [lanes, K, V] (overwritten).

    grad_o: [rounds, sequences, heads, C, V], zero at padding. Z: gradient of the state after the tile, turned in place
    into the gradient of the state before it.
    """
    n, m, C, K, V = tile.rounds, tile.lanes, tile.chunk, S.shape[1], S.shape[2]
    pairs = make_pairs(tokens, work)
    inverse = unit_lower_inverse(pairs.products[:, :, 0], tokens.beta, work)
    steps = _Steps(tile, tokens, pairs, inverse, V)
    states, errors, writes = _replay(steps, S, work)
    # Row pairs as in `rows`: entry 0 belongs to the keys (the solve), entry 1 to the queries (the output).
    both = work.get("both", n, m, C, 2, V)
    both.view(n, tile.sequences, tile.num_heads, C, 2, V)[..., 1, :] = grad_o
    grads = PairGradients(
        rows=work.get("grad_rows", n, m, 2 * C, K),
        cols=work.get("grad_cols", n, m, C, K),
        total=None if steps.total is None else work.get("grad_total", n, m, steps.total.shape[2]),
        products=work.get("grad_products", n, m, 2 * C, C),
    )
    grad_beta, grad_write = work.get("grad_beta", n, m, C), work.get("grad_write", m, C, V)
    for c in reversed(range(n)):
        torch.bmm(steps.reads[c].transpose(1, 2), both[c, :, :, 1], out=grad_write)
        grad_write.baddbmm_(steps.cols[c], Z)
        h = torch.bmm(steps.inverse[c].transpose(1, 2), grad_write, out=work.get("h", m, C, V))
        both[c, :, :, 0] = h
        torch.bmm(writes[c], Z.transpose(1, 2), out=grads.cols[c])
        torch.bmm(both[c].view(m, 2 * C, V), writes[c].transpose(1, 2), out=grads.products[c])
        torch.sum(torch.mul(h, errors[c], out=errors[c]), -1, out=grad_beta[c])
        torch.mul(h, -steps.beta[c], out=both[c, :, :, 0])
        torch.bmm(both[c].view(m, 2 * C, V), states[c].transpose(1, 2), out=grads.rows[c])
        if grads.total is not None:
            overlap = torch.mul(states[c], Z, out=states[c]).sum(-1)
            grads.total[c] = overlap if grads.total.shape[2] > 1 else overlap.sum(-1, keepdim=True)
            Z.mul_(steps.total[c])
        Z.baddbmm_(steps.rows[c].transpose(1, 2), both[c].view(m, 2 * C, V))
    grads = grads.flattened(n * m, C, K)
    # products now hold h_i . d_j for the keys; the gradient of M is -beta_i times that.
    solve = grads.products[:, :, 0]
    grad_beta = grad_beta.view(n * m, C).sub_((solve * pairs.products[:, :, 0]).sum(-1))
    solve.mul_(-tokens.beta[..., None])
    grad_v = torch.neg(both[:, :, :, 0], out=work.get("grad_v", n, m, C, V))
    q, k, log_alpha = pairs_backward(tokens, pairs, grads, work)
    return TileGradients(q, k, grad_v.view(n, tile.sequences, tile.num_heads, C, V), grad_beta, log_alpha)


def _replay(steps: _Steps, S: Tensor, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """The forward scan again, keeping per chunk the state before it, the errors v - kr S, and the writes d."""
    n, m, C, _ = steps.cols.shape
    K, V = S.shape[1:]
    states = work.get("states", n, m, K, V)
    errors, writes = work.get("errors", n, m, C, V), work.get("writes", n, m, C, V)
    for c in range(n):
        states[c] = S
        predicted = torch.bmm(steps.rows[c].view(m, C, 2, K)[:, :, 0], S, out=work.get("predicted", m, C, V))
        torch.sub(steps.v[c], predicted, out=errors[c])
        torch.bmm(steps.inverse[c], torch.mul(errors[c], steps.beta[c], out=predicted), out=writes[c])
        if c + 1 < n:
            if steps.total is not None:
                S.mul_(steps.total[c])
            S.baddbmm_(steps.cols[c].transpose(1, 2), writes[c])
    return states, errors, writes
