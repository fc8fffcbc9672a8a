"""`kimi-hf convert`: one layout of a Kimi checkpoint into another, and back, byte for byte."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_hf.checkpoint.check import check_decay_tails
from kimi_hf.checkpoint.geometry import is_packed
from kimi_hf.checkpoint.shards import INDEX_NAME
from kimi_hf.conversion import gpt2
from kimi_hf.conversion.configs import dense_config, packed_config, side_files, to_json
from kimi_hf.conversion.original import Original, Scales, record
from kimi_hf.conversion.plan import Plan, check_source, dense_dtype, home
from kimi_hf.conversion.view import CheckpointView
from kimi_hf.conversion.writer import PlannedShard, Recipe, plan_shards, write_folder
from kimi_hf.errors import ConfigError

LAYOUTS = {"packed": "packed", "bf16": "plain", "fused": "fused", "fused-packed": "fused_packed"}
TARGETS = (*LAYOUTS, "released", *gpt2.TARGETS)
DEFAULT_SHARD = 16_000_000_000


def convert(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    keep_original: bool = True,
    verify: bool = True,
) -> Path:
    """Write `source` in another layout to the new folder `out`.

    Args:
        source: a checkpoint folder in any layout this package writes or the release uses.
        to: "packed" (one MXFP4 pair per expert matrix, as Kimi K3 is released), "bf16" (one dense weight per expert
            matrix, as Kimi-Linear is released), "fused" (`experts.gate_up_proj` (E, 2I, Z) = [w1; w3] and
            `experts.down_proj` (E, Z, I)), "fused-packed" (the same in MXFP4), "released" (what it was converted
            from: packed or bf16).
        dtype: of experts that are decoded; None takes the config's.
        max_shard_bytes: size of the output's files; None keeps the source's files where the layout stays, 16 GB else.
        keep_original: keep `kimi_hf_original/`, which makes the way back exact to the byte.
        verify: compare every tensor read back from disk with its source before the shard gets its name.
    Returns: `out`.
    Raises: CheckpointError for a damaged source or an unusable target folder, ConfigError for an impossible layout.
    """
    view = CheckpointView.open(source)
    check_source(view)
    check_decay_tails(view.checkpoint, view.config)
    kept, scales = Original.load(Path(source)), Scales.load(Path(source))
    experts, config = _target(view, kept, to)
    shapes = kept.shapes if kept else {}
    recipes = list(Plan(view, config, experts, dtype=dense_dtype(dtype), scales=scales, stored_shapes=shapes).recipes())
    original = kept or (Original.of(view) if experts == view.experts else None)
    restored = original.shards(recipes) if original and max_shard_bytes is None else None
    files: dict[str, bytes | Path] = dict(side_files(Path(source)))
    if restored is not None:
        shards = restored
        if original.index is not None:
            files[INDEX_NAME] = original.index
    else:
        shards = _arrange(view, recipes, experts == view.experts, max_shard_bytes)
        if keep_original and (kept is not None or experts != view.experts):
            decoded = view.is_packed and not experts.endswith("packed")
            extra, extra_shards = record(view, keep_scales=decoded)
            files.update(extra)
            shards = [*shards, *extra_shards]
    files["config.json"] = _config_bytes(Path(source), config, view.config, original)
    return write_folder(
        out,
        shards,
        files,
        sources=[header.path for header in view.checkpoint.headers.values()],
        density=density(view),
        verify=verify,
        label=f"convert to {to}",
    )


def density(view: CheckpointView) -> float:
    """Share of the source's bytes that lie on disk: 1 for ordinary files, less for sparse ones."""
    return min(1.0, view.checkpoint.allocated / max(1, view.checkpoint.nbytes))


def _target(view: CheckpointView, original: Original | None, to: str) -> tuple[str, Mapping[str, Any]]:
    like = json.loads(original.config) if original else None
    if to == "released":
        to = "packed" if is_packed(like if like is not None else view.config) else "bf16"
    if to not in LAYOUTS:
        raise ConfigError(f"--to {to!r} is no layout of a Kimi checkpoint; expected one of {', '.join(TARGETS)}")
    experts = LAYOUTS[to]
    if not view.text.num_experts:
        return "plain", view.config
    config = packed_config(view.config, like) if experts.endswith("packed") else dense_config(view.config)
    return experts, config


def _arrange(
    view: CheckpointView, recipes: Sequence[Recipe], same_layout: bool, max_bytes: int | None
) -> list[PlannedShard]:
    if same_layout and max_bytes is None:
        return keep_files(view, recipes)
    return plan_shards(recipes, max_bytes or DEFAULT_SHARD)


def keep_files(view: CheckpointView, recipes: Sequence[Recipe]) -> list[PlannedShard]:
    """The recipes distributed as the source's files are: by name, else by where their first bytes come from."""
    by_file: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        entry = view.checkpoint.entries.get(recipe.spec.name)
        by_file.setdefault(home(recipe) if entry is None else entry.path.name, []).append(recipe)
    headers = view.checkpoint.headers
    return [PlannedShard(file, by_file[file], metadata=headers[file].metadata) for file in headers if file in by_file]


def _config_bytes(
    source: Path, config: Mapping[str, Any], before: Mapping[str, Any], original: Original | None
) -> bytes | Path:
    if original is not None and json.loads(original.config) == config:
        return original.config
    return source / "config.json" if config == before else to_json(config)


def parse_size(text: str) -> int:
    """`16GB`, `500MB`, `2e9` -> bytes (powers of ten).

    Raises: argparse.ArgumentTypeError for anything else.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
    upper = text.strip().upper()
    unit = next((name for name in units if upper.endswith(name)), "")
    try:
        size = int(float(upper.removesuffix(unit)) * units.get(unit, 1))
    except ValueError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected for example 16GB")
    return size


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every command writing a checkpoint shares."""
    parser.add_argument("out", type=Path, help="folder to make; it must not exist")
    parser.add_argument("--max-shard-size", type=parse_size, metavar="SIZE", help="largest output file, e.g. 16GB")
    parser.add_argument("--no-verify", action="store_true", help="do not read the output back and compare it")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="checkpoint folder, or a nanoGPT ckpt.pt")
    add_output_arguments(parser)
    parser.add_argument("--to", required=True, choices=TARGETS, help="layout to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of decoded experts")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="GPT-2 only: keep the first N embedding rows")
    parser.add_argument("--no-original", action="store_true", help="do not keep what an exact way back needs")


def run(args: argparse.Namespace) -> int:
    if args.to in gpt2.TARGETS:
        out = gpt2.convert(args.source, args.out, args.to, args.vocab_size)
    else:
        out = convert(
            args.source,
            args.out,
            args.to,
            dtype=args.dtype,
            max_shard_bytes=args.max_shard_size,
            keep_original=not args.no_original,
            verify=not args.no_verify,
        )
    print(f"wrote {out}")
    return 0
