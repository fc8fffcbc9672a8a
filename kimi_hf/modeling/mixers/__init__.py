"""Token mixers: one class, one paper, one file. All share one signature and one return value."""

from .kimi_delta_attention import KimiDeltaAttention
from .latent_attention import MultiHeadLatentAttention

__all__ = ["KimiDeltaAttention", "MultiHeadLatentAttention"]
