"""Entering our classes into transformers' Auto classes, when and as far as they are asked for.

Configurations are registered at import. Models need torch, so they are registered when transformers' own auto-model
module is there: at once if it is already imported, else right after somebody imports it.
"""

import importlib.abc
import importlib.util
import os
import sys

from transformers.models.auto import configuration_auto

from .configuration import KimiK3Config, KimiK3VisionConfig, KimiLinearConfig, LadderConfig

KEEP_NATIVE_VARIABLE = "KIMI_HF_KEEP_NATIVE_KIMI_LINEAR"
_AUTO = "transformers.models.auto."
_MODELS = f"{_AUTO}modeling_auto"
_PROCESSING = tuple(
    f"{_AUTO}{kind}_auto" for kind in ("tokenization", "processing", "image_processing", "video_processing")
)
# This module imports the auto models half-way through itself, and our models need it whole.
_LAYERS = "transformers.modeling_layers"
_state = {"take_over": True, "models": False, "processing": False}


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
    auto_config.register("kimi_ladder", LadderConfig, exist_ok=True)
    if take_over_kimi_linear:
        auto_config.register("kimi_linear", KimiLinearConfig, exist_ok=True)
    else:
        configuration_auto.CONFIG_MAPPING._extra_content.pop("kimi_linear", None)
    _state.update(models=False, processing=False)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    _register_what_is_there()


def _register_what_is_there() -> None:
    """Register with those of transformers' auto modules that are there, unless something we need is half imported."""
    if any(_is_half(name) for name in list(sys.modules) if name == _LAYERS or name.startswith("kimi_hf.")):
        return
    if not _state["models"] and _is_whole(_MODELS):
        _state["models"] = True
        _register_models()
    if not _state["processing"] and any(map(_is_whole, _PROCESSING)) and not any(map(_is_half, _PROCESSING)):
        _state["processing"] = True
        _register_processing()


def _is_half(name: str) -> bool:
    """Whether module `name` is being imported right now."""
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _is_whole(name: str) -> bool:
    return name in sys.modules and not _is_half(name)


def _register_models() -> None:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    from .checkpoint.key_maps import register_key_maps
    from .modeling.modeling_kimi_k3 import KimiK3ForConditionalGeneration, KimiK3Model
    from .modeling.modeling_kimi_linear import KimiLinearForCausalLM, KimiLinearModel
    from .modeling.modeling_ladder import LadderForCausalLM, LadderModel
    from .modeling.vision import KimiK3VisionModel
    from .quantization.registration import register_quantization

    AutoModel.register(KimiLinearConfig, KimiLinearModel, exist_ok=True)
    AutoModelForCausalLM.register(KimiLinearConfig, KimiLinearForCausalLM, exist_ok=True)
    AutoModel.register(KimiK3Config, KimiK3Model, exist_ok=True)
    AutoModelForCausalLM.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
    for auto_class in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
        auto_class.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
    AutoModel.register(KimiK3VisionConfig, KimiK3VisionModel, exist_ok=True)
    AutoModel.register(LadderConfig, LadderModel, exist_ok=True)
    AutoModelForCausalLM.register(LadderConfig, LadderForCausalLM, exist_ok=True)
    register_key_maps(_state["take_over"])
    register_quantization()


def _register_processing() -> None:
    from .processing.registration import register_processing

    register_processing(take_over_kimi_linear=_state["take_over"])


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets modules be found as usual, and asks again what can be registered when a watched one has run.

    Watched are transformers' auto modules, and our own: an import of ours may have been the reason to wait.
    """

    def __init__(self):
        self.finding = set()

    def find_spec(self, name, path=None, target=None):
        watched = name in (_MODELS, _LAYERS, *_PROCESSING) or name.startswith("kimi_hf.")
        if not watched or name in self.finding or (_state["models"] and _state["processing"]):
            return None
        self.finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.finding.remove(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister:
    """A module's own loader, followed by the question what can be registered now."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module) -> None:
        spec = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # The import system still calls the module half imported; it has run, so it is whole.
        spec._initializing = False
        _register_what_is_there()
