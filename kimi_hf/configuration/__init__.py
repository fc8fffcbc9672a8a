"""Configurations, presets and the parameter census. Importing this needs no torch."""

from .census import Census, Part, census
from .configuration_kimi_k3 import KimiK3Config
from .configuration_kimi_k3_vision import KimiK3VisionConfig
from .configuration_kimi_linear import KimiLinearConfig
from .configuration_ladder import LadderConfig
from .presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "Census",
    "KimiK3Config",
    "KimiK3VisionConfig",
    "KimiLinearConfig",
    "LadderConfig",
    "Part",
    "census",
    "preset",
]
