"""A cache on disk: one safetensors file that a fresh process goes on from identically.

Tensors are named `layers.{i}.{name}` and `padding_mask`; one metadata entry, `kimi_cache`, holds the rest as JSON:
format version, what every layer keeps (`LayerMemory`), length, and how far recurrent layers can go back.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..configuration.cache_plan import LayerMemory, cache_plan
from ..errors import CacheError
from .token_store import group_size

if TYPE_CHECKING:
    from .cache import KimiCache

FORMAT = 1
_ENTRY = "kimi_cache"


def write_cache(cache: "KimiCache", path: str | os.PathLike) -> Path:
    """Write `cache` to `path`, whole or not at all: to a temporary file beside it first, which is then renamed.

    Spare room is not written. Tensors that carry gradients are written without them.
    """
    path = Path(path)
    tensors, layers = {}, []
    for i, layer in enumerate(cache.layers):
        tensors.update({f"layers.{i}.{name}": x.detach().contiguous() for name, x in layer.stored().items()})
        entry = {"tokens": layer.tokens, "dtype": None if layer.dtype is None else str(layer.dtype).split(".")[1]}
        if hasattr(layer, "settled"):
            entry.update(recording=layer.record_past, settled=layer.settled)
        layers.append(entry)
    if cache.padding_mask is not None:
        tensors["padding_mask"] = cache.padding_mask.contiguous()
    about = {
        "format": FORMAT,
        "plan": [memory.to_dict() for memory in cache.plan],
        "length": cache.length,
        "rows": cache.rows,
        "image_tokens": cache.image_tokens,
        "latent_dtype": cache.latent_dtype,
        "rollback_tokens": cache.rollback_tokens,
        "layers": layers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.partial-", dir=path.parent)
    os.close(handle)
    try:
        # Equal storages (shared by a view) are no mistake here, so each tensor gets its own.
        save_file(_separate(tensors), partial, metadata={_ENTRY: json.dumps(about)})
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    seen, result = set(), {}
    for name, x in tensors.items():
        pointer = (x.device, x.untyped_storage().data_ptr())
        whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
        result[name] = x if whole and pointer not in seen else x.clone()
        seen.add(pointer)
    return result


def read_cache(cls: type["KimiCache"], path, config, device: str | torch.device | None = None) -> "KimiCache":
    """Read a cache that `write_cache` wrote.

    Args:
        path: the file. config: of the model that will go on from it. device: where to; the CPU by default.
    Raises:
        CacheError: no such file, a damaged one, one of another kind, or one of a model with other layers.
    """
    path = Path(path)
    if not path.is_file():
        raise CacheError(f"{path} does not exist; write it with KimiCache.to_safetensors")
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            about = _about(path, file.metadata())
            _check(path, about, config)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            dtypes = [None if x["dtype"] is None else getattr(torch, x["dtype"]) for x in about["layers"]]
    except (SafetensorError, OSError) as error:
        raise CacheError(f"{path} is damaged or no safetensors file ({error}); save the cache again") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{path}: its {_ENTRY!r} entry is incomplete ({error!r}); save the cache again") from error
    cache = cls(config, latent_dtype=about["latent_dtype"], rollback_tokens=about["rollback_tokens"])
    cache.length, cache.padding_mask = about["length"], tensors.pop("padding_mask", None)
    cache.image_tokens = about.get("image_tokens", 0.0)
    for i, (layer, entry) in enumerate(zip(cache.layers, about["layers"], strict=True)):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        _check_layer(path, i, cache, own, entry, about["rows"])
        layer.restore(own, dtypes[i])
        if cache.plan[i].kind == "state":
            layer.record_past, layer.settled, layer.tokens = entry["recording"], entry["settled"], entry["tokens"]
    if tensors:
        raise CacheError(f"{path} holds tensors of no layer: {sorted(tensors)[:4]}; save the cache again")
    if cache.padding_mask is not None and cache.padding_mask.shape != (about["rows"], cache.length):
        found, expected = tuple(cache.padding_mask.shape), (about["rows"], cache.length)
        raise CacheError(f"{path}: padding_mask has shape {found}, expected {expected}; save the cache again")
    return cache


def _about(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        about = json.loads((metadata or {})[_ENTRY])
    except (KeyError, ValueError) as error:
        raise CacheError(
            f"{path} has no {_ENTRY!r} entry in its metadata, so it is no saved cache; write one with KimiCache.to_safetensors"
        ) from error
    if about.get("format") != FORMAT:
        raise CacheError(f"{path} has cache format {about.get('format')}, this version reads {FORMAT}; save it again")
    return about


def _check(path: Path, about: dict[str, Any], config) -> None:
    from .cache import check_plans

    check_plans(tuple(LayerMemory.from_dict(x) for x in about["plan"]), cache_plan(config), f"the cache in {path}")


def _check_layer(path: Path, index: int, cache, own: dict[str, Tensor], entry: dict, rows: int | None) -> None:
    """Raise unless the tensors of a layer have the shapes that its plan, the rows and the length say."""
    memory = cache.plan[index]
    if memory.kind == "state":
        expected = {"state": (rows, memory.heads, *memory.state)}
        if memory.window:
            expected["window"] = (rows, *memory.window)
        if "state" not in own:
            expected = {}
        logged = sorted(name for name in own if name.startswith("log."))
        missing = entry["tokens"] and not own
    else:
        names = cache.layers[index].names
        # A layer that was cropped to nothing still has its tensors, of length 0.
        expected: dict[str, tuple] = dict.fromkeys(names, ()) if cache.length or own else {}
        for name, width in zip(("keys", "values"), memory.widths, strict=True):
            if name in expected:
                expected[name] = (rows, memory.heads, cache.length, width)
            if f"{name}_scale" in expected:
                expected[f"{name}_scale"] = (rows, memory.heads, cache.length, width // group_size(width))
        logged, missing = [], False
    unknown = sorted(set(own) - set(expected) - set(logged))
    absent = sorted(set(expected) - set(own))
    if unknown or absent or missing:
        raise CacheError(
            f"{path}: layer {index} holds {sorted(own)}, expected {sorted(expected) or 'a state'}; save the cache again"
        )
    for name, shape in expected.items():
        if tuple(own[name].shape) != shape:
            raise CacheError(
                f"{path}: layers.{index}.{name} has shape {tuple(own[name].shape)}, expected {shape}; save the cache again"
            )
