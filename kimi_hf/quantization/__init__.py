"""MXFP4 experts: kept packed in memory, or unpacked on loading."""

from .configuration import KimiMxfp4Config
from .packed_experts import KimiPackedExperts, dequantize, quantize

__all__ = ["KimiMxfp4Config", "KimiPackedExperts", "dequantize", "quantize"]
