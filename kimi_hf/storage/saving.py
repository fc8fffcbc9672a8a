"""Adding the experts of a store to a saved folder that has everything else: bytes copied, never held."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kimi_hf.checkpoint.layout import TensorSpec
from kimi_hf.checkpoint.shards import INDEX_NAME, SINGLE_NAME, read_header
from kimi_hf.checkpoint.writing import build_header
from kimi_hf.errors import CheckpointError
from kimi_hf.storage.store import ExpertStore
from kimi_hf.storage.table import LayerTable, Piece

CHUNK = 16 << 20


class Moved(NamedTuple):
    """A tensor to be written, and where its bytes are."""

    spec: TensorSpec
    piece: Piece


def add_experts(folder: Path, store: ExpertStore, stems: dict[int, str], shard_bytes: int) -> None:
    """Write the experts of every layer into `folder`, under released per-expert names, and an index over all files.

    Args:
        folder: holds `model.safetensors`, or shards with an index, without experts; its files are renumbered.
        stems: by layer, the saved names up to and with `experts.`.
        shard_bytes: size of the new files; one at least as large as a tensor.
    Raises: CheckpointError if the disk is too small, cannot be written, or a source has changed.
    """
    total = len(store.tables) * store.form.experts * store.form.nbytes
    free = shutil.disk_usage(folder).free
    if total > free:
        raise CheckpointError(
            f"the experts of {store.folder} take {total / 1e9:.1f} GB, but the disk to save on has {free / 1e9:.1f} GB free"
        )
    shards = list(_fill(store, stems, shard_bytes))
    before = _saved_files(folder)
    count = len(before) + len(shards)
    weight_map: dict[str, str] = {}
    size = 0
    for number, path in enumerate(before, start=1):
        header = read_header(path)
        path.rename(folder / _shard_name(number, count))
        weight_map.update(dict.fromkeys(header.entries, _shard_name(number, count)))
        size += sum(entry.nbytes for entry in header.entries.values())
    for number, shard in enumerate(shards, start=len(before) + 1):
        name = _shard_name(number, count)
        _write_shard(folder / name, shard, store)
        weight_map.update((moved.spec.name, name) for moved in shard)
        size += sum(moved.spec.nbytes for moved in shard)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _saved_files(folder: Path) -> list[Path]:
    """The weight files that are there, in order; every name is given up, so that none stands in the way of a new one."""
    index = folder / INDEX_NAME
    names = [SINGLE_NAME]
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        index.unlink()
    paths = []
    for at, name in enumerate(names):
        paths.append((folder / name).rename(folder / f"saved-{at:05d}.safetensors"))
    return paths


def _fill(store: ExpertStore, stems: dict[int, str], shard_bytes: int) -> Iterator[list[Moved]]:
    shard: list[Moved] = []
    filled = 0
    for layer, table in store.tables.items():
        for expert in range(store.form.experts):
            moved = sorted(_tensors(table, expert, stems[layer]), key=lambda one: one.spec.name)
            if shard and filled + store.form.nbytes > shard_bytes:
                yield shard
                shard, filled = [], 0
            shard += moved
            filled += store.form.nbytes
    if shard:
        yield shard


def _tensors(table: LayerTable, expert: int, stem: str) -> Iterator[Moved]:
    for part, piece in table.pieces(expert):
        yield Moved(TensorSpec(f"{stem}{expert}.{part.which}.{part.ending}", part.dtype, part.shape), piece)


def _write_shard(path: Path, shard: list[Moved], store: ExpertStore) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            file.write(build_header([moved.spec for moved in shard], {"format": "pt"}))
            for spec, piece in shard:
                for start in range(0, piece.nbytes, CHUNK):
                    data = memoryview(bytearray(min(CHUNK, piece.nbytes - start)))
                    store.files.read_into(piece.path, piece.offset + start, [data], spec.name)
                    while data:
                        data = data[file.write(data) :]
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; nothing was saved, the experts lie in {store.folder}"
        ) from error
