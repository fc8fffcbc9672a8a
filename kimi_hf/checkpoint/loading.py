"""What is checked before `from_pretrained` reads a weight, from the files' headers alone."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from transformers.utils import logging

from ..errors import CheckpointError
from .check import check_decay_tails, expert_layout, find_problems
from .geometry import as_dict, is_packed
from .shards import open_checkpoint

logger = logging.get_logger(__name__)
# A checkpoint may lack a whole part (no tower, no head), but a part of which something is there must be there whole.
_PARTS = {
    "vision tower": re.compile(r"\bvision_tower\."),
    "projector": re.compile(r"\bmm_projector\."),
    "decoder": re.compile(r"\b(?:layers\.\d+\.|norm\.weight|output_attn_res_)"),
}
WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors")
SHOWN = 8


def check_before_loading(
    folder: Path, config, *, vision: bool | None, variant: str | None, allow_other_shapes: bool
) -> None:
    """Raise if the checkpoint in `folder` is damaged or does not fit; a repository name or other formats pass through.

    Tensors missing from a decoder, tower or projector that is otherwise there are an error, since a model with random
    weights in its middle is of no use. A missing head or embedding, a whole missing tower, or an empty checkpoint, is
    left to transformers, which initialises them and reports it.

    Args:
        config: the model's configuration, or its class to read it from the folder.
        vision: False for classes without a tower; None to require what the configuration names.
    Raises:
        CheckpointError: with tensor and file names.
    """
    if variant or not any((folder / name).exists() for name in WEIGHT_FILES):
        return
    if isinstance(config, type):
        if not (folder / "config.json").exists():
            raise CheckpointError(f"{folder} has no config.json: nothing says which model its weights belong to")
        config = config.from_pretrained(folder)
    with open_checkpoint(folder) as checkpoint:
        if not checkpoint.entries:
            return
        _check_format(checkpoint, config)
        problems = find_problems(checkpoint, config, vision=vision, head=False)
        present = {_part(name) for name in checkpoint.entries} - {None}
        torn = [line for line in problems.missing if _part(line) in present]
        fatal = torn + problems.dtypes + ([] if allow_other_shapes else problems.shapes)
        if torn:
            fatal += problems.unexpected  # a tensor under a damaged name is one of these
        if fatal:
            more = [f"... and {len(fatal) - SHOWN} more"] if len(fatal) > SHOWN else []
            raise CheckpointError(
                f"{folder} does not hold the model of its configuration:\n  "
                + "\n  ".join(fatal[:SHOWN] + more)
                + "\nfetch the named shards again, or correct config.json"
            )
        check_decay_tails(checkpoint, config)


def check_after_loading(source, names: Iterable[str], missing: Collection[str]) -> None:
    """Raise if a part of a model was loaded in pieces: what `check_before_loading` asks, where it could not look.

    A repository's files are fetched while loading, so their headers cannot be read before.

    Args:
        source: for the message. names: of all tensors of the model. missing: those that no file held.
    Raises:
        CheckpointError: naming the tensors.
    """
    loaded = {_part(name) for name in names if name not in missing}
    torn = sorted(name for name in missing if _part(name) is not None and _part(name) in loaded)
    if torn:
        more = f" and {len(torn) - SHOWN} more" if len(torn) > SHOWN else ""
        raise CheckpointError(
            f"{source} holds no {', '.join(torn[:SHOWN])}{more}, which would be random in a model that is otherwise loaded; "
            "fetch the files again, or correct config.json"
        )


def _part(name: str) -> str | None:
    """The part of a model that a tensor belongs to; None for embedding and head, which may be absent alone."""
    return next((part for part, pattern in _PARTS.items() if pattern.search(name)), None)


def _check_format(checkpoint, config) -> None:
    """Raise if the files' experts are packed and the configuration does not say so, or the other way round."""
    found = expert_layout(checkpoint)
    block = getattr(config, "quantization_config", None)
    if found == "fused_packed" and getattr(block, "dequantize", False):
        raise CheckpointError(
            f"{checkpoint.folder} holds packed experts under fused names, which cannot be unpacked while loading; load them "
            "packed and call kimi_hf.quantization.dequantize(model)"
        )
    holds_experts = any(".experts." in name for name in checkpoint.entries)
    said = is_packed(as_dict(config))
    if holds_experts and said != ("packed" in found):
        name = next(name for name in checkpoint.entries if ".experts." in name)
        raise CheckpointError(
            f"{name} in {checkpoint.entries[name].path.name} is stored as a {found} expert, but config.json "
            f"{'names' if said else 'does not name'} the MXFP4 format in quantization_config; correct config.json, or convert "
            "the experts"
        )
