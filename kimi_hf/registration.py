"""Entering our classes into transformers' Auto classes, when and as far as they are asked for.

Configurations are registered at import. Models need torch, so they are registered when transformers' own auto-model
module is there: at once if it is already imported, else right after somebody imports it.
"""

import importlib.abc
import importlib.util
import os
import sys

from transformers.models.auto import configuration_auto

from .configuration import KimiK3Config, KimiK3VisionConfig, KimiLinearConfig

KEEP_NATIVE_VARIABLE = "KIMI_HF_KEEP_NATIVE_KIMI_LINEAR"
_AUTO_MODELS = "transformers.models.auto.modeling_auto"
_state = {"take_over": True}


def register(take_over_kimi_linear: bool | None = None) -> None:
    """Register all our classes; may be called again to change the take-over.

    Args:
        take_over_kimi_linear: whether `kimi_linear` means our class, which reads the K3 fields that transformers'
            native class ignores. None: unless the environment variable KIMI_HF_KEEP_NATIVE_KIMI_LINEAR is set to 1.
    """
    if take_over_kimi_linear is None:
        take_over_kimi_linear = os.environ.get(KEEP_NATIVE_VARIABLE, "0") in ("", "0")
    _state["take_over"] = take_over_kimi_linear
    auto_config = configuration_auto.AutoConfig
    auto_config.register("kimi_k3", KimiK3Config, exist_ok=True)
    auto_config.register("kimi_k3_vision", KimiK3VisionConfig, exist_ok=True)
    if take_over_kimi_linear:
        auto_config.register("kimi_linear", KimiLinearConfig, exist_ok=True)
    else:
        configuration_auto.CONFIG_MAPPING._extra_content.pop("kimi_linear", None)
    if _AUTO_MODELS in sys.modules:
        _register_models()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register_models() -> None:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    from .checkpoint.key_maps import register_key_maps
    from .modeling.modeling_kimi_k3 import KimiK3ForConditionalGeneration, KimiK3Model
    from .modeling.modeling_kimi_linear import KimiLinearForCausalLM, KimiLinearModel
    from .modeling.vision import KimiK3VisionModel
    from .processing.registration import register_processing

    AutoModel.register(KimiLinearConfig, KimiLinearModel, exist_ok=True)
    AutoModelForCausalLM.register(KimiLinearConfig, KimiLinearForCausalLM, exist_ok=True)
    AutoModel.register(KimiK3Config, KimiK3Model, exist_ok=True)
    AutoModelForCausalLM.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
    AutoModelForImageTextToText.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
    AutoModel.register(KimiK3VisionConfig, KimiK3VisionModel, exist_ok=True)
    register_key_maps(_state["take_over"])
    register_processing(take_over_kimi_linear=_state["take_over"])


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds transformers' auto-model module as usual, and registers our models once it has run."""

    def find_spec(self, name, path=None, target=None):
        if name != _AUTO_MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register_models()
