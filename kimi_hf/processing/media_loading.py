"""One image out of whatever a user hands over: PIL, numpy, torch, a path, bytes, base64. PIL is imported on use only.

Nothing is fetched from the network, and no image is decoded before its size is known to be reasonable.
"""

import base64
import binascii
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import numpy as np

from ..errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

# Twice PIL's own warning threshold, which is where PIL itself refuses to go on.
MAX_IMAGE_PIXELS = 178_956_970
_CHANNEL_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_VALUE_KEYS = ("image", "image_url", "url", "path", "base64")
# Read by running another program (Ghostscript) on the file, which no image of a stranger should be able to ask for.
_REFUSED_FORMATS = {"EPS"}


def require_pil() -> Any:
    """The PIL package.

    Raises:
        MediaError: it is not installed; the message says how to get it.
    """
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise MediaError(
            "images need the package pillow, which is not installed; run: pip install 'kimi-hf[vision]'"
        ) from error
    return PIL


def media_value(media: Any) -> Any:
    """The image itself out of a message part: {"type": "image", "image": x}, an OpenAI image_url part, or x as it is.

    Raises:
        MediaError: a part of another type (the released processor knows no video or audio), or one without an image.
    """
    if not isinstance(media, Mapping):
        return media
    kind = media.get("type", "image")
    if kind not in ("image", "image_url"):
        raise MediaError(
            f"media of type {kind!r} is not supported, only 'image' and 'image_url'; give the frames of a clip as images"
        )
    for key in (kind, *_VALUE_KEYS):
        value = media.get(key)
        if value is not None:
            return media_value({"type": "image", **value}) if isinstance(value, Mapping) else value
    raise MediaError(f"an {kind} part carries no image: expected one of {', '.join(_VALUE_KEYS)}, got {sorted(media)}")


def flatten_media(media: Any) -> list[Any]:
    """Images in a flat list: one image, a list, lists of lists, or a 4-D array of equal-sized images; None is none.

    A None inside a list stays in its place: it is an image that is missing, and dropping it would give every later
    image the place of the one before.
    """
    if isinstance(media, (list, tuple)):
        return [item for part in media for item in ([None] if part is None else flatten_media(part))]
    if getattr(media, "ndim", None) == 4:
        return list(media)
    return [] if media is None else [media]


def load_images(
    media: Any,
    *,
    max_pixels: int | None = MAX_IMAGE_PIXELS,
    input_data_format: str | None = None,
    apply_exif_orientation: bool = False,
    reads_paths: bool = True,
) -> "list[Image]":
    """Load every image of `media` (nested lists allowed); see `load_image`. Errors say which image it was."""
    items = flatten_media(media)
    images = []
    for index, item in enumerate(items):
        try:
            images.append(load_image(item, max_pixels, input_data_format, apply_exif_orientation, reads_paths))
        except MediaError as error:
            raise MediaError(f"image {index + 1} of {len(items)}: {error}") from error
    return images


def load_image(
    media: Any,
    max_pixels: int | None = MAX_IMAGE_PIXELS,
    input_data_format: str | None = None,
    apply_exif_orientation: bool = False,
    reads_paths: bool = True,
) -> "Image":
    """One PIL image, in its own mode, decoded.

    Args:
        media: PIL image; numpy array or torch tensor (H, W), (H, W, C) or (C, H, W) with C in 1 (grey), 2 (grey +
            alpha), 3, 4, either integers 0..255 or floats 0..1; path; bytes or a binary file of an image format
            (the first picture of an animation); "data:" URL; base64 text; or a message part holding one of these.
        max_pixels: larger images are refused before they are decoded; None for no limit.
        input_data_format: "channels_first" or "channels_last" where the shape of an array could mean both; else
            arrays are read channels last, tensors channels first.
        apply_exif_orientation: turn the image as its EXIF tag says. The released processor does not.
        reads_paths: whether a text may name a file. False where texts come from somebody who must not see this
            machine's files.

    Raises:
        MediaError: not an image, damaged, too large, or out of range.
    """
    pil = require_pil()
    value = media_value(media)
    if value is None:
        raise MediaError("found None; leave it out, and give [] for a text or a row without images")
    if isinstance(value, pil.Image.Image):
        image = _decode(lambda: value, "the PIL image", max_pixels)
    elif isinstance(value, np.ndarray):
        image = _from_array(value, input_data_format, first=False, max_pixels=max_pixels)
    elif hasattr(value, "detach") and hasattr(value, "numpy"):  # a torch tensor, without importing torch
        image = _from_array(_to_numpy(value), input_data_format, first=True, max_pixels=max_pixels)
    else:
        file, name = _open(value, reads_paths)
        image = _decode(lambda: pil.Image.open(file, formats=_formats(pil)), name, max_pixels)
    return _upright(pil, image) if apply_exif_orientation else image


