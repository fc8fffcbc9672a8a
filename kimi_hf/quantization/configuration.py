"""`KimiMxfp4Config`: what to do with a checkpoint's MXFP4 experts."""

import copy
from typing import Any

from transformers.utils.quantization_config import Mxfp4Config

from ..configuration.quantization import QUANT_METHOD, released_block


class KimiMxfp4Config(Mxfp4Config):
    """How MXFP4 experts are held.

    Derived from transformers' MXFP4 config, because only loading attributes of known classes are merged into a
    checkpoint that is already quantised.

    Args:
        dequantize: unpack the experts to the model's dtype on loading (they can be trained then, and take 2 bytes a
            weight in bf16 instead of 0.53).
        released: the `quantization_config` block of the checkpoint, given back on saving.
    """

    def __init__(self, dequantize: bool = False, released: dict[str, Any] | None = None, **kwargs):
        kwargs.pop("quant_method", None)
        super().__init__(dequantize=dequantize, **kwargs)
        self.quant_method = QUANT_METHOD
        self.released = copy.deepcopy(released) if released else released_block()

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, "released": copy.deepcopy(self.released)}
