"""Token mixers: one class, one paper, one file. All share one signature and one return value."""

from .delta_net import DeltaNet
from .gated_delta_net import GatedDeltaNet
from .kimi_delta_attention import KimiDeltaAttention
from .latent_attention import MultiHeadLatentAttention
from .linear_attention import LinearAttention
from .softmax_attention import SoftmaxAttention

__all__ = [
    "DeltaNet",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LinearAttention",
    "MultiHeadLatentAttention",
    "SoftmaxAttention",
]
