"""Entering the image processor and the processor into transformers' Auto classes."""

from transformers import AutoImageProcessor, AutoProcessor, PreTrainedConfig

from .image_processing_kimi_k3 import KimiK3VisionProcessor
from .processing_kimi_k3 import KimiK3Processor


def register_media_processing(config_class: type[PreTrainedConfig]) -> None:
    """Make AutoImageProcessor and AutoProcessor give our classes for repositories of this configuration.

    `config_class` must be registered with AutoConfig. The released `preprocessor_config.json` names no class of its
    own but remote code; a class registered here goes before it, whatever `trust_remote_code` says. There is one class
    for both of transformers' image backends, because only PIL's resampling gives the released pixels.
    """
    classes = {"pil": KimiK3VisionProcessor, "torchvision": KimiK3VisionProcessor}
    AutoImageProcessor.register(config_class, image_processor_classes=classes, exist_ok=True)
    AutoProcessor.register(config_class, KimiK3Processor, exist_ok=True)
