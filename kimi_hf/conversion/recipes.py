"""How output tensors are made from stored ones: byte ranges, MXFP4 decoding and encoding, padding, random values.

A recipe gives its bytes in pieces of a few MB, and the same bytes each time it is asked (the writer asks twice: once
to write, once to compare). None of them holds a whole fused expert tensor in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kimi_hf.checkpoint.check import SCALE_ENDINGS, nan_scale
from kimi_hf.checkpoint.layout import DTYPE_BYTES, MXFP4_GROUP, TensorSpec
from kimi_hf.checkpoint.shards import TORCH_DTYPES, Checkpoint, TensorEntry, as_tensor
from kimi_hf.conversion.writer import CHUNK, Chunk, Recipe
from kimi_hf.errors import CheckpointError
from kimi_hf.ops import mxfp4

PIECE = 1 << 17  # weights handled at a time, so that the steps of a formula meet in the cache
RECENT = 1024  # pieces of scales kept, of at most CHUNK / 256 bytes each


class ByteRange(NamedTuple):
    """`nbytes` bytes of a stored tensor, from byte `start` of it."""

    checkpoint: Checkpoint
    entry: TensorEntry
    start: int
    nbytes: int

    @classmethod
    def whole(cls, checkpoint: Checkpoint, entry: TensorEntry) -> ByteRange:
        return cls(checkpoint, entry, 0, entry.nbytes)

    def row(self, row: int, rows: int) -> ByteRange:
        """Row (first-axis entry) `row` of `rows` equal ones in this range."""
        size = self.nbytes // rows
        return ByteRange(self.checkpoint, self.entry, self.start + row * size, size)

    def read(self, start: int = 0, length: int | None = None) -> bytearray:
        length = self.nbytes - start if length is None else length
        return self.checkpoint.read_range(self.entry, self.start + start, length)

    def describe(self) -> str:
        return f"{self.entry.path.name}:{self.entry.name}[{self.start}:+{self.nbytes}]"


class Matrix(NamedTuple):
    """One expert matrix (rows, cols), dense (`dense`) or as MXFP4 (`packed` and `scale`); `name` for messages."""

    name: str
    rows: int
    cols: int
    dtype: str
    dense: ByteRange | None
    packed: ByteRange | None = None
    scale: ByteRange | None = None

    def describe(self) -> str:
        return "+".join(part.describe() for part in (self.dense, self.packed, self.scale) if part is not None)

    def dense_rows(self, begin: int, end: int, dtype: str) -> torch.Tensor:
        """Rows [begin, end) as a (end - begin, cols) tensor; MXFP4 is decoded straight to `dtype`."""
        if self.dense is not None:
            size = self.cols * DTYPE_BYTES[self.dtype]
            raw = self.dense.read(begin * size, (end - begin) * size)
            return as_tensor(raw, self.dtype, (end - begin, self.cols)).to(TORCH_DTYPES[dtype])
        width, groups = self.cols // 2, self.cols // MXFP4_GROUP
        packed = as_tensor(self.packed.read(begin * width, (end - begin) * width), "U8", (end - begin, width))
        scale = as_tensor(self.scale.read(begin * groups, (end - begin) * groups), "U8", (end - begin, groups))
        name = f"{self.scale.entry.path.name}: {self.name}.weight"
        return mxfp4.unpack(packed, scale, TORCH_DTYPES[dtype], name=name)


def to_bytes(tensor: torch.Tensor) -> bytearray:
    """The tensor's memory, row-major, as safetensors stores it."""
    return bytearray(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))


@dataclass(frozen=True)
class Copy:
    """Stored bytes, in the order of `ranges`: a whole tensor, some of its rows, or several tensors stacked.

    MXFP4 scales are looked at on the way: one that is NaN would make the copy as useless as its source.
    """

    spec: TensorSpec
    ranges: Sequence[ByteRange]

    def chunks(self) -> Iterator[Chunk]:
        for part in self.ranges:
            start = 0
            while start < part.nbytes:
                length = part.checkpoint.hole(part.entry, part.start + start, part.nbytes - start)
                if length:
                    yield length
                else:
                    length = min(CHUNK, part.nbytes - start)
                    data = part.read(start, length)
                    if part.entry.name.endswith(SCALE_ENDINGS) and (at := data.find(b"\xff")) >= 0:
                        at += part.start + start
                        raise nan_scale(part.entry.name, part.entry.path, at, part.entry.shape[-1])
                    yield data
                start += length

    def describe(self) -> str:
        return "copy " + " ".join(part.describe() for part in self.ranges)


