"""`kimi-hf merge-lora`: a PEFT LoRA adapter folded into a checkpoint, file by file, without building a model.

For a linear layer W (out, in) with factors A (r, in) and B (out, r): W + s B A, with s = lora_alpha / r (or / sqrt(r)
for rsLoRA). The sum is formed in fp32 and rounded once to the stored dtype. Routed experts are adapted as the fused
parameters that the plugin's modules hold: `gate_up_proj` (E, 2I, Z) and `down_proj` (E, Z, I), E factor pairs each. PEFT
stores them as A (E r, in) with rows expert-major and B (out, r E) with columns rank-major; the plugin's adapters over
packed experts as A (E, r, in) and B (E, out, r).

Source: PEFT adapter files (adapter_config.json, adapter_model.safetensors), LoRA layers and target_parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kimi_hf.checkpoint.layout import DTYPE_BYTES, VISION_PREFIXES, TensorSpec, parse_layer
from kimi_hf.checkpoint.shards import TORCH_DTYPES, Checkpoint, as_tensor, read_header
from kimi_hf.conversion.configs import dense_config, side_files, to_json
from kimi_hf.conversion.convert import DEFAULT_SHARD, add_output_arguments, density, keep_files
from kimi_hf.conversion.plan import Plan, check_source, dense_dtype
from kimi_hf.conversion.recipes import ByteRange, Dense, InMemory, Matrix, Packed, to_bytes
from kimi_hf.conversion.view import CheckpointView
from kimi_hf.conversion.writer import CHUNK, Recipe, plan_shards, write_folder
from kimi_hf.errors import CheckpointError, ConfigError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_FACTOR = re.compile(r"^(.*?)((?:\.base_layer)*)\.lora_(embedding_)?([AB])(?:\.(weight|[^.]+_down))?$")
_ROOTS = re.compile(r"(?:^|\.)((?:layers\.\d+|embed_tokens|norm|output_attn_res_norm|output_attn_res_proj)\b.*)$")
_EXPERTS = "block_sparse_moe.experts"


class Delta(NamedTuple):
    """One low-rank update, `scale * left @ right`, of a matrix (left's rows, right's columns)."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    def added(self, base: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a matrix with the update, in fp32; where that is zero, base to the bit (-0 stays)."""
        update = self.scale * (self.left[begin:end].float() @ self.right.float())
        return torch.where(update == 0, base.float(), base.float() + update)


@dataclass
class Adapter:
    """A read adapter: updates of whole tensors by canonical name, of expert matrices by (layer, expert, matrix), and
    tensors that replace the base's (modules_to_save)."""

    deltas: dict[str, Delta] = field(default_factory=dict)
    experts: dict[tuple[int, int, str], Delta] = field(default_factory=dict)
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)


def read_adapter(folder: str | Path, view: CheckpointView) -> Adapter:
    """Read a PEFT LoRA folder for the checkpoint `view`.

    Raises: CheckpointError for another kind of adapter, damaged files, factors of the wrong shape, or factors of
        modules that the checkpoint does not have.
    """
    folder = Path(folder)
    config = _adapter_config(folder)
    header = read_header(folder / ADAPTER_FILE)
    adapter = Adapter()
    with Checkpoint(folder, {ADAPTER_FILE: header}, None) as stored:
        pairs: dict[tuple[str, int, bool, str | None], dict[str, str]] = {}
        for name in header.entries:
            found = _FACTOR.match(name)
            if found:
                module, nesting = found[1], found[2].count(".base_layer")
                pairs.setdefault((module, nesting, found[3] is not None, found[5]), {})[found[4]] = name
            else:
                # PEFT saves the embedding under an embedding's adapter too, as the layer that it wraps
                adapter.replaced[_canonical(name.replace(".base_layer.", "."))] = stored.read(name)
        for (module, _, is_embedding, _), names in pairs.items():
            if set(names) != {"A", "B"}:
                raise CheckpointError(
                    f"{folder / ADAPTER_FILE}: {module} has only one of lora_A and lora_B; save again"
                )
            factors = stored.read(names["A"]), stored.read(names["B"])
            _add(adapter, config, view, module, factors, is_embedding)
    for name in (*adapter.deltas, *adapter.replaced):
        view.get(name)
    return adapter


def _adapter_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} cannot be read ({error}); expected a PEFT folder") from error
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder}: peft_type is {config.get('peft_type')!r}; only LORA adapters are merged")
    for name in ("use_dora", "lora_bias", "fan_in_fan_out"):
        if config.get(name):
            raise CheckpointError(f"{folder}: {name} is set, which is not merged here; merge with PEFT in memory")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder}: bias is {config['bias']!r}; Kimi models have no biases to adapt")
    return config


