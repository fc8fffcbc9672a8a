"""Whatever `from_pretrained` may read weights from, opened as one `Checkpoint`, so that one check serves them all.

A folder can be looked at before transformers starts. The files of a repository exist only once transformers has fetched
them, and a state dict has no files: these are opened at the last moment before a weight is read.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import cached_file

from ..errors import CheckpointError
from .check import refuse_foreign
from .geometry import as_dict, load_config
from .saving import told_of_interrupted_save
from .shards import (
    DTYPE_NAMES,
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    ShardHeader,
    TensorEntry,
    check_index,
    open_checkpoint,
    read_header,
    read_index,
    weights_file,
    with_variant,
)

GIVEN = "the given state_dict"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# What `from_pretrained` knows across transformers' own code: the checkpoint, once it is open, and `key_mapping`.
_current: ContextVar[tuple[Checkpoint | None, Mapping[str, str] | None]] = ContextVar("current", default=(None, None))


class TensorCheckpoint(Checkpoint):
    """Tensors that are in memory (or mapped) already, under the same interface as files."""

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]]):
        self._tensors = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
        headers = {}
        for file, tensors in files.items():
            path = folder / file
            entries = {name: _entry(path, name, x) for name, x in tensors.items() if isinstance(x, torch.Tensor)}
            headers[file] = ShardHeader(path, entries, {}, 0, 0)
        super().__init__(folder, headers, None)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[self.entry(name).name].detach().cpu()

    def read_range(self, entry: TensorEntry, start: int = 0, length: int | None = None) -> bytearray:
        flat = self.read(entry.name).contiguous().reshape(-1).view(torch.uint8)
        return bytearray(flat[start : entry.nbytes if length is None else start + length].numpy().tobytes())


def _entry(path: Path, name: str, tensor: torch.Tensor) -> TensorEntry:
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    return TensorEntry(name, dtype, tuple(tensor.shape), 0, tensor.numel() * tensor.element_size(), path)


def of_state_dict(state_dict: Mapping[str, torch.Tensor]) -> Checkpoint:
    """A state dict that the caller handed over; messages call its file "the given state_dict"."""
    return TensorCheckpoint(Path(GIVEN), {GIVEN: state_dict})


def in_folder(folder: Path, variant: str | None = None, use_safetensors: bool | None = None) -> Checkpoint | None:
    """The checkpoint that transformers will read in `folder`, or None if there is none.

    Args:
        variant: `fp16` for `model.fp16.safetensors`. use_safetensors: as in `from_pretrained`.
    Raises:
        CheckpointError: damaged or absent files, or two checkpoints in one folder.
    """
    if use_safetensors is not False:
        path = weights_file(folder, with_variant(SINGLE_NAME, variant), with_variant(INDEX_NAME, variant))
        if path is not None:
            return open_checkpoint(path)
    if not use_safetensors:
        path = weights_file(folder, with_variant(PICKLED, variant), with_variant(PICKLED_INDEX, variant))
        if path is not None:
            return _open_pickled(path)
    return None


def of_files(files: Sequence[str], index: Mapping[str, Any] | None, source: object) -> Checkpoint | None:
    """The files that transformers is about to read, or None for a format without names and shapes (GGUF).

    Args:
        files: their paths. index: the content of their index, if they have one. source: what the user named.
    Raises:
        CheckpointError: a damaged file, or an index that does not fit its shards.
    """
    before, _ = _current.get()
    if before is not None and _real(header.path for header in before.headers.values()) == _real(files):
        return before
    paths, folder = [Path(file) for file in files], Path(str(source))
    if not paths:
        return None
    if all(path.suffix == ".safetensors" for path in paths):
        checkpoint = Checkpoint(folder, {path.name: read_header(path) for path in paths}, None)
    elif all(path.suffix in (".bin", ".pt", ".pth") for path in paths):
        checkpoint = TensorCheckpoint(folder, {path.name: _read_pickled(path) for path in paths})
    else:
        return None
    if index is not None:
        check_index(folder / INDEX_NAME, index["weight_map"], checkpoint.headers)
    return checkpoint


def _real(paths: Any) -> set[str]:
    return {os.path.realpath(path) for path in paths}


@contextmanager
def opened_before(source: str | os.PathLike | None, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Open what `from_pretrained(source, **arguments)` will read if it is a folder, and keep it at hand during the load.

    Raises:
        CheckpointError: damaged or absent files, a folder with weights but without config.json. The like in a repository
            raises while it is loaded, as the same error.
    """
    checkpoint = _open_folder(source, arguments)
    token = _current.set((checkpoint, arguments.get("key_mapping")))
    try:
        yield
    except (SafetensorError, json.JSONDecodeError, pickle.UnpicklingError, KeyError) as error:
        if isinstance(error, KeyError) and error.args != ("metadata",):
            raise
        _look_into_cache(source, arguments)
        raise CheckpointError(f"{source}: a file of the checkpoint is damaged ({error}); fetch it again") from error
    finally:
        _current.reset(token)
        if checkpoint is not None:
            checkpoint.close()