@dataclass(frozen=True)
class Dense:
    """Expert matrices stacked along the rows, each decoded (or converted) to the spec's dtype."""

    spec: TensorSpec
    matrices: Sequence[Matrix]

    def chunks(self) -> Iterator[Chunk]:
        for matrix in self.matrices:
            step = max(1, CHUNK // (matrix.cols * 4))
            for begin in range(0, matrix.rows, step):
                yield to_bytes(matrix.dense_rows(begin, min(begin + step, matrix.rows), self.spec.dtype))

    def describe(self) -> str:
        return f"dense {self.spec.dtype} " + " ".join(matrix.describe() for matrix in self.matrices)


@dataclass(frozen=True)
class Packed:
    """One half (`part` "packed" or "scale") of dense expert matrices in MXFP4, stacked along the rows.

    `scales`, one range a matrix, are the scales that the weights were decoded with; a group that they still
    reproduce bit for bit keeps its scale, so an untouched weight gets back exactly its bytes.

    Packing gives both halves at once: the packed half leaves the scales in `recent` (shared by the recipes of a plan),
    and the scale half, which comes next in a file, takes them from there instead of packing again.
    """

    spec: TensorSpec
    part: str
    matrices: Sequence[Matrix]
    scales: Sequence[ByteRange | None]
    recent: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def chunks(self) -> Iterator[Chunk]:
        for matrix, scale in zip(self.matrices, self.scales, strict=True):
            step = max(1, CHUNK // (matrix.cols * 8))
            for begin in range(0, matrix.rows, step):
                key = (matrix.name, begin)
                if self.part == "scale" and key in self.recent:
                    yield to_bytes(self.recent.pop(key))
                    continue
                packed, scales = pack_rows(matrix, scale, begin, min(begin + step, matrix.rows))
                if self.part == "packed" and len(self.recent) < RECENT:
                    self.recent[key] = scales
                yield to_bytes(packed if self.part == "packed" else scales)

    def describe(self) -> str:
        pairs = zip(self.matrices, self.scales, strict=True)
        return f"{self.part} " + " ".join(f"{m.describe()}/{s.describe() if s else '-'}" for m, s in pairs)


def pack_rows(matrix: Matrix, scale: ByteRange | None, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [begin, end) in MXFP4: packed (n, cols / 2) and scale (n, cols / 32), both U8."""
    weight = matrix.dense_rows(begin, end, matrix.dtype)
    groups = matrix.cols // MXFP4_GROUP
    stored = None
    if scale is not None:
        stored = as_tensor(scale.read(begin * groups, (end - begin) * groups), "U8", (end - begin, groups))
        if weight.dtype == torch.bfloat16:
            kept = exact_codes(weight, stored)
            if torch.equal(*_bits(weight, kept, stored, matrix.name)):
                return kept, stored
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(f"{matrix.name} holds infinities or NaN in rows {begin} to {end - 1}; cannot be packed")
    packed, fresh = mxfp4.pack(weight)
    if stored is None:
        return packed, fresh
    kept, _ = mxfp4.pack(weight, scale=stored)
    again, before = _bits(weight, kept, stored, matrix.name)
    same = (again == before).unflatten(-1, (groups, MXFP4_GROUP)).all(-1)
    codes = torch.where(same.repeat_interleave(MXFP4_GROUP // 2, -1), kept, packed)
    return codes, torch.where(same, stored, fresh)


def exact_codes(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed codes of bf16 weights (n, cols) that lie on the grid of `scale` (n, cols / 32); nonsense elsewhere.

    With r the weight's exponent less the scale's and h its half bit, 1 is code 2 and each further step is one more:
    code = 2 r + 2 + h for r >= 0, and 1 for r = -1 (0.5). A dozen integer operations, ten times as fast as rounding.
    """
    packed = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
    step = max(1, PIECE // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        rows = slice(begin, begin + step)
        bits = weight[rows].view(torch.int16).unflatten(-1, (-1, MXFP4_GROUP))
        exponent = (bits >> 7).bitwise_and_(255)
        relative = exponent - scale[rows].to(torch.int16).unsqueeze(-1)
        code = (bits >> 6).bitwise_and_(1).add_(relative, alpha=2).add_(2)
        code.masked_fill_(relative == -1, 1).masked_fill_(exponent == 0, 0).clamp_(0, 7)
        code.bitwise_or_((bits >> 12).bitwise_and_(8))
        # Two codes side by side are one 32-bit word: the low half byte first.
        pair = code.flatten(-2).view(torch.int32)
        packed[rows] = (pair | pair >> 12).to(torch.uint8)
    return packed


def _bits(weight: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
    """What the packed bytes decode to, and the weights, both as integers: signed zeros count."""
    again = mxfp4.unpack(packed, scale, weight.dtype, name=f"{name}.weight")
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return again.view(bits), weight.view(bits)


@dataclass(frozen=True)
class Padded:
    """A stored tensor followed by zeros up to the spec's size (the tail of `A_log`)."""

    spec: TensorSpec
    source: ByteRange

    def chunks(self) -> Iterator[Chunk]:
        data = self.source.read()[: self.spec.nbytes]
        yield data + bytes(self.spec.nbytes - len(data))

    def describe(self) -> str:
        return f"pad {self.source.describe()}"


@dataclass(frozen=True)
class Cast:
    """A stored tensor in another float dtype."""

    spec: TensorSpec
    source: ByteRange

    def chunks(self) -> Iterator[Chunk]:
        size = DTYPE_BYTES[self.source.entry.dtype]
        for start in range(0, self.source.nbytes, CHUNK):
            raw = self.source.read(start, min(CHUNK, self.source.nbytes - start))
            yield to_bytes(
                as_tensor(raw, self.source.entry.dtype, (len(raw) // size,)).to(TORCH_DTYPES[self.spec.dtype])
            )

    def describe(self) -> str:
        return f"cast {self.source.describe()}"


@dataclass(frozen=True)
class InMemory:
    """A small tensor that is already here."""

    spec: TensorSpec
    tensor: torch.Tensor = field(repr=False)

    def chunks(self) -> Iterator[Chunk]:
        data = to_bytes(self.tensor)
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]

    def describe(self) -> str:
        return "memory " + hashlib.sha256(to_bytes(self.tensor)).hexdigest()


@dataclass(frozen=True)
class Followed:
    """One recipe's bytes after another's: rows appended to a stored tensor."""

    spec: TensorSpec
    parts: Sequence[Recipe]

    def chunks(self) -> Iterator[Chunk]:
        for part in self.parts:
            yield from part.chunks()

    def describe(self) -> str:
        return " then ".join(part.describe() for part in self.parts)


@dataclass(frozen=True)
class Random:
    """Seeded random values; `kind` is "normal", "uniform", "log_of_uniform", "constant" or "bytes", see `_draw`.

    The seed is mixed with the tensor's name, so a tensor does not depend on which others are made.
    """

    spec: TensorSpec
    kind: str
    low: float
    high: float
    seed: int
    zero_from: int | None = None

    def chunks(self) -> Iterator[Chunk]:
        digest = hashlib.sha256(f"{self.seed} {self.spec.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        count = math.prod(self.spec.shape)
        step = CHUNK // 4
        for start in range(0, count, step):
            values = self._draw(min(step, count - start), generator)
            if self.zero_from is not None:
                values[max(0, self.zero_from - start) :] = 0
            yield to_bytes(values.to(TORCH_DTYPES[self.spec.dtype]))

    def _draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """normal: mean low, deviation high; constant: low. Others: between low and high; bytes: both included."""
        if self.kind == "normal":
            return torch.randn(count, generator=generator) * self.high + self.low
        if self.kind == "constant":
            return torch.full((count,), self.low)
        if self.kind == "bytes" and (self.low, self.high) == (0, 255):
            words = torch.empty((count + 7) // 8, dtype=torch.int64).random_(-(2**63), None, generator=generator)
            return words.view(torch.uint8)[:count]
        if self.kind == "bytes":
            return torch.randint(int(self.low), int(self.high) + 1, (count,), generator=generator, dtype=torch.uint8)
        uniform = torch.rand(count, generator=generator)
        values = self.low + uniform * (self.high - self.low)
        return values.log() if self.kind == "log_of_uniform" else values

    def describe(self) -> str:
        return f"random {self.kind} {self.low} {self.high} {self.seed} {self.zero_from}"
