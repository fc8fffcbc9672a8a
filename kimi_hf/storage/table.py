"""Where every expert's matrices lie: a few numbers an expert, taken from headers that are then let go."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from kimi_hf.checkpoint.check import expert_layout
from kimi_hf.checkpoint.layout import DTYPE_BYTES, FLOAT_DTYPES, MXFP4_GROUP, parse_layer
from kimi_hf.checkpoint.shards import TORCH_DTYPES, Checkpoint, TensorEntry
from kimi_hf.errors import CheckpointError

EXPERTS = "block_sparse_moe.experts."
FUSED = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
SUFFIX = {"weight": "", "weight_packed": "_packed", "weight_scale": "_scale"}


class Part(NamedTuple):
    """One stored tensor of an expert: released matrix and ending, its dtype and shape."""

    which: str  # w1, w2, w3
    ending: str  # weight, weight_packed, weight_scale
    dtype: str
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Piece(NamedTuple):
    """Where one part of one expert lies."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Form:
    """What an expert is made of, the same for all experts of a model, in the order in which it is held in memory.

    gate_up (2F, Z) = [w1; w3] and down (Z, F) = w2; packed: first the bytes of both halves, then their scales.
    """

    experts: int
    inner: int
    width: int
    dtype: str  # of plain weights; "U8" means MXFP4

    @property
    def packed(self) -> bool:
        return self.dtype == "U8"

    @property
    def parts(self) -> tuple[Part, ...]:
        inner, width = self.inner, self.width
        if not self.packed:
            shapes = (("w1", inner, width), ("w3", inner, width), ("w2", width, inner))
            return tuple(Part(which, "weight", self.dtype, (rows, columns)) for which, rows, columns in shapes)
        halves = (("w1", "w3", inner, width), ("w2", None, width, inner))
        parts = []
        for first, second, rows, columns in halves:
            for ending, size in (("weight_packed", columns // 2), ("weight_scale", columns // MXFP4_GROUP)):
                parts += [Part(which, ending, "U8", (rows, size)) for which in (first, second) if which]
        return tuple(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return sum(part.nbytes for part in self.parts)

    def views(self, buffer: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """(gate_up, down) of a buffer (nbytes,) uint8 holding the parts in order: (dense,) or (packed, scale) each."""
        inner, width, dtype = self.inner, self.width, TORCH_DTYPES[self.dtype]
        shapes = [(2 * inner, width), (width, inner)]
        if self.packed:
            shapes = [(rows, columns // per) for rows, columns in shapes for per in (2, MXFP4_GROUP)]
        tensors, at = [], 0
        for shape in shapes:
            size = math.prod(shape) * dtype.itemsize
            tensors.append(buffer[at : at + size].view(dtype).view(shape))
            at += size
        half = len(tensors) // 2
        return tuple(tensors[:half]), tuple(tensors[half:])


class LayerTable:
    """The experts of one layer: file and offset of each part of each expert.

    `stem` is the stored name up to and with `experts.`; `fused` whether the file has the experts stacked.
    """

    def __init__(self, checkpoint: Checkpoint, stem: str, form: Form, fused: bool, paths: list[Path]):
        self.stem, self.form, self.fused, self.paths = stem, form, fused, paths
        self.parts = form.parts
        self._files, self._offsets = array("i"), array("q")
        number = {path: at for at, path in enumerate(paths)}
        for expert in range(form.experts):
            for part in self.parts:
                entry = _need(checkpoint, self.stored_name(expert, part))
                self._files.append(number[entry.path])
                self._offsets.append(entry.offset + self._start(entry, expert, part))

    def stored_name(self, expert: int, part: Part) -> str:
        """The tensor that holds this part, as the file spells it."""
        if self.fused:
            return f"{self.stem}{FUSED[part.which]}{SUFFIX[part.ending]}"
        return f"{self.stem}{expert}.{part.which}.{part.ending}"

    def _start(self, entry: TensorEntry, expert: int, part: Part) -> int:
        """Where the part begins in its tensor, whose shape and dtype are checked."""
        rows, columns = part.shape
        shape, start = (rows, columns), 0
        if self.fused:
            halves = 2 if part.which != "w2" else 1
            shape = (self.form.experts, halves * rows, columns)
            start = (expert * halves + (part.which == "w3")) * part.nbytes
        if entry.dtype != part.dtype and entry.dtype in FLOAT_DTYPES:
            raise CheckpointError(
                f"{entry.name} in {entry.path.name} is {entry.dtype}, others are {part.dtype}: experts on disk must all be "
                'stored alike. Load the checkpoint with expert_storage="ram" and save it again'
            )
        if entry.shape != shape or entry.dtype != part.dtype:
            raise CheckpointError(
                f"{entry.name} in {entry.path.name} is {entry.dtype} {list(entry.shape)}, the model needs {part.dtype} "
                f"{list(shape)}; correct config.json, or fetch the file again"
            )
        return start

    def pieces(self, expert: int) -> Iterator[tuple[Part, Piece]]:
        """Each part of an expert, in the order of `Form.parts`, and where it lies."""
        count = len(self.parts)
        for at, part in enumerate(self.parts, start=expert * count):
            yield part, Piece(self.paths[self._files[at]], self._offsets[at], part.nbytes)


def _need(checkpoint: Checkpoint, name: str) -> TensorEntry:
    entry = checkpoint.entries.get(name)
    if entry is None:
        raise CheckpointError(
            f"{checkpoint.folder} holds no {name}, which a model with its experts on disk reads from there; fetch the "
            "shards again, or correct config.json"
        )
    return entry


def find_layers(
    checkpoint: Checkpoint, layers: list[int], experts: int, inner: int, width: int
) -> tuple[Form, dict[int, LayerTable]]:
    """The tables of the given 0-based layers, each with `experts` experts of sizes `inner` (F) and `width` (Z).

    Raises: CheckpointError for an absent or mis-shaped expert, mixed formats, or plain experts of several dtypes.
    """
    kind = expert_layout(checkpoint)
    fused, packed = kind.startswith("fused"), kind.endswith("packed")
    stems, dtype = {}, "U8" if packed else None
    for name, entry in checkpoint.entries.items():
        if EXPERTS not in name:
            continue
        stem = name[: name.index(EXPERTS) + len(EXPERTS)]
        dtype = dtype or entry.dtype
        if stem not in stems and (at := parse_layer(name)) is not None:
            stems[stem] = at.layer
    by_layer = {layer: stem for stem, layer in stems.items()}
    if dtype is None or not (packed or dtype in FLOAT_DTYPES):
        found = "none of" if dtype is None else f"{dtype} for"
        raise CheckpointError(f"{checkpoint.folder} holds {found} the model's routed experts; fetch its shards again")
    form = Form(experts, inner, width, dtype)
    paths = [header.path for header in checkpoint.headers.values()]
    tables = {}
    for layer in layers:
        if layer not in by_layer:
            raise CheckpointError(
                f"{checkpoint.folder} holds no routed experts of layer {layer}, which a model with its experts on disk reads "
                "from there; fetch its shards again, or correct config.json"
            )
        tables[layer] = LayerTable(checkpoint, by_layer[layer], form, fused, paths)
    return form, tables
