"""Comparing a checkpoint's headers with the names and shapes of an empty model, before a weight is loaded."""

import re

from .loading import does_not_fit
from .shards import Checkpoint

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
Shapes = dict[str, tuple[int, ...]]


def check_headers(checkpoint: Checkpoint, expected: Shapes, *, other_shapes: bool) -> None:
    """Raise if the checkpoint does not fit an empty model.

    As for the Kimi models, tensors missing from a layer that is otherwise there are an error, and absent layers, heads
    and embeddings are left to transformers, which initialises and reports them.

    Args:
        expected: names (of the base model) and shapes. Experts may be fused there and apart in the file.
        other_shapes: whether shapes may differ.
    Raises:
        CheckpointError: with tensor and file names.
    """
    found = {name.removeprefix("model."): entry for name, entry in checkpoint.entries.items()}
    layers = {match[1] for match in map(_LAYER.search, found) if match}
    fatal = []
    for name, shape in expected.items():
        parts = _as_stored(name, shape, found)
        for part, part_shape in parts.items():
            entry, match = found.get(part), _LAYER.search(part)
            if entry is None:
                if match and match[1] in layers:
                    fatal.append(f"missing: {part} {list(part_shape)} stands in no shard")
            elif tuple(entry.shape) != part_shape and not other_shapes:
                where = f"{entry.name} in {entry.path.name}"
                fatal.append(f"shape: {where} is {list(entry.shape)}, the config gives {list(part_shape)}")
    if fatal:
        raise does_not_fit(checkpoint, fatal)


def _as_stored(name: str, shape: tuple[int, ...], found: dict) -> Shapes:
    """The tensors that `name` stands for: itself, or one per expert matrix where the file has them apart."""
    stem, _, last = name.rpartition(".")
    if last not in _FUSED or not stem.endswith(".experts") or name in found:
        return {name: shape}
    experts, rows, columns = shape
    halves = _FUSED[last]
    each = (rows // len(halves), columns)
    return {f"{stem}.{i}.{which}.weight": each for i in range(experts) for which in halves}
