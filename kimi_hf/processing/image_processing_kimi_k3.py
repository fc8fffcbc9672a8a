"""`KimiK3VisionProcessor`: images to patches, pixel for pixel as the released processor makes them.

Importing this needs neither PIL nor torchvision; only processing an image needs PIL, whose resampling defines the
result (torchvision's is close, not equal).
"""

import copy
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from ..errors import ConfigError, MediaError
from .image_plan import RELEASED_MEDIA_PROC_CFG, Background, MediaSettings, ResizePlan, read_settings
from .media_loading import MAX_IMAGE_PIXELS, load_images, require_pil

if TYPE_CHECKING:
    from PIL.Image import Image

# Rows of pixels composited at a time: bounds the float32 copies of a very large transparent image.
_BAND = 256


class KimiK3ImagesKwargs(TypedDict, total=False):
    """What may be set when loading the processor and changed for a single call."""

    media_proc_cfg: dict[str, Any] | None
    patch_size: int
    merge_kernel_size: int
    in_patch_limit: int
    patch_limit_on_one_side: int
    image_mean: list[float]
    image_std: list[float]
    transparent_bg_config: dict[str, Any] | None
    transparent_bg_fill_stage: str
    apply_exif_orientation: bool
    max_image_pixels: int | None
    input_data_format: str | None
    return_tensors: str | None


_CFG_FIELDS = frozenset(KimiK3ImagesKwargs.__annotations__) & frozenset(RELEASED_MEDIA_PROC_CFG)
# Ours, not the release's: written to a file only where they differ from these.
_OPTIONS: dict[str, Any] = {"apply_exif_orientation": False, "max_image_pixels": MAX_IMAGE_PIXELS}


