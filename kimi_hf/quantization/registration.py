"""Entering the MXFP4 quantizer into transformers under a name of its own."""

from transformers.quantizers import auto

from ..configuration.quantization import QUANT_METHOD
from .configuration import KimiMxfp4Config
from .quantizer import KimiMxfp4Quantizer


def register_quantization() -> None:
    """Make transformers hand checkpoints with our method to our quantizer; may be called again."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = KimiMxfp4Config
    auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = KimiMxfp4Quantizer
