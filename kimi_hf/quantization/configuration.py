"""`KimiMxfp4Config`: what to do with a checkpoint's MXFP4 experts."""

import copy
from typing import Any

from transformers.utils.quantization_config import Mxfp4Config

from ..configuration.quantization import QUANT_METHOD, RELEASED_FORMAT, RELEASED_METHOD

# The block a server expects to find; the `ignore` patterns are the released ones.
_RELEASED_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "scale_dtype": "torch.uint8",
    "strategy": "group",
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}
_RELEASED_IGNORE = [
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*lm_head.*",
    r"re:.*vision_tower.*",
    r"re:.*mm_projector.*",
]


def released_block() -> dict[str, Any]:
    """A `quantization_config` as the Kimi K3 release writes it."""
    return {
        "quant_method": RELEASED_METHOD,
        "format": RELEASED_FORMAT,
        "config_groups": {
            "group_0": {
                "format": RELEASED_FORMAT,
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": copy.deepcopy(_RELEASED_WEIGHTS),
            }
        },
        "global_compression_ratio": None,
        "ignore": list(_RELEASED_IGNORE),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


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
