"""Residual streams: what is carried along depth. A plain sum, or attention over what lies below: over sealed blocks of
layers (Block AttnRes), or over every single sub-layer's output (Full AttnRes).

A stream is the running sum of the open block, `prefix` (B, T, D) or None right after a block was sealed, and a `bank`:
empty, or one fp32 tensor (M, B, T) with the inverse RMS of the M sealed blocks, followed by the blocks themselves, each
(B, T, D). The parts travel between layers as separate tensors, so that sealing a block copies nothing and both kinds
of gradient checkpointing see plain tensor arguments.

Source: Attention Residuals (Kimi team); Kimi K3 release; kimi_k3.md 2.3.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.depth_attention import depth_attention, inverse_rms


class Stream(NamedTuple):
    """The residual stream between two sub-layers."""

    prefix: Tensor | None
    bank: tuple[Tensor, ...] = ()

    def write(self, delta: Tensor) -> "Stream":
        """Add a sub-layer's output to the open block; it is the block's first entry right after a seal."""
        return Stream(delta if self.prefix is None else self.prefix + delta, self.bank)

    def seal(self, eps: float) -> "Stream":
        """Close the open block. Its inverse RMS, which every later reader needs, is computed here, once."""
        stats = inverse_rms(self.prefix, eps)[None]
        if self.bank:
            stats = torch.cat([self.bank[0], stats])
        return Stream(None, (stats, *self.bank[1:], self.prefix))


class DepthNorm(nn.Module):
    """The norm weight (D,) of a depth read; it is folded into the query, so calling it gives the weight."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self) -> Tensor:
        return self.weight


class DepthQuery(nn.Module):
    """A learned query over depth, `weight` (1, D): h = sum_j softmax_j(norm(v_j) . query) v_j.

    Not a Linear, though stored like one: it reads a bank, and adapters for Linears do not fit it.
    """

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.eps = eps

    def forward(self, norm_weight: Tensor, stream: Stream) -> Tensor:
        """norm_weight (D,), stream -> (B, T, D). Scores, softmax and sum are fp32, one cast."""
        if not stream.bank:
            return stream.prefix
        wide = torch.float64 if stream.prefix.dtype == torch.float64 else torch.float32
        query = norm_weight.to(wide) * self.weight[0].to(wide)
        return depth_attention(stream.bank[1:], stream.bank[0], stream.prefix, query, eps=self.eps)


class SumResidual(nn.Module):
    """The ordinary residual: every sub-layer reads the running sum."""

    def build(self, layer: nn.Module) -> None:
        """A sum has no parameters."""

    def freeze_unread(self, layer: nn.Module) -> None:
        """A sum has no parameters."""

    def read_mixer(self, layer: nn.Module, stream: Stream) -> tuple[Tensor, Stream]:
        return stream.prefix, stream

    def read_feed_forward(self, layer: nn.Module, stream: Stream) -> tuple[Tensor, Stream]:
        return stream.prefix, stream

    def build_output(self, model: nn.Module) -> None:
        """A sum has no parameters."""

    def read_output(self, model: nn.Module, stream: Stream) -> Tensor:
        return stream.prefix


class BlockAttnRes(nn.Module):
    """Block attention residuals: every sub-layer reads a softmax mixture of the sealed blocks and the open one.

    At the first layer of a block the mixer still reads the old open block; only then is it sealed.
    The parameters sit on the layer under their released names.

    Args:
        hidden_size: D.
        eps: of the depth norms (the config's rms_norm_eps).
        layer_idx: 0-based. block_size: layers a block; its first layer seals the block before it.
    """

    def __init__(self, hidden_size: int, eps: float, layer_idx: int, block_size: int):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.is_first, self.seals = layer_idx == 0, layer_idx % block_size == 0

    def build(self, layer: nn.Module) -> None:
        """Give the decoder layer its four depth parameters."""
        layer.self_attention_res_norm = DepthNorm(self.hidden_size)
        layer.self_attention_res_proj = DepthQuery(self.hidden_size, self.eps)
        layer.mlp_res_norm = DepthNorm(self.hidden_size)
        layer.mlp_res_proj = DepthQuery(self.hidden_size, self.eps)
        self.freeze_unread(layer)

    def freeze_unread(self, layer: nn.Module) -> None:
        """The first mixer's query is stored, but nothing is sealed yet when it reads: a gradient would never come.

        Said again after loading, which makes every parameter anew.
        """
        if self.is_first:
            layer.self_attention_res_norm.requires_grad_(False)
            layer.self_attention_res_proj.requires_grad_(False)

    def read_mixer(self, layer: nn.Module, stream: Stream) -> tuple[Tensor, Stream]:
        hidden = layer.self_attention_res_proj(layer.self_attention_res_norm(), stream)
        return hidden, stream.seal(self.eps) if self.seals else stream

    def read_feed_forward(self, layer: nn.Module, stream: Stream) -> tuple[Tensor, Stream]:
        return layer.mlp_res_proj(layer.mlp_res_norm(), stream), stream

    def build_output(self, model: nn.Module) -> None:
        """Give the model the query that reads all blocks before the final norm."""
        model.output_attn_res_norm = DepthNorm(self.hidden_size)
        model.output_attn_res_proj = DepthQuery(self.hidden_size, self.eps)

    def read_output(self, model: nn.Module, stream: Stream) -> Tensor:
        return model.output_attn_res_proj(model.output_attn_res_norm(), stream)


class FullAttnRes(BlockAttnRes):
    """Full attention residuals: every sub-layer's output is a source of its own, and so is the embedding.

    A block of one sub-layer: what was written last is read as the open block, then sealed.

    Args:
        hidden_size: D.
        eps: of the depth norms.
        layer_idx: 0-based.
    """

    def __init__(self, hidden_size: int, eps: float, layer_idx: int):
        super().__init__(hidden_size, eps, layer_idx, block_size=1)

    def read_feed_forward(self, layer: nn.Module, stream: Stream) -> tuple[Tensor, Stream]:
        hidden, stream = super().read_feed_forward(layer, stream)
        return hidden, stream.seal(self.eps)


Residual = SumResidual | BlockAttnRes
