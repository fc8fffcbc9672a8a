"""Entering tokenizer, image processor and processor into transformers' Auto classes."""

from importlib import import_module
from typing import Any, NoReturn

from transformers import PreTrainedConfig

from ..configuration import KimiK3Config
from ..errors import MediaError
from .image_processing_kimi_k3 import KimiK3VisionProcessor
from .processing_kimi_k3 import KimiK3Processor
from .tokenization_kimi import TikTokenTokenizer


class KimiTokenizerConfig(PreTrainedConfig):
    """No model's configuration: what the tokenizer is registered under.

    transformers finds a tokenizer by the class name in `tokenizer_config.json`. Registered under a *model's*
    configuration, `trust_remote_code=True` would run the repository's code instead.
    """

    model_type = "kimi_tokenizer"


class NoVideoProcessor:
    """What AutoVideoProcessor finds for Kimi K3: a refusal.

    `pipeline(task, model=path)` always looks for a video processor too. Where none is known, transformers takes the
    image processor's remote code for one, and asks whether to run it.
    """

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise MediaError(f"{path}: Kimi K3 has no video processor; give AutoProcessor the frames of a video as images")


def register_processing(take_over_kimi_linear: bool = True) -> None:
    """Make AutoTokenizer, AutoImageProcessor and AutoProcessor give our classes where files name the released ones.

    `take_over_kimi_linear`: tokenizers also of checkpoints of type `kimi_linear`, for which transformers otherwise
    insists on its generic backend (and, with trust_remote_code, on the repository's code). May be called again with
    the other value.
    """
    # Imported here, so that this module is whole when one of these is being imported and calls back (see the package's
    # registration); what is not there yet is registered by the call that follows when it is.
    from transformers.models.auto import image_processing_auto, processing_auto, tokenization_auto

    # By its full name: as an attribute of the package it is a stand-in that raises where torchvision is missing.
    video_processing_auto = import_module("transformers.models.auto.video_processing_auto")

    # One class serves both backends of images, because the release's pixels are PIL's. The mappings themselves, since
    # the Auto class for images cannot be imported without PIL.
    backends = {"pil": KimiK3VisionProcessor, "torchvision": KimiK3VisionProcessor}
    for module, name, entry in (
        (image_processing_auto, "IMAGE_PROCESSOR_MAPPING", backends),
        (processing_auto, "PROCESSOR_MAPPING", KimiK3Processor),
        (video_processing_auto, "VIDEO_PROCESSOR_MAPPING", {"torchvision": NoVideoProcessor}),
    ):
        if hasattr(module, name):
            getattr(module, name).register(KimiK3Config, entry, exist_ok=True)
    if not hasattr(tokenization_auto, "AutoTokenizer"):
        return
    tokenization_auto.AutoTokenizer.register(KimiTokenizerConfig, tokenizer_class=TikTokenTokenizer, exist_ok=True)
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    if take_over_kimi_linear:
        native = names.pop("kimi_linear", None)
        if native is not None:
            _NATIVE["kimi_linear"] = native
    elif "kimi_linear" in _NATIVE:
        names["kimi_linear"] = _NATIVE.pop("kimi_linear")


_NATIVE: dict[str, str] = {}  # entries of transformers' table that were taken out
