"""Kimi K3's eyes: the MoonViT3d tower, the projector, and the merge of image features into the text sequence."""

from .layout import MediaLayout, read_layout
from .merge import MergedInputs, expand_placeholders, merge_media
from .modeling_kimi_k3_vision import KimiK3VisionModel
from .projector import KimiK3PatchMergerV2

__all__ = [
    "KimiK3PatchMergerV2",
    "KimiK3VisionModel",
    "MediaLayout",
    "MergedInputs",
    "expand_placeholders",
    "merge_media",
    "read_layout",
]
