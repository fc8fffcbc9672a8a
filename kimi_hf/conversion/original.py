"""What a conversion would lose, kept beside the result so that the way back is exact to the byte.

A folder converted away from its released layout carries `kimi_hf_original/`: each source shard's header (names, their
order, metadata), the index, config.json, and, when MXFP4 experts were decoded, their scale tensors (a scale cannot
be told from the decoded values: 3 x 2^0 and 1.5 x 2^1 are the same number). No loader looks into that folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kimi_hf.checkpoint.layout import TensorSpec
from kimi_hf.checkpoint.shards import (
    INDEX_NAME,
    Checkpoint,
    header_prefix,
    parse_prefix,
    read_header,
)
from kimi_hf.conversion.recipes import ByteRange, Copy, Matrix
from kimi_hf.conversion.view import CheckpointView
from kimi_hf.conversion.writer import PlannedShard, Recipe

FOLDER = "kimi_hf_original"


def record(view: CheckpointView, keep_scales: bool) -> tuple[dict[str, bytes | Path], list[PlannedShard]]:
    """Files and extra shards that describe `view`'s checkpoint, to be written with a conversion of it."""
    folder = view.checkpoint.folder
    older = folder / FOLDER
    files: dict[str, bytes | Path] = {}
    if older.is_dir():
        files = {f"{FOLDER}/{path.name}": path for path in older.iterdir() if path.is_file()}
    else:
        files[f"{FOLDER}/config.json"] = folder / "config.json"
        if (folder / INDEX_NAME).exists():
            files[f"{FOLDER}/{INDEX_NAME}"] = folder / INDEX_NAME
        for name, header in view.checkpoint.headers.items():
            files[f"{FOLDER}/{name}.header"] = header_prefix(header.path)
    return files, list(_scale_shards(view)) if keep_scales else []


def _scale_shards(view: CheckpointView):
    """One file of scales for each layer, under the released per-expert names."""
    by_layer: dict[int, list[Recipe]] = {}
    for layer, expert, which in view.matrices():
        matrix = view.matrix(layer, expert, which)
        shape = (matrix.rows, matrix.scale.nbytes // matrix.rows)
        spec = TensorSpec(f"{matrix.name}.weight_scale", "U8", shape)
        by_layer.setdefault(layer, []).append(Copy(spec, (matrix.scale,)))
    for layer, recipes in by_layer.items():
        yield PlannedShard(f"{FOLDER}/scales-layer-{layer:05d}.safetensors", recipes, indexed=False)


class Scales:
    """The scales that dense experts were decoded with."""

    def __init__(self, checkpoint: Checkpoint, prefix: str):
        self._checkpoint = checkpoint
        self._names = {name.removeprefix(prefix): name for name in checkpoint.entries}

    @classmethod
    def load(cls, folder: Path) -> Scales | None:
        """The scales kept in a converted folder, or None."""
        paths = sorted((folder / FOLDER).glob("scales-layer-*.safetensors"))
        if not paths:
            return None
        headers = {path.name: read_header(path) for path in paths}
        checkpoint = Checkpoint(folder / FOLDER, headers, None)
        return cls(checkpoint, "language_model.")

    def find(self, matrix: Matrix) -> ByteRange | None:
        """The scale tensor of a matrix, if it was kept and still fits the matrix."""
        name = self._names.get(f"{matrix.name.removeprefix('language_model.')}.weight_scale")
        if name is None:
            return None
        entry = self._checkpoint.entries[name]
        return ByteRange.whole(self._checkpoint, entry) if entry.nbytes * 32 == matrix.rows * matrix.cols else None


class Original:
    """The headers, index and config of the files that a folder was converted from."""

    def __init__(self, folder: Path, prefixes: Mapping[str, bytes]):
        self.folder = folder
        self.prefixes = prefixes
        self.specs: dict[str, list[TensorSpec]] = {
            file: parse_prefix(folder / file, prefix) for file, prefix in sorted(prefixes.items())
        }

    @classmethod
    def load(cls, folder: Path) -> Original | None:
        """Of a converted checkpoint folder; None if it keeps none."""
        kept = folder / FOLDER
        if not kept.is_dir():
            return None
        return cls(kept, {path.name.removesuffix(".header"): path.read_bytes() for path in kept.glob("*.header")})

    @classmethod
    def of(cls, view: CheckpointView) -> Original:
        """Of a checkpoint itself, for a conversion that turns out to change nothing."""
        headers = view.checkpoint.headers
        return cls(view.checkpoint.folder, {file: header_prefix(header.path) for file, header in headers.items()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.shape for specs in self.specs.values() for spec in specs}

    @property
    def config(self) -> bytes:
        return (self.folder / "config.json").read_bytes()

    @property
    def index(self) -> bytes | None:
        path = self.folder / INDEX_NAME
        return path.read_bytes() if path.exists() else None

    def shards(self, recipes: Sequence[Recipe]) -> list[PlannedShard] | None:
        """The recipes arranged as the original files, header bytes included; None if the tensors are not the same."""
        by_name: Mapping[str, Recipe] = {recipe.spec.name: recipe for recipe in recipes}
        wanted = {spec.name: spec for specs in self.specs.values() for spec in specs}
        if wanted.keys() != by_name.keys() or any(by_name[name].spec != spec for name, spec in wanted.items()):
            return None
        return [
            PlannedShard(file, [by_name[spec.name] for spec in specs], self.prefixes[file])
            for file, specs in self.specs.items()
        ]
