"""KDA for the chunked delta rule: a tile's raw projections to finished tokens, and the gradients back."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kimi_hf.ops import checks
from kimi_hf.ops.delta_rule.chunk import TileGradients
from kimi_hf.ops.delta_rule.pairs import Tokens, Work
from kimi_hf.ops.delta_rule.tiles import Tile
from kimi_hf.ops.kda.gate import EPS

LOG2_E = math.log2(math.e)  # exp2 is two to three times faster than exp on CPUs, and as exact


class KdaRule:
    """inputs: q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K], beta [B, T, H], A_log [H], dt_bias [H*K], all raw."""

    def __init__(self, inputs: list[Tensor], lower_bound: float | None):
        self.inputs, self.lower_bound = inputs, lower_bound
        self.gradients: list[Tensor | None] = []
        q, A_log, dt_bias = inputs[0], inputs[5], inputs[6]
        self.dtype = checks.compute_dtype(q.dtype)
        self.A = A_log.to(self.dtype).exp()
        self.bias = dt_bias.to(self.dtype).view(q.shape[2], q.shape[3])

    def load(self, tile: Tile, work: Work) -> Tokens:
        q, k, v, g, beta = (tile.take(x) for x in self.inputs[:5])
        n, s, h, C, K = q.shape
        shape = (n * s * h, C, K)
        unit_k = self._normalized(k, "k", 1.0, work)
        unit_q = self._normalized(q, "q", K**-0.5, work)
        y = self._gate_logits(tile, g, work)
        if self.lower_bound is None:
            alpha = torch.mul(softplus(y), self._per_head(tile, -LOG2_E), out=work.get("alpha", *y.shape))
        else:
            alpha = torch.mul(y, self._per_head(tile), out=y)
            alpha.sigmoid_().mul_(self.lower_bound * LOG2_E)
        alpha.exp2_()
        if tile.padding is not None:
            alpha.masked_fill_(tile.padding[..., None], 1)
        write = torch.sigmoid(beta.to(self.dtype)).reshape(shape[:2])
        return Tokens(unit_q.view(shape), unit_k.view(shape), v, write, alpha.view(shape))

    def start_backward(self) -> None:
        q, k, v, g, beta, A_log, dt_bias = self.inputs
        fresh = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)]
        self.gradients = [*fresh, torch.zeros_like(self.A), torch.zeros_like(self.bias)]

    def unload(self, tile: Tile, tokens: Tokens, grads: TileGradients, work: Work) -> None:
        n, s, h, C = tile.rounds, tile.sequences, tile.num_heads, tile.chunk
        K = tokens.k.shape[-1]
        for slot, unit, grad, scale in ((0, tokens.q, grads.q, K**-0.5), (1, tokens.k, grads.k, 1.0)):
            self._put_normalized_gradient(slot, tile, unit, grad, scale, work)
        tile.put(self.gradients[2], grads.v)
        write = tokens.beta
        tile.put(self.gradients[4], (grads.beta * write * (1 - write)).view(n, s, h, C))
        # Gate: y = g + bias, and log alpha as in kda_log_decay.
        grad = grads.log_alpha.view(n, s, h, C, K)
        if tile.padding is not None:
            grad.masked_fill_(tile.padding[..., None], 0)
        y = self._gate_logits(tile, tile.take(self.inputs[3]), work)
        A = self._per_head(tile)
        if self.lower_bound is None:
            grad.mul_(-A)
            slope_A = (grad * softplus(y)).sum((0, 1, 3, 4))  # d/dA_log = A d/dA
            grad.mul_(torch.sigmoid(y))
        else:
            opening = torch.mul(y, A, out=work.get("opening", n, s, h, C, K)).sigmoid_()
            grad.mul_(A * self.lower_bound).mul_(opening).mul_(opening.neg_().add_(1))
            slope_A = (grad * y).sum((0, 1, 3, 4))
        self.gradients[5][tile.heads] += slope_A
        self.gradients[6][tile.heads] += grad.sum((0, 1, 3))
        tile.put(self.gradients[3], grad)

    def finished_gradients(self) -> list[Tensor]:
        """The gradients in the dtypes and shapes of the inputs."""
        A_log, dt_bias = self.inputs[5:7]
        self.gradients[5] = self.gradients[5].to(A_log.dtype)
        self.gradients[6] = self.gradients[6].view(-1).to(dt_bias.dtype)
        return self.gradients

    def _per_head(self, tile: Tile, factor: float = 1.0) -> Tensor:
        return (self.A[tile.heads] * factor).view(-1, 1, 1)

    def _gate_logits(self, tile: Tile, g: Tensor, work: Work) -> Tensor:
        return torch.add(g.to(self.dtype), self.bias[tile.heads, None], out=work.get("y", *g.shape))

    def _normalized(self, x: Tensor, name: str, scale: float, work: Work) -> Tensor:
        x = x.to(self.dtype)
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(EPS).rsqrt_().mul_(scale)
        return torch.mul(x, inverse, out=work.get(name, *x.shape))

    def _put_normalized_gradient(
        self, slot: int, tile: Tile, unit: Tensor, grad: Tensor, scale: float, work: Work
    ) -> None:
        """y = scale x / |x| gives dx = (scale dy - y (y . dy) / scale) / |x|."""
        x = tile.take(self.inputs[slot]).to(self.dtype)
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(EPS).rsqrt_()
        unit, grad = unit.view(x.shape), grad.reshape(x.shape)
        along = torch.mul(unit, grad, out=work.get("along", *x.shape)).sum(-1, keepdim=True)
        grad = torch.addcmul(grad * scale, unit, along, value=-1 / scale)
        tile.put(self.gradients[slot], grad.mul_(inverse))
