"""`kimi-hf slice`: a smaller checkpoint out of a large one, in the same layout, without loading either."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kimi_hf.checkpoint.check import format_disagreement
from kimi_hf.checkpoint.geometry import TextGeometry, load_config
from kimi_hf.conversion.configs import (
    experts_config,
    layers_config,
    side_files,
    text_only_config,
    to_json,
    vocabulary_config,
)
from kimi_hf.conversion.convert import DEFAULT_SHARD, add_output_arguments, density
from kimi_hf.conversion.plan import Cut, Plan, check_source
from kimi_hf.conversion.view import CheckpointView
from kimi_hf.conversion.writer import plan_shards, write_folder
from kimi_hf.errors import CheckpointError, ConfigError

TOKENIZER_FILES = (
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


def slice_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    layers: Sequence[int] | None = None,
    experts: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
    rows: Sequence[int | None] | None = None,
    text_only: bool = False,
    max_shard_bytes: int | None = None,
    seed: int = 0,
    verify: bool = True,
) -> tuple[Path, list[str]]:
    """Write a part of `source` to the new folder `out`; what is kept is copied bit for bit.

    Args:
        source: checkpoint folder, in any layout; the layout is kept. Shards that hold nothing of the slice may be
            absent.
        layers: 0-based layers to keep, in their new order.
        experts: 0-based experts to keep, for all layers, or by source layer (equally many each). Router rows and
            correction biases are cut along.
        rows: old token id of each new token id; None entries are new rows, normal with `initializer_range`.
        text_only: the language model alone, as a flat `kimi_linear` checkpoint.
        max_shard_bytes: size of the output's files; None: 16 GB.
        seed: of new vocabulary rows.
        verify: compare what was written with the source.
    Returns: `out`, and notes for the user (special tokens that are gone, files that were left out).
    Raises: ConfigError for a choice that the configuration cannot express, CheckpointError as `write_folder`.
    """
    source = Path(source)
    view = CheckpointView.open(source, allow_absent=True)
    if not view.checkpoint.absent:
        check_source(view)
    wrong = format_disagreement(view.checkpoint, view.config)
    if wrong is not None:  # the slice would have the same config, and could not be loaded
        raise CheckpointError(wrong)
    config, notes = view.config, []
    if text_only:
        config = text_only_config(config)
    if experts is not None:
        experts = _check_experts(view, experts, layers)
        config = experts_config(config, len(_first(experts)))
    if layers is not None:
        config = layers_config(config, layers)
    skip: Sequence[str] = ()
    if rows is not None:
        config, lost = vocabulary_config(config, rows)
        skip = TOKENIZER_FILES
        notes += [f"{name} is now null: its token was cut" for name in lost]
        notes.append("tokenizer files were not copied: the vocabulary changed")
    cut = Cut(layers, experts, rows, text_only)
    recipes = list(Plan(view, config, cut=cut, seed=seed).recipes())
    files: dict[str, bytes | Path] = dict(side_files(source, skip))
    files["config.json"] = source / "config.json" if config == view.config else to_json(config)
    write_folder(
        out,
        plan_shards(recipes, max_shard_bytes or DEFAULT_SHARD),
        files,
        sources=[header.path for header in view.checkpoint.headers.values()],
        density=density(view),
        verify=verify,
        label="slice",
    )
    return Path(out), notes


def _first(experts: Sequence[int] | Mapping[int, Sequence[int]]) -> Sequence[int]:
    return next(iter(experts.values())) if isinstance(experts, Mapping) else experts


def _check_experts(
    view: CheckpointView, experts: Sequence[int] | Mapping[int, Sequence[int]], layers: Sequence[int] | None
) -> Sequence[int] | Mapping[int, Sequence[int]]:
    count = view.text.num_experts
    chosen = [layer for layer in (range(view.text.num_layers) if layers is None else layers) if view.text.is_moe(layer)]
    lists = {layer: experts[layer] for layer in chosen if layer in experts} if isinstance(experts, Mapping) else None
    if lists is not None and len(lists) < len(chosen):
        raise ConfigError(f"experts of layer {next(x for x in chosen if x not in lists)} are not given; give every one")
    for layer, kept in (lists or {"any": experts}).items():
        wrong = [expert for expert in kept if not 0 <= expert < count]
        if not kept or wrong or len(set(kept)) != len(kept) or len(kept) != len(_first(lists or experts)):
            raise ConfigError(
                f"experts of layer {layer}: {list(kept)[:20]}; choose distinct experts from 0 to {count - 1}, equally "
                f"many in every layer"
            )
    return lists or experts


def parse_numbers(text: str) -> list[int]:
    """`0-3,8,10-12` -> [0, 1, 2, 3, 8, 10, 11, 12].

    Raises: argparse.ArgumentTypeError for anything else.
    """
    numbers: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; expected for example 0-3,8")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _read_experts(text: str) -> Sequence[int] | Mapping[int, Sequence[int]]:
    """A number list, or a JSON file with one list, or an object of lists by layer."""
    if not text.endswith(".json"):
        return parse_numbers(text)
    content = json.loads(Path(text).read_text())
    return {int(layer): kept for layer, kept in content.items()} if isinstance(content, dict) else content


def _read_rows(args: argparse.Namespace, vocab_size: int) -> list[int | None] | None:
    rows: list[int | None] | None = None
    if args.vocab_rows is not None:
        text = args.vocab_rows
        rows = json.loads(Path(text).read_text()) if text.endswith(".json") else parse_numbers(text)
    if args.vocab_size is not None:
        rows = list(range(vocab_size)) if rows is None else rows
        rows = [*rows[: args.vocab_size], *[None] * (args.vocab_size - len(rows))]
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="checkpoint folder")
    add_output_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layers", type=parse_numbers, help="0-based layers to keep, e.g. 0-3 or 0,3,7-9")
    which.add_argument("--num-layers", type=int, metavar="N", help="keep the first N layers")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--experts", help="0-based experts to keep, e.g. 0-15, or a JSON file (a list, or by layer)")
    which.add_argument("--num-experts", type=int, metavar="N", help="keep the first N experts")
    parser.add_argument("--text-only", action="store_true", help="the language model alone, as a kimi_linear folder")
    parser.add_argument("--vocab-rows", help="token ids to keep, e.g. 0-999, or a JSON list; new id = place in it")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="cut to, or grow to, N tokens (after --vocab-rows)")
    parser.add_argument("--seed", type=int, default=0, help="of new vocabulary rows")


def run(args: argparse.Namespace) -> int:
    vocab_size = TextGeometry.from_config(load_config(args.source)).vocab_size
    layers = args.layers if args.num_layers is None else list(range(args.num_layers))
    experts = _read_experts(args.experts) if args.experts else None
    if args.num_experts is not None:
        experts = list(range(args.num_experts))
    out, notes = slice_checkpoint(
        args.source,
        args.out,
        layers=layers,
        experts=experts,
        rows=_read_rows(args, vocab_size),
        text_only=args.text_only,
        max_shard_bytes=args.max_shard_size,
        seed=args.seed,
        verify=not args.no_verify,
    )
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {out}")
    return 0
