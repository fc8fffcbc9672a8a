"""kimi_hf: Kimi K3, and the ladder of models that led to it, for Hugging Face transformers.

`import kimi_hf` registers the model types with transformers' Auto classes; everything else is imported on first use.
"""

import importlib
from typing import Any

from .registration import register

__version__ = "0.1.0"

# Public name -> the module that defines it.
_EXPORTS = {
    "Census": "configuration",
    "KimiK3Config": "configuration",
    "KimiK3VisionConfig": "configuration",
    "KimiLinearConfig": "configuration",
    "LadderConfig": "configuration",
    "PRESETS": "configuration",
    "census": "configuration",
    "preset": "configuration",
    "KimiHfError": "errors",
    "KimiCache": "modeling.cache",
    "KimiLinearForCausalLM": "modeling.modeling_kimi_linear",
    "KimiLinearModel": "modeling.modeling_kimi_linear",
    "LadderForCausalLM": "modeling.modeling_ladder",
    "LadderModel": "modeling.modeling_ladder",
    "KimiK3ForConditionalGeneration": "modeling.modeling_kimi_k3",
    "KimiK3Model": "modeling.modeling_kimi_k3",
    "KimiK3VisionModel": "modeling.vision",
    "KimiMxfp4Config": "quantization",
    "quantize": "conversion.quantize",
    "set_backend": "ops.dispatch",
    "use_backend": "ops.dispatch",
}

__all__ = ["__version__", "register", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module 'kimi_hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])


register()
