"""The experts of a model in their files: read by range, kept in a bounded cache, counted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock

import torch

from kimi_hf.checkpoint.check import nan_scale
from kimi_hf.checkpoint.files import OpenFiles
from kimi_hf.checkpoint.shards import Checkpoint
from kimi_hf.storage.cache import ExpertCache
from kimi_hf.storage.table import LayerTable, Part, Piece, find_layers

DEFAULT_CACHE_BYTES = 1 << 30
NAN_SCALE = 255
Expert = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]  # gate_up, down; each (dense,) or (packed, scale)


@dataclass(frozen=True)
class ExpertStorageReport:
    """What lies on disk, what is kept in memory, and what was asked for since opening (or the last reset).

    A request is one expert in one forward (or backward) of one layer, however many tokens it gets.
    """

    layers: int
    experts: int  # a layer
    expert_bytes: int
    bytes_on_disk: int
    cache_limit: int
    cached_bytes: int
    cached_experts: int
    hits: int
    misses: int
    bytes_read: int
    seconds_reading: float

    @property
    def hit_rate(self) -> float:
        """Share of requests that needed no reading; 0 before the first one."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        speed = self.bytes_read / self.seconds_reading if self.seconds_reading else 0.0
        return (
            f"{self.layers} layers of {self.experts} experts, {_size(self.bytes_on_disk)} on disk; cache "
            f"{_size(self.cached_bytes)} of {_size(self.cache_limit)} ({self.cached_experts} experts); {self.hits} hits, "
            f"{self.misses} misses (hit rate {self.hit_rate:.1%}); {_size(self.bytes_read)} read at {_size(speed)}/s"
        )


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


class ExpertStore:
    """Reads experts of given layers out of a checkpoint's files.

    Files are opened at once and stay open, so a checkpoint that is deleted or replaced meanwhile is still read as it was;
    one that is written into or cut short is refused at the next read. Reading is by `preadv`, not through a memory map:
    as fast, and an error where a map would end the process.

    Copies (`deepcopy`) share files and cache. A pickled store opens its files again, with an empty cache.
    """

    def __init__(self, checkpoint: Checkpoint, layers: list[int], sizes: tuple[int, int, int], cache_bytes: int):
        """Args: layers: 0-based. sizes: experts a layer, F, Z. Raises: CheckpointError, see `table.find_layers`."""
        self.form, self.tables = find_layers(checkpoint, layers, *sizes)
        self.folder = checkpoint.folder
        self.files = OpenFiles(watched=True)
        for header in checkpoint.headers.values():
            self.files.remember(header.path)
        self.cache = ExpertCache(cache_bytes)
        self._last: tuple[tuple[int, int] | None, torch.Tensor | None] = (None, None)
        self._lock = Lock()
        self.reset()

    def reset(self) -> None:
        """Count from zero; the cache keeps what it holds."""
        self.hits = self.misses = self.bytes_read = 0
        self.seconds = 0.0

    def report(self) -> ExpertStorageReport:
        form, layers = self.form, len(self.tables)
        return ExpertStorageReport(
            layers=layers,
            experts=form.experts,
            expert_bytes=form.nbytes,
            bytes_on_disk=layers * form.experts * form.nbytes,
            cache_limit=self.cache.limit,
            cached_bytes=self.cache.nbytes,
            cached_experts=len(self.cache),
            hits=self.hits,
            misses=self.misses,
            bytes_read=self.bytes_read,
            seconds_reading=self.seconds,
        )

    def expert(self, layer: int, expert: int, again: bool = False) -> Expert:
        """(gate_up, down) of an expert, from the cache or from disk; views of memory that must not be written to.

        The last one stays in memory even where the cache has no room for it. `again`: do not count this request.

        Raises: CheckpointError if a file is gone, has changed, or holds an MXFP4 scale of 255.
        """
        key, (held, buffer) = (layer, expert), self._last
        if held != key:
            buffer = self.cache.get(layer, expert)
        if buffer is not None:
            with self._lock:
                self.hits += not again
        else:
            self._last = (None, None)
            keep = self.cache.make_room(layer, self.form.nbytes)
            buffer = self._timed_read(self.tables[layer], expert)
            if keep:
                self.cache.put(layer, expert, buffer)
        self._last = (key, buffer)
        return self.form.views(buffer)

    def fetcher(self, layer: int, experts: Iterable[int]) -> Callable[[int], Expert]:
        """For one forward of a layer, and its backward: expert number -> expert, counted once when asked twice in a row.

        `experts`: those that will be asked for.
        """
        self.cache.begin(layer, experts)
        last = None

        def fetch(expert: int) -> Expert:
            nonlocal last
            again, last = expert == last, expert
            return self.expert(layer, expert, again)

        return fetch

    def _timed_read(self, table: LayerTable, expert: int) -> torch.Tensor:
        start = time.perf_counter()
        buffer = self._read(table, expert)
        with self._lock:
            self.misses += 1
            self.bytes_read += buffer.nbytes
            self.seconds += time.perf_counter() - start
        return buffer

    def _read(self, table: LayerTable, expert: int) -> torch.Tensor:
        buffer = torch.empty(self.form.nbytes, dtype=torch.uint8)
        memory, at, pieces = memoryview(buffer.numpy()), 0, []
        for part, piece in table.pieces(expert):
            pieces.append((piece, part, memory[at : at + part.nbytes]))
            at += part.nbytes
        for run in adjacent(pieces):
            first, part, _ = run[0]
            name = table.stored_name(expert, part)
            self.files.read_into(first.path, first.offset, [target for _, _, target in run], name)
        if self.form.packed:
            self._check_scales(table, expert, buffer)
        return buffer

    def _check_scales(self, table: LayerTable, expert: int, buffer: torch.Tensor) -> None:
        at = 0
        for part, piece in table.pieces(expert):
            if part.ending == "weight_scale":
                scale = buffer[at : at + part.nbytes]
                if int(scale.max()) == NAN_SCALE:
                    place = int((scale == NAN_SCALE).nonzero()[0])
                    raise nan_scale(table.stored_name(expert, part), piece.path, place, part.shape[1])
            at += part.nbytes

    def __deepcopy__(self, memo: dict) -> ExpertStore:
        return self

    def __getstate__(self) -> dict:
        state = self.__dict__.copy()
        del state["_lock"]
        state.update(cache=self.cache.limit, _last=(None, None))
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.cache, self._lock = ExpertCache(state["cache"]), Lock()


def adjacent(pieces: list[tuple[Piece, Part, memoryview]]) -> list[list[tuple[Piece, Part, memoryview]]]:
    """Sorted by place, and those that follow each other in a file put together: one call to the kernel each."""
    pieces = sorted(pieces, key=lambda piece: (piece[0].path, piece[0].offset))
    runs = [pieces[:1]]
    for before, after in itertools.pairwise(pieces):
        if after[0].path == before[0].path and after[0].offset == before[0].offset + before[0].nbytes:
            runs[-1].append(after)
        else:
            runs.append([after])
    return runs
