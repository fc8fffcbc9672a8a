"""The decoder every rung shares: read, mix over time, write, read, mix over channels, write."""

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .residual import Residual, Stream
from .sequence import MaskInfo


class DecoderLayer(GradientCheckpointingLayer):
    """One layer. It has no branches: what differs between models are the parts it is built from.

    Args:
        mixer: mixes over time; `mixer(hidden, mask_info, past_key_values) -> (hidden, attention weights or None)`.
        feed_forward: mixes over channels; `feed_forward(hidden) -> hidden`.
        feed_forward_name: the released module name, "mlp" or "block_sparse_moe".
        norms: the input and the post-attention norm.
        residual: how the stream is read; see `residual.py`.
        dropout: probability of dropping an entry of a sub-layer's output.
    """

    def __init__(
        self,
        mixer: nn.Module,
        feed_forward: nn.Module,
        feed_forward_name: str,
        norms: tuple[nn.Module, nn.Module],
        residual: Residual,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.self_attn = mixer
        self.add_module(feed_forward_name, feed_forward)
        self.feed_forward_name = feed_forward_name
        self.input_layernorm, self.post_attention_layernorm = norms
        self.residual = residual
        residual.build(self)
        self.dropout = nn.Dropout(dropout)

    @property
    def feed_forward(self) -> nn.Module:
        return getattr(self, self.feed_forward_name)

    def forward(
        self, prefix: Tensor, *bank: Tensor, mask_info: MaskInfo | None = None, past_key_values=None, **kwargs
    ) -> tuple[Tensor, ...]:
        """One step down the stream.

        Args:
            prefix: (B, T, D), the running sum of the open block.
            bank: the sealed blocks, see `residual.py`; empty for plain sums.
        Returns:
            (prefix, *bank), the stream after this layer.
        """
        hidden, stream = self.residual.read_mixer(self, Stream(prefix, bank))
        mixed, _ = self.self_attn(self.input_layernorm(hidden), mask_info, past_key_values, **kwargs)
        stream = stream.write(self.dropout(mixed))
        hidden, stream = self.residual.read_feed_forward(self, stream)
        stream = stream.write(self.dropout(self.feed_forward(self.post_attention_layernorm(hidden))))
        return (stream.prefix, *stream.bank)
