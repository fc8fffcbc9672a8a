"""How the released image processor is set, and which size it gives an image. Plain numbers: no PIL, no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, MediaError

# The released preprocessor_config.json, for processors built without a file.
RELEASED_MEDIA_PROC_CFG: dict[str, Any] = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
    "in_patch_limit_each_frame": 16384,
    "in_patch_limit_video": 655360,
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}
PATTERNS = ("chessboard", "black", "white")
FILL_STAGES = ("before_resize", "after_resize")


@dataclass(frozen=True)
class Background:
    """What shows through transparent pixels. Defaults are the released class's, not the released file's."""

    pattern: str = "black"
    square_size: int = 16
    square_on_top_left: bool = True
    white_value: int = 255
    gray_value: int = 200


@dataclass(frozen=True)
class ResizePlan:
    """Size after resizing and what is padded on the right and below, in pixels; the sum is a multiple of 28."""

    width: int
    height: int
    pad_width: int
    pad_height: int


@dataclass(frozen=True)
class MediaSettings:
    """The fields of `media_proc_cfg` that an image depends on, checked."""

    patch_size: int
    merge_kernel_size: int
    in_patch_limit: int
    patch_limit_on_one_side: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    background: Background | None
    fill_stage: str

    def plan(self, width: int, height: int) -> ResizePlan:
        """Resize an image of the given size: down to the patch limits, never up, then pad to whole tokens.

        The limit counts whole patches of the image before padding, as the release does, so padding may pass it
        (6480 x 2393 pixels become 16748 tokens). Source: K3 specification 7.1.
        """
        if width < 1 or height < 1:
            raise MediaError(f"an image of {width} x {height} pixels is empty")
        patch, side = self.patch_size, self.patch_limit_on_one_side * self.patch_size
        patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.in_patch_limit / patches), side / width, side / height)
        new_width = min(max(1, int(width * scale)), side)
        new_height = min(max(1, int(height * scale)), side)
        unit = patch * self.merge_kernel_size
        return ResizePlan(new_width, new_height, -new_width % unit, -new_height % unit)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Patches (1, rows, columns) of an image of the given original size."""
        plan = self.plan(width, height)
        rows = (plan.height + plan.pad_height) // self.patch_size
        columns = (plan.width + plan.pad_width) // self.patch_size
        return 1, rows, columns

    def num_tokens(self, width: int, height: int) -> int:
        """Feature rows, and so placeholder tokens, of an image of the given original size."""
        _, rows, columns = self.grid(width, height)
        return rows * columns // self.merge_kernel_size**2


def read_settings(media_proc_cfg: Mapping[str, Any]) -> MediaSettings:
    """Check a `media_proc_cfg` of the released schema; fields it lacks have the released class's defaults.

    Raises:
        ConfigError: naming the field that is wrong.
    """
    if not isinstance(media_proc_cfg, Mapping):
        raise ConfigError(f"media_proc_cfg must be a mapping, got {type(media_proc_cfg).__name__}")
    value = {**_WHEN_ABSENT, **{k: v for k, v in media_proc_cfg.items() if k in _WHEN_ABSENT}}
    for name in ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side"):
        _positive(f"media_proc_cfg.{name}", value[name])
    if value["fixed_output_tokens"] is not None:
        raise ConfigError(
            "media_proc_cfg.fixed_output_tokens must be null: the model derives the number of tokens from the patches"
        )
    if value["transparent_bg_fill_stage"] not in FILL_STAGES:
        raise ConfigError(
            f"media_proc_cfg.transparent_bg_fill_stage must be one of {FILL_STAGES}, got "
            f"{value['transparent_bg_fill_stage']!r}"
        )
    std = _three("image_std", value["image_std"])
    if min(std) <= 0:
        raise ConfigError(f"media_proc_cfg.image_std must be above 0, got {list(std)}")
    return MediaSettings(
        patch_size=value["patch_size"],
        merge_kernel_size=value["merge_kernel_size"],
        in_patch_limit=value["in_patch_limit"],
        patch_limit_on_one_side=value["patch_limit_on_one_side"],
        image_mean=_three("image_mean", value["image_mean"]),
        image_std=std,
        background=_background(value["transparent_bg_config"]),
        fill_stage=value["transparent_bg_fill_stage"],
    )


_WHEN_ABSENT: dict[str, Any] = {
    **{
        name: RELEASED_MEDIA_PROC_CFG[name]
        for name in (
            "patch_size",
            "merge_kernel_size",
            "in_patch_limit",
            "patch_limit_on_one_side",
            "fixed_output_tokens",
            "image_mean",
            "image_std",
        )
    },
    "transparent_bg_config": None,
    "transparent_bg_fill_stage": "before_resize",
}


def _background(config: Mapping[str, Any] | None) -> Background | None:
    if config is None:
        return None
    where = "media_proc_cfg.transparent_bg_config"
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} must be a mapping or null, got {config!r}")
    background = Background(
        pattern=config.get("pattern", Background.pattern),
        square_size=config.get("chessboard_square_size", Background.square_size),
        square_on_top_left=config.get("chessboard_square_on_top_left", Background.square_on_top_left),
        white_value=config.get("chessboard_white_value", Background.white_value),
        gray_value=config.get("chessboard_gray_value", Background.gray_value),
    )
    if background.pattern not in PATTERNS:
        raise ConfigError(f"{where}.pattern must be one of {PATTERNS}, got {background.pattern!r}")
    _positive(f"{where}.chessboard_square_size", background.square_size)
    for name in ("white_value", "gray_value"):
        shade = getattr(background, name)
        if isinstance(shade, bool) or not isinstance(shade, int) or not 0 <= shade <= 255:
            raise ConfigError(f"{where}.chessboard_{name} must be an integer in 0..255, got {shade!r}")
    return background


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")


def _three(name: str, value: Any) -> tuple[float, float, float]:
    try:
        numbers = tuple(float(x) for x in value)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != 3 or not all(math.isfinite(x) for x in numbers):
        raise ConfigError(f"media_proc_cfg.{name} must be three numbers (red, green, blue), got {value!r}")
    return numbers
