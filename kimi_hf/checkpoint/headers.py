"""Comparing a checkpoint's headers with the names and shapes of an empty model, before a weight is loaded."""

import re

from .check import Problems
from .layout import FLOAT_DTYPES
from .loading import Reading, conclude
from .shards import Checkpoint

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
Shapes = dict[str, tuple[int, ...]]


def check_headers(checkpoint: Checkpoint, expected: Shapes, reading: Reading) -> None:
    """Raise if the checkpoint does not fit an empty model, by the rules of `check_before_loading`.

    Args:
        expected: names (of the base model) and shapes. Experts may be fused there and apart in the file.
    Raises:
        CheckpointError: with tensor and file names.
    """
    found = {name.removeprefix("model."): entry for name, entry in checkpoint.entries.items()}
    problems, seen = Problems(), {"lm_head.weight"}
    for name, shape in expected.items():
        for part, part_shape in _as_stored(name, shape, found).items():
            seen.add(part)
            entry = found.get(part)
            if entry is None:
                problems.missing.append(f"missing: {part} {list(part_shape)} stands in no shard")
                continue
            where = f"{entry.name} in {entry.path.name}"
            if entry.dtype not in FLOAT_DTYPES:
                problems.dtypes.append(f"dtype: {where} is {entry.dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
            if tuple(entry.shape) != part_shape:
                problems.shapes.append(f"shape: {where} is {list(entry.shape)}, the config gives {list(part_shape)}")
    for name, entry in found.items():
        if name not in seen:
            kind = problems.extra_experts if ".experts." in name else problems.unexpected
            kind.append(f"unexpected: {entry.name} {list(entry.shape)} in {entry.path.name} has no place in this model")
    conclude(checkpoint, problems, problems.missing if any(map(_LAYER.search, found)) else [], reading)


def _as_stored(name: str, shape: tuple[int, ...], found: dict) -> Shapes:
    """The tensors that `name` stands for: itself, or one per expert matrix where the file has them apart."""
    stem, _, last = name.rpartition(".")
    if last not in _FUSED or not stem.endswith(".experts") or name in found:
        return {name: shape}
    experts, rows, columns = shape
    halves = _FUSED[last]
    each = (rows // len(halves), columns)
    return {f"{stem}.{i}.{which}.weight": each for i in range(experts) for which in halves}