def _canonical(name: str) -> str:
    """A stored adapter name in the released spelling without prefixes."""
    for prefix in VISION_PREFIXES:
        if prefix in name:
            return name[name.index(prefix) :]
    if ".lm_head." in name or name.startswith("lm_head."):
        return name[name.index("lm_head.") :]
    found = _ROOTS.search(name)
    return f"model.{found[1]}" if found else name


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _add(
    adapter: Adapter,
    config: Mapping[str, Any],
    view: CheckpointView,
    module: str,
    factors: tuple[torch.Tensor, torch.Tensor],
    is_embedding: bool,
) -> None:
    a, b = factors
    name = _canonical(f"{module}.weight")
    at = parse_layer(name)
    if at is not None and at.rest == f"{_EXPERTS}.weight":
        _add_experts(adapter, config, view, module, at.layer, a, b)
        return
    rank = a.shape[0]
    left, right = (a.t(), b.t()) if is_embedding else (b, a)
    shape = view.get(name).shape
    if a.dim() != 2 or b.dim() != 2 or b.shape[1] != rank or (left.shape[0], right.shape[1]) != shape:
        raise CheckpointError(
            f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit {name} {list(shape)}; the "
            f"adapter belongs to another model"
        )
    adapter.deltas[name] = Delta(left, right, _scale(config, module, rank))


def _add_experts(
    adapter: Adapter,
    config: Mapping[str, Any],
    view: CheckpointView,
    module: str,
    layer: int,
    a: torch.Tensor,
    b: torch.Tensor,
) -> None:
    """Nested wrappers do not name their parameter, but (in, out) tells: (Z, 2I) is gate_up_proj, (I, Z) down_proj."""
    count, inter, width = view.text.num_experts, view.text.moe_intermediate, view.text.expert_width
    shapes = list(a.shape), list(b.shape)
    if a.dim() == 2 and b.dim() == 2 and a.shape[0] % count == 0 and b.shape[1] == a.shape[0]:
        a = a.reshape(count, -1, a.shape[1])  # [E, r, in]
        b = b.reshape(b.shape[0], -1, count).permute(2, 0, 1)  # [E, out, r]
    sides = (a.shape[-1], b.shape[-2])
    fits = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] == count and a.shape[1] == b.shape[2] > 0
    if not fits or sides not in ((width, 2 * inter), (inter, width)):
        raise CheckpointError(
            f"{module}: lora_A {shapes[0]} and lora_B {shapes[1]} fit neither gate_up_proj ({count}, "
            f"{2 * inter}, {width}) nor down_proj ({count}, {width}, {inter}); the adapter belongs to another model"
        )
    scale = _scale(config, module, a.shape[1])
    for expert in range(count):
        left, right = b[expert], a[expert]
        if not bool(left.any()):
            continue  # never trained: the matrix stays as it is, to the bit
        if sides == (width, 2 * inter):
            adapter.experts[layer, expert, "w1"] = Delta(left[:inter], right, scale)
            adapter.experts[layer, expert, "w3"] = Delta(left[inter:], right, scale)
        else:
            adapter.experts[layer, expert, "w2"] = Delta(left, right, scale)