def _open_folder(source: str | os.PathLike | None, arguments: Mapping[str, Any]) -> Checkpoint | None:
    by_files = all(arguments.get(name) is None for name in ("state_dict", "gguf_file"))
    folder = Path(source or "", arguments.get("subfolder") or "")
    named = getattr(arguments.get("config"), "transformers_weights", None)
    if source is None or not by_files or named or not folder.is_dir():
        return None
    config = arguments.get("config")
    if config is None and not (folder / "config.json").exists():
        told = told_of_interrupted_save(folder)
        if told or any(folder.glob("model*.safetensors")):
            raise CheckpointError(f"{folder} has no config.json: nothing says which model its weights belong to{told}")
    checkpoint = in_folder(folder, arguments.get("variant"), arguments.get("use_safetensors"))
    if checkpoint is not None:
        if checkpoint.index is not None and not isinstance(checkpoint.index.get("metadata"), dict):
            path = folder / with_variant(INDEX_NAME, arguments.get("variant"))
            raise CheckpointError(f'{path} has no "metadata" object, which transformers asks for; restore it')
        # transformers asks for packages that read foreign formats before it comes to the files.
        if hasattr(config, "to_dict"):
            refuse_foreign(checkpoint, as_dict(config))
        elif Path(config or folder).exists():
            refuse_foreign(checkpoint, load_config(config or folder))
    return checkpoint


def _look_into_cache(source: str | os.PathLike | None, arguments: Mapping[str, Any]) -> None:
    """Raise for the damaged file, by name, among those that were fetched of the repository `source`."""
    variant = arguments.get("variant")
    options = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    options |= {name: arguments[name] for name in ("cache_dir", "revision", "subfolder") if arguments.get(name)}
    for name in (SINGLE_NAME, INDEX_NAME, PICKLED, PICKLED_INDEX):
        path = cached_file(str(source), with_variant(name, variant), **options) if source is not None else None
        if path is not None:
            in_folder(Path(path).parent, variant, arguments.get("use_safetensors"))


def about_to_be_read(
    state_dict: Mapping[str, Any] | None, files: Sequence[str] | None, load_config
) -> Checkpoint | None:
    """What transformers is going to read, with the names that `key_mapping` gives; None if nothing can be said of it.

    Args:
        state_dict, files, load_config: of transformers' `_load_pretrained_model`.
    Raises:
        CheckpointError: a damaged file, one without any tensor, or an index that does not fit its shards.
    """
    if state_dict is not None:
        # With files there is a GGUF file behind it. An empty one asks for a model that is initialised as if trained.
        checkpoint = of_state_dict(state_dict) if state_dict and not files else None
    else:
        source = load_config.pretrained_model_name_or_path
        checkpoint = of_files(files or (), load_config.sharded_metadata, source)
        if checkpoint is not None and not checkpoint.entries:
            raise CheckpointError(
                f"{', '.join(checkpoint.headers)} in {source} holds no tensors at all, so that every weight would be "
                "random; fetch it again, or build a new model with from_config"
            )
    _, mapping = _current.get()
    checkpoint = _renamed(checkpoint, mapping) if checkpoint is not None and mapping else checkpoint
    _current.set((checkpoint, mapping))
    return checkpoint


def being_read() -> Checkpoint | None:
    """What the load that is going on reads, for those who find fault with it later and want to name the file."""
    return _current.get()[0]


def _renamed(checkpoint: Checkpoint, mapping: Mapping[str, str]) -> Checkpoint:
    """The same tensors under the names that `key_mapping` makes of theirs, by transformers' own rule."""
    renamings = [WeightRenaming(source_patterns=old, target_patterns=new) for old, new in mapping.items()]
    view = copy.copy(checkpoint)
    view.entries = {rename_source_key(name, renamings, [])[0]: entry for name, entry in checkpoint.entries.items()}
    view._endings = None
    return view


def _open_pickled(path: Path) -> Checkpoint:
    if path.suffix != ".json":
        return TensorCheckpoint(path.parent, {path.name: _read_pickled(path)})
    weight_map = read_index(path)["weight_map"]
    files = {}
    for file in sorted(set(weight_map.values())):
        if not (path.parent / file).exists():
            raise CheckpointError(f"{path.parent / file} is absent but {path.name} names it; fetch the file")
        files[file] = _read_pickled(path.parent / file)
    checkpoint = TensorCheckpoint(path.parent, files)
    check_index(path, weight_map, checkpoint.headers)
    return checkpoint


def _read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that `torch.save` wrote; mapped where its format allows, and nothing else is unpickled."""
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        plain = not isinstance(error, pickle.UnpicklingError)
        told = str(error).partition(". ")[0] or "it ends early" if plain else "it is no file of plain tensors"
        raise CheckpointError(f"{path} cannot be read as a PyTorch file ({told}); fetch it again") from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a state dict")
    return dict(content)