class KimiK3VisionProcessor(BaseImageProcessor):
    """Image processor of Kimi K3, reading and writing `preprocessor_config.json` in the released schema.

    An image is shrunk (never enlarged) to the patch limits with PIL's bicubic filter in its own mode, made RGB
    (transparency over a chessboard), padded with black to multiples of 28, normalised and cut into patches.

    Args:
        media_proc_cfg: the released block of settings; None for the released values. Unknown fields are kept.
        apply_exif_orientation: turn photographs upright as their EXIF tag says (PIL's `exif_transpose`). Off, as in
            the release, where a photograph taken sideways stays sideways.
        max_image_pixels: refuse larger images before decoding them; None for no limit.
        kwargs: single fields of `media_proc_cfg` (`in_patch_limit=4096`), or other fields of the file to keep.

    Raises:
        ConfigError: a setting that makes no sense; the message names it.

    Source: K3 specification 7.1.
    """

    # Whether a text may be the path of a file. A server sets it to False, for itself alone: paths in a request are the
    # client's, and files are not.
    reads_paths = True
    valid_kwargs = KimiK3ImagesKwargs
    model_input_names = ["pixel_values", "grid_thws"]

    def __init__(
        self,
        media_proc_cfg: dict[str, Any] | None = None,
        *,
        apply_exif_orientation: bool = False,
        max_image_pixels: int | None = MAX_IMAGE_PIXELS,
        **kwargs,
    ):
        overrides = {name: kwargs.pop(name) for name in _CFG_FIELDS & kwargs.keys()}
        # transformers forgets this one; servers read it.
        self._processor_class = kwargs.pop("processor_class", None)
        kwargs.pop("image_processor_type", None)
        super().__init__(**kwargs)
        self.media_proc_cfg = copy.deepcopy(RELEASED_MEDIA_PROC_CFG if media_proc_cfg is None else media_proc_cfg)
        self.media_proc_cfg.update(overrides)
        self.apply_exif_orientation = apply_exif_orientation
        self.max_image_pixels = max_image_pixels
        read_settings(self.media_proc_cfg)

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return read_settings(self.media_proc_cfg).patch_size

    @property
    def merge_size(self) -> int:
        """Patches per token, along one side."""
        return read_settings(self.media_proc_cfg).merge_kernel_size

    def to_dict(self) -> dict[str, Any]:
        """The contents of `preprocessor_config.json`."""
        output = {k: copy.deepcopy(v) for k, v in self.__dict__.items() if k not in (*_OPTIONS, "_processor_class")}
        output.update({k: getattr(self, k) for k, default in _OPTIONS.items() if getattr(self, k) != default})
        if self._processor_class is not None:
            output["processor_class"] = self._processor_class
        output["image_processor_type"] = type(self).__name__
        return output

    def load(self, images: Any, **overrides) -> "list[Image]":
        """Images as a flat list of PIL images, which `preprocess` takes as they are; see `media_loading.load_image`."""
        _, options = self._settings(overrides)
        return load_images(
            images,
            max_pixels=options["max_image_pixels"],
            input_data_format=options.get("input_data_format"),
            apply_exif_orientation=options["apply_exif_orientation"],
            reads_paths=self.reads_paths,
        )

    def preprocess(self, images: Any, *, return_tensors: str | None = "pt", **overrides) -> BatchFeature:
        """Process images.

        Args:
            images: one image or (nested) lists of them: PIL, numpy, torch, path, bytes, "data:" URL, base64 text, or
                message parts of type "image" / "image_url". An empty list is allowed.
            return_tensors: "pt" (as the release), "np", or None for numpy arrays.
            overrides: any of `KimiK3ImagesKwargs` for this call.

        Returns:
            `pixel_values` (sum of h * w, 3, 14, 14) float32 and `grid_thws` (images, 3) int64, rows (1, h, w).

        Raises:
            MediaError: an image that cannot be used; the message says which.
            ConfigError: an override that does not exist or makes no sense.
        """
        settings, _ = self._settings(overrides)
        pixels, grids = [], []
        for index, image in enumerate(loaded := self.load(images, **overrides)):
            try:
                rgb = self._to_canvas(image, settings)
            except (OSError, ValueError) as error:
                raise MediaError(
                    f"image {index + 1} of {len(loaded)}: mode {image.mode} cannot be processed: {error}; convert it "
                    "to RGB first"
                ) from error
            pixels.append(patchify(rgb, settings))
            grids.append((1, rgb.shape[0] // settings.patch_size, rgb.shape[1] // settings.patch_size))
        side = settings.patch_size
        data = {
            "pixel_values": np.concatenate(pixels) if pixels else np.zeros((0, 3, side, side), np.float32),
            "grid_thws": np.array(grids, dtype=np.int64).reshape(-1, 3),
        }
        return BatchFeature(data, tensor_type=return_tensors)

    def num_image_tokens(self, width: int, height: int, **overrides) -> int:
        """Placeholder tokens of an image of this original size."""
        return self._settings(overrides)[0].num_tokens(width, height)

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict | None = None) -> int:
        """Patches of an image of this original size, under the name transformers gives it (height first)."""
        _, rows, columns = self._settings(images_kwargs or {})[0].grid(width, height)
        return rows * columns

    def _settings(self, overrides: dict[str, Any]) -> tuple[MediaSettings, dict[str, Any]]:
        unknown = [k for k, v in overrides.items() if k not in KimiK3ImagesKwargs.__annotations__ and v is not None]
        if unknown:
            raise ConfigError(
                f"{', '.join(sorted(unknown))}: not a setting of this image processor, whose steps are fixed by the "
                f"release; known are {', '.join(sorted(KimiK3ImagesKwargs.__annotations__))}"
            )
        cfg = dict(overrides.get("media_proc_cfg") or self.media_proc_cfg)
        cfg.update({k: overrides[k] for k in _CFG_FIELDS & overrides.keys()})
        options = {k: overrides.get(k, getattr(self, k)) for k in _OPTIONS}
        return read_settings(cfg), {**options, "input_data_format": overrides.get("input_data_format")}

    @staticmethod
    def _to_canvas(image: "Image", settings: MediaSettings) -> np.ndarray:
        """Resized, RGB, padded: (H, W, 3) uint8, H and W multiples of patch_size * merge_kernel_size."""
        plan = settings.plan(*image.size)
        bicubic = require_pil().Image.Resampling.BICUBIC
        if settings.fill_stage == "before_resize":
            image = require_pil().Image.fromarray(to_rgb(image, settings.background))
        rgb = to_rgb(image.resize((plan.width, plan.height), bicubic), settings.background)
        return _pad(rgb, plan)


def to_rgb(image: "Image", background: Background | None) -> np.ndarray:
    """(H, W, 3) uint8. Opaque images are converted; transparent ones are composited over the background, if any.

    Alpha blending in float32, truncated to uint8, not rounded.
    """
    if image.mode == "RGB":
        return np.asarray(image)
    transparent = "A" in image.getbands() or "transparency" in image.info
    if not transparent or background is None:
        return np.asarray(image.convert("RGB"))
    rgba = np.asarray(image.convert("RGBA"))
    output = np.empty((*rgba.shape[:2], 3), np.uint8)
    for top in range(0, rgba.shape[0], _BAND):
        band = rgba[top : top + _BAND]
        alpha = band[..., 3:].astype(np.float32) / np.float32(255)
        board = background_pixels(background, band.shape[0], band.shape[1], top)[..., None]
        output[top : top + _BAND] = (alpha * band[..., :3] + (1 - alpha) * board).astype(np.uint8)
    return output


def background_pixels(background: Background, height: int, width: int, top: int = 0) -> np.ndarray:
    """(height, width) float32 shades of the background, for a band that begins at pixel row `top`."""
    if background.pattern != "chessboard":
        return np.full((height, width), 255 if background.pattern == "white" else 0, np.float32)
    rows = (np.arange(top, top + height) // background.square_size)[:, None]
    columns = (np.arange(width) // background.square_size)[None, :]
    odd = (rows + columns) % 2 == 1
    gray = odd if background.square_on_top_left else ~odd
    return np.where(gray, np.float32(background.gray_value), np.float32(background.white_value))


def _pad(rgb: np.ndarray, plan: ResizePlan) -> np.ndarray:
    return np.pad(rgb, ((0, plan.pad_height), (0, plan.pad_width), (0, 0)))


def patchify(rgb: np.ndarray, settings: MediaSettings) -> np.ndarray:
    """(H, W, 3) uint8 -> (H/P * W/P, 3, P, P) float32, patches row by row, normalised.

    A pixel has 256 values, so normalising is a table per channel: float32(v / 255) - mean, times 1 / std.
    """
    side = settings.patch_size
    rows, columns = rgb.shape[0] // side, rgb.shape[1] // side
    patches = rgb.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)
    scaled = (np.arange(256) / 255).astype(np.float32)
    output = np.empty(patches.shape, np.float32)
    for channel, (mean, std) in enumerate(zip(settings.image_mean, settings.image_std, strict=True)):
        table = (scaled - np.float32(mean)) * np.float32(1 / std)
        output[:, channel] = table[patches[:, channel]]
    return output