@dataclass(frozen=True)
class Merged:
    """A stored matrix plus a low-rank update, in the stored dtype."""

    spec: TensorSpec
    source: ByteRange
    delta: Delta

    def chunks(self) -> Iterator[bytearray]:
        rows, cols = self.spec.shape
        size, step = cols * DTYPE_BYTES[self.spec.dtype], max(1, CHUNK // (4 * cols))
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            base = as_tensor(self.source.read(begin * size, (end - begin) * size), self.spec.dtype, (end - begin, cols))
            yield to_bytes(self.delta.added(base, begin, end).to(TORCH_DTYPES[self.spec.dtype]))

    def describe(self) -> str:
        return f"{self.source.describe()} + {_tell(self.delta)}"


@dataclass(frozen=True)
class MergedMatrix:
    """An expert matrix plus a low-rank update; stands where a `Matrix` is read by rows."""

    matrix: Matrix
    delta: Delta
    dtype: str = "F32"

    @property
    def name(self) -> str:
        return self.matrix.name

    @property
    def rows(self) -> int:
        return self.matrix.rows

    @property
    def cols(self) -> int:
        return self.matrix.cols

    @property
    def dense(self) -> ByteRange | None:
        return self.matrix.dense

    @property
    def packed(self) -> ByteRange | None:
        return self.matrix.packed

    def dense_rows(self, begin: int, end: int, dtype: str) -> torch.Tensor:
        base = self.matrix.dense_rows(begin, end, "F32")
        return self.delta.added(base, begin, end).to(TORCH_DTYPES[dtype])

    def describe(self) -> str:
        return f"{self.matrix.describe()} + {_tell(self.delta)}"


def _tell(delta: Delta) -> str:
    sums = float(delta.left.double().sum()), float(delta.right.double().abs().sum())
    return f"lora {delta.scale!r} {sums[0]!r} {sums[1]!r}"


@dataclass
class MergePlan(Plan):
    """The plan of an unchanged layout, with the adapter's updates in it."""

    adapter: Adapter = field(default_factory=Adapter)

    def _stored(self, spec: TensorSpec, canonical: str) -> Recipe:
        recipe = super()._stored(spec, canonical)
        delta = self.adapter.deltas.get(canonical)
        if canonical in self.adapter.replaced:
            tensor = self.adapter.replaced[canonical]
            self._same_shape(canonical, tuple(tensor.shape), recipe.spec.shape)
            if delta is not None:
                tensor = delta.added(tensor.float(), 0, tensor.shape[0])
            return InMemory(recipe.spec, tensor.to(TORCH_DTYPES[recipe.spec.dtype]))
        return recipe if delta is None else Merged(recipe.spec, recipe.ranges[0], delta)

    def _expert_bytes(self, spec: TensorSpec, part: str, matrices: Sequence[Matrix]) -> Recipe:
        plain = super()._expert_bytes(spec, part, matrices)
        merged = [self._merged(matrix) for matrix in matrices]
        if all(new is old for new, old in zip(merged, matrices, strict=True)):
            return plain
        if part == "dense":
            return Dense(plain.spec, merged)
        return Packed(plain.spec, part, merged, [matrix.scale for matrix in matrices], self.recent)

    def _merged(self, matrix: Matrix) -> Matrix | MergedMatrix:
        at = parse_layer(self.view.canonical(matrix.name))
        _, _, expert, which = at.rest.split(".")
        delta = self.adapter.experts.get((at.layer, int(expert), which))
        return matrix if delta is None else MergedMatrix(matrix, delta)


def merge_lora(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    experts: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    verify: bool = True,
) -> Path:
    """Write `base` with the adapter merged to the new folder `out`, in base's layout.

    Args:
        base: checkpoint folder in any layout.
        adapter: PEFT folder of a LoRA trained on this model.
        experts: what to do when MXFP4 experts are adapted: "requantise" (the sum is rounded to MXFP4 again; groups
            that the update leaves alone keep their bytes), "bf16" (all experts are decoded), None: raise.
        dtype: of experts that are decoded; None takes the config's.
        max_shard_bytes: size of the output's files; None keeps base's files, or 16 GB when experts are decoded.
        verify: compare what was written with the recomputed sums.
    Raises: CheckpointError if the adapter does not fit, ConfigError if MXFP4 experts are adapted and `experts` is None.
    """
    base = Path(base)
    view = CheckpointView.open(base)
    check_source(view)
    read = read_adapter(adapter, view)
    config, layout = view.config, view.experts
    if read.experts and view.is_packed:
        if experts not in ("requantise", "bf16"):
            raise ConfigError(
                "the adapter changes routed experts, which this checkpoint stores in MXFP4; choose --experts "
                "requantise (rounds the sum to 4 bits) or --experts bf16 (exact sum, four times the size)"
            )
        if experts == "bf16":
            config, layout = dense_config(config), "fused" if view.is_fused else "plain"
    recipes = list(MergePlan(view, config, layout, dtype=dense_dtype(dtype), adapter=read).recipes())
    if layout == view.experts and max_shard_bytes is None:
        shards = keep_files(view, recipes)
    else:
        shards = plan_shards(recipes, max_shard_bytes or DEFAULT_SHARD)
    files: dict[str, bytes | Path] = dict(side_files(base))
    files["config.json"] = base / "config.json" if config == view.config else to_json(config)
    sources = [header.path for header in view.checkpoint.headers.values()]
    sources.append(Path(adapter) / ADAPTER_FILE)
    return write_folder(
        out, shards, files, sources=sources, density=density(view), verify=verify, label="merge adapter"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", type=Path, help="checkpoint folder that the adapter was trained on")
    parser.add_argument("adapter", type=Path, help="PEFT adapter folder")
    add_output_arguments(parser)
    parser.add_argument("--experts", choices=("requantise", "bf16"), help="when the adapter changes MXFP4 experts")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of decoded experts")


def run(args: argparse.Namespace) -> int:
    merge_lora(
        args.base,
        args.adapter,
        args.out,
        experts=args.experts,
        dtype=args.dtype,
        max_shard_bytes=args.max_shard_size,
        verify=not args.no_verify,
    )
    print(f"wrote {args.out}")
    return 0
