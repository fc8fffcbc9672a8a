"""Reading safetensors checkpoints without loading them: headers, the index, and bytes by range.

A header is checked against the file it stands in before anything else happens, so a truncated or mixed-up
checkpoint is refused by name (file and tensor) in seconds, not after an hour of loading.

Source: the safetensors format (8-byte little-endian header length, JSON, then the tensors without gaps).
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kimi_hf.checkpoint.files import OpenFiles
from kimi_hf.checkpoint.layout import DTYPE_BYTES, TensorSpec
from kimi_hf.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER = 100_000_000  # where the format's own reader stops; a released shard needs under a hundredth
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {value: key for key, value in TORCH_DTYPES.items()}


class TensorEntry(NamedTuple):
    """One stored tensor: `offset` counts bytes from the start of the file at `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path


class ShardHeader(NamedTuple):
    """A parsed header: entries by name in the header's order, the free-form metadata, and where data starts."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def read_header(path: str | Path) -> ShardHeader:
    """Parse and check one file's header; no tensor data is read.

    Raises: CheckpointError naming the file, and the tensor where one is at fault: header longer than the file,
        not JSON, unknown dtype, a byte range that is reversed, out of the file, overlapping, or of the wrong length,
        a name that stands twice, bytes that no tensor owns.
    """
    path = Path(path)
    raw, data_start, file_size = _header_bytes(path)
    entries, metadata = _parse(path, raw, data_start, file_size)
    return ShardHeader(path, entries, metadata, data_start, file_size)


def _parse(path: Path, raw: bytes, data_start: int, file_size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    try:
        table = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}); fetch the file again") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(table).__name__}, expected an object")
    metadata = table.pop("__metadata__", None) or {}
    if raw.count(b'"data_offsets"') != len(table):
        _load_unique(path, raw)
    entries = {name: _entry(path, name, info, data_start, file_size) for name, info in table.items()}
    _check_tiling(path, entries, data_start, file_size)
    return entries, metadata


def header_prefix(path: str | Path) -> bytes:
    """The raw bytes before the tensor data: length word, JSON and padding."""
    raw, _, _ = _header_bytes(Path(path))
    return struct.pack("<Q", len(raw)) + raw


def parse_prefix(path: Path, prefix: bytes) -> list[TensorSpec]:
    """The tensors that a stored `header_prefix` describes, in the order of their bytes; `path` for messages."""
    table = _load_unique(path, prefix[8:])
    table.pop("__metadata__", None)
    total = max((info["data_offsets"][1] for info in table.values()), default=0)
    entries, _ = _parse(path, prefix[8:], len(prefix), len(prefix) + total)
    ordered = sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes))
    return [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in ordered]


def _header_bytes(path: Path) -> tuple[bytes, int, int]:
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length_word = file.read(8)
            if len(length_word) < 8:
                raise CheckpointError(f"{path}: {file_size} bytes, too short for a safetensors file; fetch it again")
            (length,) = struct.unpack("<Q", length_word)
            if length > MAX_HEADER or 8 + length > file_size:
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes but the file has {file_size}; it is truncated or not "
                    f"a safetensors file, fetch it again"
                )
            return file.read(length), 8 + length, file_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _entry(path: Path, name: str, info: object, data_start: int, file_size: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        expected = math.prod(shape) * DTYPE_BYTES[dtype]
        good = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name}: unreadable header entry {info!r}; fetch it again") from error
    if not good or end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name}: byte range [{begin}, {end}) does not hold {dtype} {list(shape)}, which takes "
            f"{expected} bytes; the header is damaged, fetch the file again"
        )
    if data_start + end > file_size:
        raise CheckpointError(
            f"{path}: tensor {name} ends at byte {data_start + end} but the file has {file_size}; it is truncated, "
            f"fetch it again"
        )
    return TensorEntry(name, dtype, shape, data_start + begin, expected, path)


def _check_tiling(path: Path, entries: dict[str, TensorEntry], data_start: int, file_size: int) -> None:
    """The tensors must cover the data part exactly, as the format demands."""
    at, before = data_start, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != at:
            fault = "overlaps" if entry.offset < at else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {entry.name} at byte {entry.offset} {fault} {before}, which ends at {at}; the header "
                f"is damaged, fetch the file again"
            )
        at, before = entry.offset + entry.nbytes, entry.name
    if at != file_size:
        raise CheckpointError(
            f"{path}: {file_size - at} bytes after the last tensor ({before}) belong to none; fetch the file again"
        )


def _load_unique(path: Path, raw: bytes) -> dict:
    """json.loads that refuses a key standing twice in one object (a plain dict would keep the last silently)."""

    def collect(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for at, key in enumerate(names) if key in names[:at])
            raise CheckpointError(f"{path} names {twice} twice; fetch the file again")
        return table

    return json.loads(raw, object_pairs_hook=collect)


class Checkpoint:
    """An opened checkpoint: every tensor's place, no tensor data.

    `entries` maps names to `TensorEntry` in shard order; `headers` maps file names to `ShardHeader`; `index` is the
    index file's content, or None for a single-file checkpoint; `absent` names the shards that are not there (only
    when the checkpoint was opened with `allow_absent`).
    """

    def __init__(self, folder: Path, headers: dict[str, ShardHeader], index: dict | None, absent: tuple[str, ...] = ()):
        self.folder = folder
        self.headers = headers
        self.index = index
        self.absent = absent
        self.entries: dict[str, TensorEntry] = {}
        for header in headers.values():
            self.entries.update(header.entries)
        self._files = OpenFiles()
        self._sparse: dict[Path, bool] = {}
        self._endings: dict[tuple[str, str, bool], TensorEntry] | None = None

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def allocated(self) -> int:
        """Bytes that the files take on disk; below `nbytes` for sparse files."""
        return sum(header.path.stat().st_blocks * 512 for header in self.headers.values())

    @property
    def endings(self) -> dict[tuple[str, str, bool], TensorEntry]:
        """The first tensor of each (last part of the name, dtype, is it a routed expert's); one pass, then kept."""
        if self._endings is None:
            found: dict[tuple[str, str, bool], TensorEntry] = {}
            for name, entry in self.entries.items():
                found.setdefault((name.rpartition(".")[2], entry.dtype, ".experts." in name), entry)
            self._endings = found
        return self._endings

    def entry(self, name: str) -> TensorEntry:
        entry = self.entries.get(name)
        if entry is None:
            file = (self.index or {}).get("weight_map", {}).get(name)
            where = f"{file}, where it belongs, is absent; fetch it" if file in self.absent else "fetch it again"
            raise CheckpointError(f"{self.folder} holds no tensor {name}: {where}")
        return entry

    def read_range(self, entry: TensorEntry, start: int = 0, length: int | None = None) -> bytearray:
        """Bytes [start, start + length) of a tensor.

        Raises: CheckpointError if the file ends early or the disk reports an error.
        """
        length = entry.nbytes - start if length is None else length
        buffer = bytearray(length)
        self._files.read_into(entry.path, entry.offset + start, [memoryview(buffer)], entry.name)
        return buffer

    def hole(self, entry: TensorEntry, start: int, length: int) -> int:
        """How many of the `length` bytes from byte `start` of a tensor lie in a hole of a sparse file (0: none)."""
        if entry.path not in self._sparse:
            stat = entry.path.stat()
            self._sparse[entry.path] = stat.st_blocks * 512 < stat.st_size
        if not self._sparse[entry.path]:
            return 0
        return hole_length(self._files.descriptor(entry.path), entry.offset + start, length)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its stored dtype and shape, on the CPU."""
        entry = self.entry(name)
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{entry.path}: tensor {name} has dtype {entry.dtype}, which cannot be read here")
        return as_tensor(self.read_range(entry), entry.dtype, entry.shape)

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hole_length(file: int, at: int, length: int) -> int:
    """How many of the `length` bytes from `at` on are a hole (read as zeros, take no room on disk)."""
    try:
        return min(length, os.lseek(file, at, os.SEEK_DATA) - at)
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data up to the end of the file
            return length
        if error.errno == errno.EINVAL:  # a file system that cannot tell
            return 0
        raise


def as_tensor(buffer: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """View bytes as a tensor (shares the buffer)."""
    if not buffer:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[dtype]).reshape(shape)


def open_checkpoint(path: str | Path, allow_absent: bool = False) -> Checkpoint:
    """Open a folder (index plus shards, or `model.safetensors`), an index file, or one safetensors file.

    Only headers and the index are read. They must agree: each tensor stands in the shard that the index names, in no
    other, and no shard holds a tensor that the index leaves out. With `allow_absent`, shards that were not fetched
    are passed over; asking for one of their tensors raises.

    Raises: CheckpointError naming file and tensor.
    """
    path = Path(path)
    if path.is_dir():
        path = weights_file(path) or path
    if path.is_file():
        if path.suffix == ".json":
            return _open_indexed(path, allow_absent)
        return Checkpoint(path.parent, {path.name: read_header(path)}, None)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; expected a checkpoint folder")
    stray = sorted(file.name for file in path.glob("*.safetensors"))
    hint = f"it holds {stray[0]} and {len(stray) - 1} more shards; restore the index" if stray else "nothing to read"
    raise CheckpointError(f"{path} has neither {INDEX_NAME} nor {SINGLE_NAME}: {hint}")


def weights_file(folder: Path, single: str = SINGLE_NAME, index: str = INDEX_NAME) -> Path | None:
    """Which of the two files in `folder` says where its tensors are; None if neither is there.

    transformers reads the single file and passes over the index, other programs do the opposite, so a folder with the
    shards of an index *and* a single file holds two models, of which one is stale: nobody but the user knows which.

    Raises: CheckpointError naming both files.
    """
    has_single, has_index = (folder / single).exists(), (folder / index).exists()
    if has_single and has_index:
        named = sorted(set(read_index(folder / index)["weight_map"].values()))
        beside = [file for file in named if (folder / file).exists()]
        if any(file != single for file in beside):
            raise CheckpointError(
                f"{folder} holds {single} and also {index} with its shards ({beside[0]}, ...); some programs would read "
                f"the one, some the other. Move away whichever is left over from an earlier save"
            )
        return folder / single
    return folder / single if has_single else folder / index if has_index else None


def with_variant(name: str, variant: str | None) -> str:
    """`model.safetensors` -> `model.fp16.safetensors`; `model.safetensors.index.json` -> `....index.fp16.json`."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{variant}{dot}{suffix}" if variant else name


def read_index(path: Path) -> dict:
    """An index whose form is checked: `weight_map` gives the file of each tensor."""
    try:
        index = _load_unique(path, path.read_bytes())
        files = index["weight_map"].values()
        if not all(isinstance(file, str) for file in files):
            raise TypeError("weight_map must give a file name for each tensor")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a readable index ({error}); restore it") from error
    return index


def _open_indexed(path: Path, allow_absent: bool) -> Checkpoint:
    index = read_index(path)
    weight_map = index["weight_map"]
    folder = path.parent
    headers: dict[str, ShardHeader] = {}
    absent = []
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path} names the file {file!r}; shards must lie beside the index")
        if not (folder / file).exists() and allow_absent:
            absent.append(file)
            continue
        if not (folder / file).exists():
            name = next(key for key, value in weight_map.items() if value == file)
            raise CheckpointError(f"{folder / file} is absent but {path.name} expects {name} in it; fetch the shard")
        headers[file] = read_header(folder / file)
    check_index(path, weight_map, headers)
    return Checkpoint(folder, headers, index, tuple(absent))


def check_index(path: Path, weight_map: dict[str, str], headers: dict[str, ShardHeader]) -> None:
    for file, header in headers.items():
        for name in header.entries:
            wanted = weight_map.get(name)
            if wanted == file:
                continue
            if wanted is None:
                raise CheckpointError(f"{header.path} holds {name}, which {path.name} does not list; restore the index")
            twice = "; it stands in both" if wanted in headers and name in headers[wanted].entries else ""
            raise CheckpointError(
                f"{header.path} holds {name}, which {path.name} places in {wanted}{twice}; shards are swapped or the "
                f"index is from another copy, fetch both again"
            )
    for name, file in weight_map.items():
        if file in headers and name not in headers[file].entries:
            raise CheckpointError(f"{headers[file].path} lacks {name}, which {path.name} places there; fetch it again")


def iter_shards(checkpoint: Checkpoint) -> Iterator[tuple[str, list[TensorEntry]]]:
    """File name and its tensors in the order of their bytes, shard by shard."""
    for file, header in checkpoint.headers.items():
        yield file, sorted(header.entries.values(), key=lambda entry: (entry.offset, entry.nbytes))
