"""The plain delta rule for `chunked`: tokens are finished already, so loading is a copy and a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.delta_rule.chunk import TileGradients
from kimi_hf.ops.delta_rule.pairs import Tokens, Work
from kimi_hf.ops.delta_rule.tiles import Tile


class DeltaRule:
    """inputs: q, k [B, T, H, K], v [B, T, H, V], beta [B, T, H], g [B, T, H] or None."""

    def __init__(self, inputs: list[Tensor | None], scale: float):
        self.inputs, self.scale = inputs, scale
        self.gradients: list[Tensor | None] = []
        self.dtype = checks.compute_dtype(inputs[0].dtype)

    def load(self, tile: Tile, work: Work) -> Tokens:
        q, k, v, beta = (tile.take(x) for x in self.inputs[:4])
        n, s, h, C, K = q.shape
        shape = (n * s * h, C, K)
        queries = torch.mul(q, self.scale, out=work.get("q", *q.shape))
        keys = work.get("k", *k.shape).copy_(k)
        alpha = None
        if self.inputs[4] is not None:
            alpha = tile.take(self.inputs[4]).to(self.dtype).exp()
            if tile.padding is not None:
                alpha.masked_fill_(tile.padding, 1)
            alpha = alpha.reshape(shape[0], C, 1)
        write = beta.to(self.dtype).reshape(shape[:2])
        return Tokens(queries.view(shape), keys.view(shape), v, write, alpha)

    def start_backward(self) -> None:
        self.gradients = [
            None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in self.inputs
        ]

    def unload(self, tile: Tile, tokens: Tokens, grads: TileGradients, work: Work) -> None:
        shape = (tile.rounds, tile.sequences, tile.num_heads, tile.chunk)
        tile.put(self.gradients[0], (grads.q * self.scale).view(*shape, -1))
        tile.put(self.gradients[1], grads.k.view(*shape, -1))
        tile.put(self.gradients[2], grads.v)
        tile.put(self.gradients[3], grads.beta.view(shape))
        if grads.log_alpha is not None:
            tile.put(self.gradients[4], grads.log_alpha.view(shape))

    def finished_gradients(self) -> list[Tensor | None]:
        """The gradients in the dtypes and shapes of the inputs."""
        return self.gradients
