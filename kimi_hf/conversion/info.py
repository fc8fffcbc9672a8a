"""`kimi-hf info`: what a checkpoint folder holds, from its headers alone."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kimi_hf.checkpoint.check import expert_layout, find_problems, format_disagreement
from kimi_hf.checkpoint.geometry import TextGeometry, is_kimi, load_config
from kimi_hf.checkpoint.layout import is_vision, part_of
from kimi_hf.checkpoint.shards import Checkpoint, open_checkpoint


@dataclass
class PartSize:
    """Stored size of one part of the model; `parameters` counts two codes a packed byte and no scales."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)


def stored_parts(checkpoint: Checkpoint, text: TextGeometry) -> dict[str, PartSize]:
    """Tensors, parameters and bytes of each part (`layout.part_of`), as the headers say."""
    parts: dict[str, PartSize] = {}
    for name, entry in checkpoint.entries.items():
        row = "routed experts" if ".experts." in name else part_of(name, text)
        part = parts.get(row) or parts.setdefault(row, PartSize())
        part.tensors += 1
        part.nbytes += entry.nbytes
        part.dtypes[entry.dtype] += 1
        if name.endswith("_packed"):
            part.parameters += 2 * entry.nbytes
        elif not name.endswith(("weight_scale", "_proj_scale")):
            part.parameters += math.prod(entry.shape)
    return parts


def describe_folder(folder: str | Path) -> list[str]:
    """Printable lines: model, shards, layout, the table of parts, and whether the headers match the config.

    Raises: CheckpointError if the headers or the index are damaged, ConfigError for an impossible config.
    """
    checkpoint = open_checkpoint(folder)
    config = load_config(checkpoint.folder)
    if not is_kimi(config):
        count = sum(math.prod(entry.shape) for entry in checkpoint.entries.values())
        return [
            f"{config['model_type']}: {len(checkpoint.headers)} files, {len(checkpoint)} tensors, {count:,} parameters, "
            f"{checkpoint.nbytes:,} bytes"
        ]
    text = TextGeometry.from_config(config)
    parts = stored_parts(checkpoint, text)
    total = PartSize(len(checkpoint), sum(p.parameters for p in parts.values()), checkpoint.nbytes)
    kinds = f"{len(text.kda_layers)} KDA, {text.num_layers - len(text.kda_layers)} MLA"
    lines = [
        f"{config.get('model_type')}: {text.num_layers} layers ({kinds}), hidden size {text.hidden}, "
        f"{text.num_experts} experts of width {text.expert_width}",
        f"{len(checkpoint.headers)} files, {total.tensors} tensors, experts {expert_layout(checkpoint)}, "
        f"{checkpoint.allocated / 1e9:.2f} GB on disk",
        "",
        f"{'part':<20} {'tensors':>9} {'parameters':>19} {'bytes':>19}  dtypes",
    ]
    for name, part in sorted(parts.items(), key=lambda item: -item[1].nbytes):
        lines.append(_row(name, part))
    lines += [_row("total", total), ""]
    vision = any(is_vision(name) for name in checkpoint.entries)
    if not vision and config.get("vision_config") is not None:
        lines.append("the config has a vision part, the files have none: only the text model loads")
    problems = [*filter(None, [format_disagreement(checkpoint, config)])]
    problems += find_problems(checkpoint, config, vision=vision).lines()
    lines += problems or ["names, shapes and dtypes match config.json"]
    return lines


def _row(name: str, part: PartSize) -> str:
    dtypes = " ".join(sorted(part.dtypes))
    return f"{name:<20} {part.tensors:>9,} {part.parameters:>19,} {part.nbytes:>19,}  {dtypes}".rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="checkpoint folder")


def run(args: argparse.Namespace) -> int:
    print("\n".join(describe_folder(args.folder)))
    return 0
