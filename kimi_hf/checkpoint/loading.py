"""What is checked before `from_pretrained` reads a weight: names, shapes and dtypes, from headers alone."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from ..errors import CheckpointError
from .check import (
    SHOWN,
    Problems,
    check_decay_tails,
    check_scales,
    expert_layout,
    find_problems,
    format_disagreement,
)
from .geometry import as_dict, is_packed, text_section
from .offload import uses_disk
from .shards import Checkpoint

logger = logging.get_logger(__name__)
# A checkpoint may lack a whole part (no tower, no head), but a part of which something is there must be there whole.
_PARTS = {
    "vision tower": re.compile(r"\bvision_tower\."),
    "projector": re.compile(r"\bmm_projector\."),
    "decoder": re.compile(r"\b(?:layers\.\d+\.|embed_tokens\.|norm\.weight|output_attn_res_)"),
}


@dataclass(frozen=True)
class Reading:
    """How a checkpoint is about to be read.

    `config`: of the model, as it describes the files. `other_shapes`: shapes may differ (`ignore_mismatched_sizes`).
    `vision`: False for classes without a tower, None for what the configuration says. `dequantize`: packed experts are
    unpacked. `scales`: look at every MXFP4 scale, because nothing else will before the first forward.
    """

    config: Mapping[str, Any]
    other_shapes: bool = False
    vision: bool | None = None
    dequantize: bool = False
    scales: bool = False

    @classmethod
    def of(cls, load_config, config, vision: bool | None) -> "Reading":
        """From transformers' `LoadStateDictConfig` and the model's configuration."""
        released, quantizer = dict(as_dict(config)), load_config.hf_quantizer
        if quantizer is not None and not quantizer.pre_quantized:
            released.pop("quantization_config", None)  # says what will become of the weights, not what the files hold
        return cls(
            config=released,
            other_shapes=bool(load_config.ignore_mismatched_sizes),
            vision=vision,
            dequantize=bool(getattr(getattr(config, "quantization_config", None), "dequantize", False)),
            scales=uses_disk(load_config),
        )


def check_before_loading(checkpoint: Checkpoint, reading: Reading) -> None:
    """Raise if the checkpoint does not fit the configuration; warn of tensors that nothing will read.

    Tensors missing from a decoder, tower or projector that is otherwise there are an error, since a model with random
    weights in its middle is of no use; so is an expert too many. A missing head, a whole missing tower, or a checkpoint
    with nothing of the model, is left to transformers, which initialises them and reports it.

    Raises:
        CheckpointError: with tensor and file names.
    """
    config = reading.config
    _check_format(checkpoint, config, reading.dequantize)
    problems = find_problems(checkpoint, config, vision=reading.vision, head=False)
    present = {_part(name) for name in checkpoint.entries} - {None}
    conclude(checkpoint, problems, [line for line in problems.missing if _part(line) in present], reading)
    check_decay_tails(checkpoint, config)
    if reading.scales and is_packed(config):
        check_scales(checkpoint)


def conclude(checkpoint: Checkpoint, problems: Problems, torn: list[str], reading: Reading) -> None:
    """Raise for the problems that a model cannot be loaded with, warn of tensors that will not be read.

    Args:
        torn: the lines of `problems.missing` that belong to parts of which something is there.
    """
    tied = text_section(reading.config).get("tie_word_embeddings", reading.config.get("tie_word_embeddings"))
    if tied and any(name.endswith("lm_head.weight") for name in checkpoint.entries):
        torn = [line for line in torn if "embed_tokens." not in line]  # the head stands for both
    fatal = torn + problems.dtypes
    if not reading.other_shapes:
        fatal += problems.extra_experts + problems.shapes
    if torn:
        fatal += problems.unexpected  # a tensor under a damaged name is one of these
    if fatal:
        raise CheckpointError(
            f"{checkpoint.folder} does not hold the model of its configuration:\n  "
            + "\n  ".join(_cut(fatal))
            + "\nfetch the named shards again, or correct config.json"
        )
    if problems.unexpected:
        lines = [f"{checkpoint.folder} holds tensors that are not read:", *_cut(problems.unexpected)]
        logger.warning("%s", "\n  ".join(lines))


def _cut(lines: list[str]) -> list[str]:
    return lines[:SHOWN] + ([f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])


def check_after_loading(source, names: Iterable[str], missing: Collection[str], *, headed: bool = False) -> None:
    """Raise if transformers reports that a part of a model was loaded in pieces: the same rule once more, from the result.

    What the headers promise may still be lost on the way, by a rule for names that another package has registered.

    Args:
        source: for the message. names: of all tensors of the model. missing: those that no file held.
        headed: whether config.json says that this very class was saved, so that its head must be there too.
    Raises:
        CheckpointError: naming the tensors.
    """
    loaded = {_part(name) for name in names if name not in missing}
    torn = sorted(name for name in missing if (headed if _part(name) is None else _part(name) in loaded))
    if torn:
        more = f" and {len(torn) - SHOWN} more" if len(torn) > SHOWN else ""
        raise CheckpointError(
            f"{source} holds no {', '.join(torn[:SHOWN])}{more}, which would be random in a model that is otherwise loaded; "
            "fetch the files again, or correct config.json"
        )


def _part(name: str) -> str | None:
    """The part of a model that a tensor belongs to; None for the head, which may be absent alone."""
    return next((part for part, pattern in _PARTS.items() if pattern.search(name)), None)


def _check_format(checkpoint: Checkpoint, config: Mapping[str, Any], dequantize: bool) -> None:
    """Raise if experts are packed and the configuration does not say so, or the other way round."""
    if expert_layout(checkpoint) == "fused_packed" and dequantize:
        raise CheckpointError(
            f"{checkpoint.folder} holds packed experts under fused names, which cannot be unpacked while loading; load them "
            "packed and call kimi_hf.quantization.dequantize(model)"
        )
    wrong = format_disagreement(checkpoint, config)
    if wrong is not None:
        raise CheckpointError(wrong)
