"""From a checkpoint and a target configuration to the recipes of every output tensor.

Conversion and slicing are one computation: list the target's layout, and say for each of its tensors which stored
bytes make it. What is cut (layers, experts, vocabulary rows) and how experts are stored are its parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_hf.checkpoint.check import check_checkpoint
from kimi_hf.checkpoint.geometry import TextGeometry
from kimi_hf.checkpoint.layout import (
    FLOAT_DTYPES,
    TEXT_PREFIX,
    TensorSpec,
    is_vision,
    parse_expert,
    parse_layer,
    released_layout,
)
from kimi_hf.conversion.original import Scales
from kimi_hf.conversion.recipes import ByteRange, Copy, Dense, Followed, Matrix, Packed, Padded, Random
from kimi_hf.conversion.view import CheckpointView
from kimi_hf.conversion.writer import Recipe
from kimi_hf.errors import CheckpointError, ConfigError

ROUTER = ("block_sparse_moe.gate.weight", "block_sparse_moe.gate.e_score_correction_bias")
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Cut:
    """What to keep; None keeps all. Numbers are 0-based.

    Attributes:
        layers: source layer of each output layer.
        experts: source expert of each output expert, the same in every layer, or by source layer.
        rows: source row of each output vocabulary row; None entries are new rows, drawn at random.
        text_only: leave out tower and projector, and the composite prefix.
    """

    layers: Sequence[int] | None = None
    experts: Sequence[int] | Mapping[int, Sequence[int]] | None = None
    rows: Sequence[int | None] | None = None
    text_only: bool = False

    def source_layer(self, layer: int) -> int:
        return layer if self.layers is None else self.layers[layer]

    def source_experts(self, source_layer: int, count: int) -> Sequence[int]:
        if self.experts is None:
            return range(count)
        return self.experts[source_layer] if isinstance(self.experts, Mapping) else self.experts


@dataclass
class Plan:
    """A target: its configuration, how experts are stored, and what is kept of the source.

    Attributes:
        experts: one of `layout.EXPERT_LAYOUTS`; None keeps the source's.
        dtype: of experts that are decoded ("BF16"); None takes the config's.
        scales: the scales that dense experts were once decoded with, to restore packed bytes exactly.
        stored_shapes: shapes of `A_log` by output name, when the original files are known.
        seed: of new vocabulary rows.
        recent: scales that the packed halves of experts leave for the scale halves, see `recipes.Packed`.
    """

    view: CheckpointView
    config: Mapping[str, Any]
    experts: str | None = None
    cut: Cut = field(default_factory=Cut)
    dtype: str | None = None
    scales: Scales | None = None
    stored_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0
    recent: dict = field(default_factory=dict, init=False, repr=False)

    def recipes(self) -> Iterator[Recipe]:
        """One recipe per output tensor, in the order of the target's layout.

        Raises: CheckpointError when the source lacks or mis-shapes a tensor, ConfigError for an impossible target.
        """
        text = TextGeometry.from_config(self.config)
        prefix = TEXT_PREFIX if text.composite else ""
        experts = self.experts or self.view.experts
        layout = released_layout(
            self.config,
            experts=experts,
            prefix=prefix,
            vision=self.view.has_vision and not self.cut.text_only,
            head=self.view.has_head,
        )
        for spec in layout:
            yield self._recipe(text, prefix, experts, spec)

    def _recipe(self, text: TextGeometry, prefix: str, experts: str, spec: TensorSpec) -> Recipe:
        if is_vision(spec.name):
            return self._stored(spec, spec.name)
        canonical = spec.name.removeprefix(prefix)
        at = parse_layer(canonical)
        if at is None:
            if canonical in VOCABULARY and self.cut.rows is not None:
                return self._vocabulary(spec, canonical)
            return self._stored(spec, canonical)
        layer = self.cut.source_layer(at.layer)
        if ".experts." in at.rest:
            return self._experts(text, experts, spec, layer, at.rest)
        source = f"model.layers.{layer}.{at.rest}"
        if at.rest in ROUTER and self.cut.experts is not None:
            kept = self.cut.source_experts(layer, self.view.text.num_experts)
            return self._rows(spec, source, kept)
        if at.rest == "self_attn.A_log":
            return self._decay(text, spec, source)
        return self._stored(spec, source)

    def _stored(self, spec: TensorSpec, canonical: str) -> Recipe:
        entry = self.view.get(canonical)
        self._same_shape(entry.name, entry.shape, spec.shape)
        return Copy(spec._replace(dtype=entry.dtype), (self.view.whole(canonical),))

    @staticmethod
    def _same_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise CheckpointError(f"{name} is {list(found)}, the target's config gives {list(expected)}; correct it")

    def _decay(self, text: TextGeometry, spec: TensorSpec, canonical: str) -> Recipe:
        """`A_log`: a released shape stays; a bare (H,) gets its released shape back, padding included."""
        entry = self.view.get(canonical)
        heads = (text.kda_heads,)
        wanted = self.stored_shapes.get(spec.name, spec.shape if entry.shape == heads else entry.shape)
        if wanted not in text.decay_shapes or entry.shape not in text.decay_shapes:
            raise CheckpointError(f"{entry.name} is {list(entry.shape)}; expected one of {text.decay_shapes}")
        spec = TensorSpec(spec.name, entry.dtype, wanted)
        source = self.view.whole(canonical)
        return Copy(spec, (source,)) if spec.nbytes == entry.nbytes else Padded(spec, source)

    def _rows(self, spec: TensorSpec, canonical: str, rows: Sequence[int]) -> Recipe:
        entry = self.view.get(canonical)
        if max(rows, default=0) >= entry.shape[0]:
            raise ConfigError(f"{entry.name} has {entry.shape[0]} rows, row {max(rows)} was asked for")
        self._same_shape(entry.name, (len(rows), *entry.shape[1:]), spec.shape)
        return Copy(spec._replace(dtype=entry.dtype), row_ranges(self.view.whole(canonical), entry.shape[0], rows))

    def _vocabulary(self, spec: TensorSpec, canonical: str) -> Recipe:
        """Runs of kept rows and of new ones, one after another."""
        std = self.config.get("text_config", self.config).get("initializer_range", 0.02)
        dtype = self.view.get(canonical).dtype
        parts: list[Recipe] = []
        rows = list(enumerate(self.cut.rows))
        for is_new, run in itertools.groupby(rows, key=lambda pair: pair[1] is None):
            chosen = list(run)
            # The place in the name gives every run of new rows its own random numbers.
            part = TensorSpec(f"{spec.name}[{chosen[0][0]}:]", dtype, (len(chosen), *spec.shape[1:]))
            if is_new:
                parts.append(Random(part, "normal", 0.0, std, self.seed))
            else:
                parts.append(self._rows(part, canonical, [row for _, row in chosen]))
        return Followed(spec._replace(dtype=dtype), parts)

    def _experts(self, text: TextGeometry, experts: str, spec: TensorSpec, layer: int, rest: str) -> Recipe:
        parsed = parse_expert(rest)
        kept = self.cut.source_experts(layer, self.view.text.num_experts)
        if parsed is not None:
            expert, which, ending = parsed
            part = ending.removeprefix("weight").lstrip("_") or "dense"
            return self._expert_bytes(spec, part, [self.view.matrix(layer, kept[expert], which)])
        name = rest.rpartition(".")[2]  # gate_up_proj, down_proj, with _packed or _scale
        part = name.rpartition("_")[2] if experts == "fused_packed" else "dense"
        wanted = ("w1", "w3") if name.startswith("gate_up") else ("w2",)
        return self._expert_bytes(spec, part, [self.view.matrix(layer, e, which) for e in kept for which in wanted])

    def _expert_bytes(self, spec: TensorSpec, part: str, matrices: Sequence[Matrix]) -> Recipe:
        if part == "dense":
            if self.view.is_packed:
                return Dense(spec._replace(dtype=self.dtype or spec.dtype), matrices)
            return Copy(spec._replace(dtype=matrices[0].dtype), [matrix.dense for matrix in matrices])
        if self.view.is_packed:
            return Copy(spec, [getattr(matrix, part) for matrix in matrices])
        scales = [self.scales.find(matrix) if self.scales else None for matrix in matrices]
        return Packed(spec, part, matrices, scales, self.recent)


def row_ranges(whole: ByteRange, count: int, rows: Sequence[int]) -> list[ByteRange]:
    """The bytes of chosen first-axis entries, neighbouring ones joined."""
    size = whole.nbytes // count
    ranges: list[ByteRange] = []
    for row in rows:
        start = whole.start + row * size
        if ranges and ranges[-1].start + ranges[-1].nbytes == start:
            ranges[-1] = ranges[-1]._replace(nbytes=ranges[-1].nbytes + size)
        else:
            ranges.append(whole._replace(start=start, nbytes=size))
    return ranges


def check_source(view: CheckpointView) -> None:
    """Raise unless the source holds exactly the model of its own configuration."""
    check_checkpoint(view.checkpoint, view.config, vision=view.has_vision, head=view.has_head)
    if view.has_vision and not isinstance(view.config.get("vision_config"), Mapping):
        raise CheckpointError(f"{view.checkpoint.folder} holds vision tensors but config.json has no vision_config")


def home(recipe: Recipe) -> str:
    """The source shard that a recipe's first bytes come from."""
    match recipe:
        case Copy(ranges=[first, *_]):
            return first.entry.path.name
        case Dense(matrices=[first, *_]) | Packed(matrices=[first, *_]):
            return (first.dense or first.packed).entry.path.name
        case Padded(source=source):
            return source.entry.path.name
        case Followed(parts=[first, *_]):
            return home(first)
    return ""


def dense_dtype(name: str | None) -> str | None:
    """`--dtype` of the command line as a safetensors dtype."""
    table = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", None: None}
    if name not in table or (table[name] not in FLOAT_DTYPES and name is not None):
        raise ConfigError(f"dtype {name!r} is unknown; expected bfloat16, float16 or float32")
    return table[name]