def _open(value: Any, reads_paths: bool) -> tuple[Any, str]:
    """A binary file for everything that is not yet pixels, and a short name of it for messages."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return io.BytesIO(bytes(value)), f"the file of {len(value)} bytes"
    if hasattr(value, "read"):
        return value, "the file object"
    if isinstance(value, os.PathLike):
        return _open_path(Path(value)), str(value)
    if isinstance(value, str):
        return _open_text(value, reads_paths)
    raise MediaError(
        f"cannot read an image from {type(value).__name__}; give a PIL image, an array, a tensor, a path, bytes, or "
        "base64 text"
    )


def _open_text(text: str, reads_paths: bool) -> tuple[Any, str]:
    shown = repr(str(text if len(text) <= 60 else text[:57] + "..."))
    scheme = text[:8].lower()
    if scheme.startswith("data:"):
        return io.BytesIO(_data_url(text)), f"the data URL {shown}"
    if scheme.startswith(("http://", "https://")):
        raise MediaError(f"{shown} is a remote address, and images are not fetched; download it and give the bytes")
    if scheme.startswith("file://") and reads_paths:
        path = os.fsdecode(unquote_to_bytes(text[len("file://") :]))
        return _open_path(Path(path.removeprefix("localhost"))), shown
    if not text.strip():
        raise MediaError("found an empty text; give a path, a data: URL, or base64 text")
    # A path is tried first; base64 text is far longer than any path may be.
    if reads_paths and len(text) < 4096 and os.path.exists(text):
        return _open_path(Path(text)), shown
    try:
        return io.BytesIO(base64.b64decode("".join(text.split()), validate=True)), f"the base64 text {shown}"
    except ValueError:  # not base64, or not even ASCII
        kinds = "neither a file, nor" if reads_paths else "neither"
        raise MediaError(f"{shown} is {kinds} a data: URL, nor base64 text") from None


def _open_path(path: Path) -> io.BytesIO:
    try:
        return io.BytesIO(path.read_bytes())
    except OSError as error:
        raise MediaError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def _data_url(url: str) -> bytes:
    header, comma, payload = url[len("data:") :].partition(",")
    mime, *parameters = header.split(";")
    if not comma:
        raise MediaError("a data: URL needs a comma between its type and its data")
    if mime and not mime.lower().startswith("image/"):
        raise MediaError(f"a data: URL of type {mime!r} is not an image")
    raw = unquote_to_bytes(payload)
    if "base64" not in (parameter.strip().lower() for parameter in parameters):
        return raw
    try:
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except binascii.Error as error:
        raise MediaError(f"the base64 part of a data: URL is damaged: {error}") from error


def _formats(pil: Any) -> list[str]:
    pil.Image.init()  # else only the commonest formats are known
    return [name for name in pil.Image.ID if name not in _REFUSED_FORMATS]


def _decode(opened: Callable[[], "Image"], name: str, max_pixels: int | None) -> "Image":
    pil = require_pil()
    try:
        image = opened()  # reads the header only
        _check_size(image, max_pixels)
        image.load()
        _check_size(image, max_pixels)  # icons say how large they are inside only then
        return image
    except MediaError:
        raise
    except pil.Image.DecompressionBombError as error:
        raise MediaError(f"{name}: {error}; PIL has a limit of its own, PIL.Image.MAX_IMAGE_PIXELS") from error
    except pil.UnidentifiedImageError as error:
        raise MediaError(f"{name} is not a readable image: it has none of the formats that PIL knows") from error
    except Exception as error:  # every format plugin has its own exceptions for damaged files
        raise MediaError(f"{name} does not hold a readable image: {error}") from error


def _upright(pil: Any, image: "Image") -> "Image":
    try:
        return pil.ImageOps.exif_transpose(image)
    except Exception as error:  # as many kinds of damage as there are writers of EXIF
        raise MediaError(f"its EXIF data cannot be read: {error}; pass apply_exif_orientation=False") from error


def _to_numpy(tensor: Any) -> np.ndarray:
    try:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    except (TypeError, RuntimeError, NotImplementedError) as error:  # sparse, quantised, or on the meta device
        raise MediaError(f"a tensor that numpy cannot hold: {error}") from error


def _check_size(image: "Image", max_pixels: int | None) -> None:
    width, height = image.size
    _check_pixels(width, height, max_pixels)


def _check_pixels(width: int, height: int, max_pixels: int | None) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"the image is empty ({width} x {height} pixels)")
    if max_pixels is not None and width * height > max_pixels:
        raise MediaError(
            f"{width} x {height} pixels are more than the limit of {max_pixels}; make it smaller, or raise "
            "max_image_pixels if you trust where it comes from"
        )


def _from_array(array: np.ndarray, input_data_format: str | None, *, first: bool, max_pixels: int | None) -> "Image":
    pil = require_pil()
    pixels = _channels_last(array, input_data_format, first)
    _check_pixels(pixels.shape[1], pixels.shape[0], max_pixels)
    pixels = np.ascontiguousarray(_to_bytes(pixels))
    mode = _CHANNEL_MODES[pixels.shape[2]]
    size = (pixels.shape[1], pixels.shape[0])
    return pil.Image.frombytes(mode, size, pixels.tobytes())


def _channels_last(array: np.ndarray, input_data_format: str | None, first: bool) -> np.ndarray:
    """(H, W, C), by what was said about the layout, else by which end can be channels, else by habit (`first`)."""
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim != 3:
        raise MediaError(f"an array of shape {array.shape} is not one image; expected (H, W), (H, W, C) or (C, H, W)")
    named = getattr(input_data_format, "value", input_data_format)  # transformers has an enum for the two words
    could_be_first, could_be_last = array.shape[0] in _CHANNEL_MODES, array.shape[2] in _CHANNEL_MODES
    if named is not None:
        first = _one_of_formats(named) == "channels_first"
    elif could_be_first != could_be_last:
        first = could_be_first
    if not (could_be_first if first else could_be_last):
        raise MediaError(
            f"an array of shape {array.shape} has no channel axis of 1 to 4 "
            f"{'at the front' if first else 'at the end'}; expected (H, W, C) or (C, H, W)"
        )
    return array.transpose(1, 2, 0) if first else array


def _one_of_formats(name: str) -> str:
    if name not in ("channels_first", "channels_last"):
        raise MediaError(f"input_data_format must be 'channels_first' or 'channels_last', got {name!r}")
    return name


def _to_bytes(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    if np.issubdtype(pixels.dtype, np.floating):
        # The comparison is false for NaN as well.
        if not bool(((pixels >= 0) & (pixels <= 1)).all()):
            raise MediaError(
                f"float pixels must lie in 0..1, got {pixels.min()} to {pixels.max()}; undo the normalisation, or give "
                "uint8"
            )
        return np.rint(pixels * 255).astype(np.uint8)
    if np.issubdtype(pixels.dtype, np.integer):
        if pixels.min() < 0 or pixels.max() > 255:
            raise MediaError(f"integer pixels must lie in 0..255, got {pixels.min()} to {pixels.max()}")
        return pixels.astype(np.uint8)
    raise MediaError(f"pixels of type {pixels.dtype} are not supported; give uint8, or floats in 0..1")
