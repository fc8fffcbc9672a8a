"""Does a checkpoint hold what its configuration promises? Answered from headers, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_hf.checkpoint.geometry import PACKED_FORMAT, TextGeometry, as_dict, is_packed, quantization_section
from kimi_hf.checkpoint.layout import (
    FLOAT_DTYPES,
    TensorSpec,
    is_vision,
    parse_expert,
    parse_layer,
    released_layout,
)
from kimi_hf.checkpoint.shards import Checkpoint, TensorEntry, open_checkpoint
from kimi_hf.configuration.quantization import check_block
from kimi_hf.errors import CheckpointError, ConfigError

SHOWN = 8
SCALE_ENDINGS = ("weight_scale", "_proj_scale")
_KINDS = ("missing", "extra_experts", "unexpected", "shapes", "dtypes")
COLLECTED = 500_000  # missing tensors listed before giving up on a config that asks for far too many
_EXPERT_KINDS = {
    "weight_packed": "packed",
    "weight_scale": "packed",
    "weight": "plain",
    "gate_up_proj": "fused",
    "down_proj": "fused",
    "gate_up_proj_packed": "fused_packed",
    "gate_up_proj_scale": "fused_packed",
    "down_proj_packed": "fused_packed",
    "down_proj_scale": "fused_packed",
}
_FOREIGN_METHODS = {"gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "modelopt", "hqq", "quanto", "auto-round"}
_FOREIGN_SUFFIXES = {
    "qweight": "GPTQ or AWQ int4",
    "qzeros": "GPTQ or AWQ int4",
    "weight_shape": "compressed-tensors int4 (pack-quantized)",
    "weight_zero_point": "compressed-tensors int4 (pack-quantized)",
    "weight_global_scale": "nvfp4",
    "input_global_scale": "nvfp4",
    "weight_scale_2": "nvfp4 (modelopt)",
    "gate_up_proj_blocks": "gpt-oss mxfp4",
    "down_proj_blocks": "gpt-oss mxfp4",
    "weight_scale_inv": "block fp8",
    "quant_state": "bitsandbytes",
}


@dataclass
class Problems:
    """What differs between a checkpoint and its configuration, one printable line each."""

    missing: list[str] = field(default_factory=list)
    extra_experts: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, kind) for kind in _KINDS)

    def lines(self, shown: int = SHOWN) -> list[str]:
        """At most `shown` lines a kind, then how many more there are."""
        result = []
        for kind in _KINDS:
            found = getattr(self, kind)
            result += found[:shown]
            if len(found) > shown:
                result.append(f"... and {len(found) - shown} more of this kind ({kind})")
        return result


def check_checkpoint(
    folder: str | Path | Checkpoint,
    config: Mapping[str, Any] | Any,
    *,
    vision: bool | None = None,
    head: bool = True,
    strict_dtypes: bool = False,
) -> Checkpoint:
    """Compare the headers of a checkpoint with its configuration.

    Per-expert and fused names, plain and MXFP4 experts, the composite prefix `language_model.`, no prefix, and a base
    model's names (without `model.`) are all recognised from the names themselves, so a text configuration may be
    checked against a composite repository.

    Args:
        folder: a folder, an index file, a safetensors file, or an opened `Checkpoint`.
        config: the configuration (dict or object) of the model that will be built.
        vision: require tower and projector; None: if the config has a vision_config. With False, or when the config
            has no vision part, vision tensors in the files are ignored.
        head: require `lm_head.weight` (never required for tied embeddings or a base model's names); where it is
            there, it must fit in any case.
        strict_dtypes: require the released dtype of every tensor; otherwise any float dtype stands for another.
    Returns: the opened `Checkpoint`.
    Raises: CheckpointError with the first few missing, unexpected, mis-shaped and wrongly typed tensors and the file
        each stands in; for mixed packed and plain experts; for another quantisation scheme.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(folder)
    problems = find_problems(checkpoint, config, vision=vision, head=head, strict_dtypes=strict_dtypes)
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} does not hold the model of its configuration:\n  "
            + "\n  ".join(problems.lines())
            + "\nfetch the named shards again, or correct config.json"
        )
    return checkpoint


def find_problems(
    checkpoint: Checkpoint,
    config: Mapping[str, Any] | Any,
    *,
    vision: bool | None = None,
    head: bool = True,
    strict_dtypes: bool = False,
) -> Problems:
    """As `check_checkpoint`, but returns every difference; still raises for mixed and foreign expert formats."""
    config = as_dict(config)
    refuse_foreign(checkpoint, config)
    experts = expert_layout(checkpoint)
    prefix, inner = text_prefix(checkpoint.entries)
    text = TextGeometry.from_config(config)
    problems, seen = Problems(), set()
    for spec in released_layout(config, experts=experts, prefix=prefix, vision=vision):
        name = spec.name
        if not inner and not is_vision(name):
            name = prefix + name.removeprefix(prefix + "model.")
        entry = checkpoint.entries.get(name)
        if entry is None:
            if name.endswith("lm_head.weight") and not (head and inner):
                continue
            if len(problems.missing) == COLLECTED:
                break
            problems.missing.append(f"missing: {name} {spec.dtype} {list(spec.shape)} stands in no shard")
            continue
        seen.add(name)
        if entry.shape != spec.shape or entry.dtype != spec.dtype:
            _compare(problems, spec, entry, text, strict_dtypes)
    if len(seen) != len(checkpoint.entries):
        allowed_vision = vision is False or not isinstance(config.get("vision_config"), Mapping)
        _collect_unexpected(problems, checkpoint, seen, text, allowed_vision)
    return problems


def _compare(problems: Problems, spec: TensorSpec, entry: TensorEntry, text: TextGeometry, strict: bool) -> None:
    where = f"{entry.name} in {entry.path.name}"
    is_decay = entry.name.endswith("self_attn.A_log")
    if entry.shape != spec.shape and not (is_decay and entry.shape in text.decay_shapes):
        problems.shapes.append(f"shape: {where} is {list(entry.shape)}, the config gives {list(spec.shape)}")
    exchangeable = not strict and entry.dtype in FLOAT_DTYPES and spec.dtype in FLOAT_DTYPES
    if entry.dtype != spec.dtype and not exchangeable:
        problems.dtypes.append(f"dtype: {where} is {entry.dtype}, expected {spec.dtype}")


def _collect_unexpected(
    problems: Problems, checkpoint: Checkpoint, seen: set[str], text: TextGeometry, allowed_vision: bool
) -> None:
    for name, entry in checkpoint.entries.items():
        if name in seen or name.endswith("lm_head.weight") or (allowed_vision and is_vision(name)):
            continue
        what = f"{entry.name} {entry.dtype} {list(entry.shape)} in {entry.path.name}"
        at = parse_layer(name)
        expert = parse_expert(at.rest) if at is not None else None
        if expert is not None and at.layer < text.num_layers and text.is_moe(at.layer):
            problems.extra_experts.append(
                f"unexpected: {what} is an expert too many, num_experts is {text.num_experts}"
            )
        else:
            problems.unexpected.append(f"unexpected: {what} has no place in this model")


def text_prefix(names: Iterable[str]) -> tuple[str, str]:
    """What stands before the text tensors: ("language_model." or "", "model." or "").

    Decided by the first decoder tensor; re-exports that drop the inner `model.` give an empty second part.
    """
    for name in names:
        at = parse_layer(name)
        if at is not None and not is_vision(name):
            inner = "model." if at.prefix.endswith("model.") and at.prefix != "language_model." else ""
            return at.prefix.removesuffix(inner) if inner else at.prefix, inner
    return "", "model."


def expert_layout(checkpoint: Checkpoint) -> str:
    """How routed experts are stored: "packed", "plain", "fused" or "fused_packed" ("plain" if there are none).

    Raises: CheckpointError when two ways are mixed, naming one tensor of each.
    """
    first: dict[str, TensorEntry] = {}
    for (ending, _, is_expert), entry in checkpoint.endings.items():
        if is_expert and ending in _EXPERT_KINDS:
            first.setdefault(_EXPERT_KINDS[ending], entry)
    if len(first) > 1:
        kinds = sorted(first)
        told = "; ".join(f"{kind}: {first[kind].name} in {first[kind].path.name}" for kind in kinds)
        raise CheckpointError(
            f"{checkpoint.folder} mixes experts stored as {' and '.join(kinds)} ({told}); all routed experts must be "
            f"stored alike, convert the checkpoint with one --to"
        )
    return next(iter(first), "plain")


def format_disagreement(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str | None:
    """What is wrong if experts are packed and the configuration does not say so, or the other way round."""
    found = expert_layout(checkpoint)
    first = next((entry for name, entry in checkpoint.entries.items() if ".experts." in name), None)
    said = is_packed(config)
    if first is None or said == ("packed" in found):
        return None
    return (
        f"{first.name} in {first.path.name} is stored as a {found} expert, but config.json "
        f"{'names' if said else 'does not name'} the MXFP4 format in quantization_config; correct config.json, or convert "
        "the experts"
    )


def refuse_foreign(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise for quantisation schemes other than the released MXFP4 (from the config and from the tensors)."""
    section = quantization_section(config) or {}
    section = section.get("released", section)
    scheme, method = section.get("format"), section.get("quant_method")
    if method in _FOREIGN_METHODS or (scheme not in (None, PACKED_FORMAT) and method == "compressed-tensors"):
        raise CheckpointError(
            f"{checkpoint.folder}: quantization_config says quant_method {method!r}, format {scheme!r}; only "
            f"compressed-tensors {PACKED_FORMAT} is read. Use the released checkpoint, or one dequantised to bf16"
        )
    if section:
        try:
            check_block(section)  # a known format may still name other groups or integer codes
        except ConfigError as error:
            raise CheckpointError(f"{checkpoint.folder}: config.json: {error}") from error
    for (ending, _, _), entry in checkpoint.endings.items():
        scheme = _FOREIGN_SUFFIXES.get(ending)
        if ending in ("weight_packed", "weight_scale") and entry.dtype != "U8":
            scheme = "nvfp4 or int4"
        if scheme is not None:
            raise CheckpointError(
                f"{entry.name} in {entry.path.name} ({entry.dtype} {list(entry.shape)}) is {scheme}; only {PACKED_FORMAT} "
                f"(U8 weight_packed, U8 weight_scale) is read. Use the released checkpoint, or one dequantised to bf16"
            )


def check_decay_tails(checkpoint: Checkpoint, config: Mapping[str, Any] | Any) -> None:
    """Raise if the padding of a padded `A_log` is not zero; reads these small tensors only.

    K3 stores `A_log` with head_dim entries of which the first num_heads count (kimi_k3 release).
    """
    heads = TextGeometry.from_config(config).kda_heads
    for name, entry in checkpoint.entries.items():
        if not name.endswith("self_attn.A_log") or len(entry.shape) != 1 or entry.shape[0] <= heads:
            continue
        tail = checkpoint.read(name)[heads:]
        if bool((tail != 0).any()):  # true for NaN as well
            at = int((tail != 0).nonzero()[0]) + heads
            raise CheckpointError(
                f"{name} in {entry.path.name}: entry {at} is {float(tail[at - heads])}, but only the first {heads} "
                f"(linear_attn_config.num_heads) may be non-zero; the file or num_heads is wrong"
            )


def check_scales(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Raise if an MXFP4 scale byte is 255 (NaN in E8M0); reads the scale tensors only.

    Args:
        names: scale tensors to look at; None: all of the checkpoint.
    """
    if names is None:
        names = [name for name in checkpoint.entries if name.endswith(SCALE_ENDINGS)]
    for name in names:
        entry = checkpoint.entry(name)
        buffer = checkpoint.read_range(entry)
        at = buffer.find(b"\xff")
        if at >= 0:
            raise nan_scale(name, entry.path, at, entry.shape[-1])


def nan_scale(name: str, path: Path, at: int, groups: int) -> CheckpointError:
    """The error for scale byte number `at` of a tensor with `groups` scales a row being 255."""
    return CheckpointError(
        f"{name} in {path.name}: the scale in row {at // groups}, group {at % groups} is 255, which is NaN in E8M0; "
        "fetch the shard again"
    )


def expert_numbers(checkpoint: Checkpoint) -> dict[int, set[int]]:
    """Which experts each layer holds (per-expert layouts): layer -> set of expert numbers."""
    found: dict[int, set[int]] = {}
    for name in checkpoint.entries:
        if ".experts." in name and (at := parse_layer(name)) is not None and (parsed := parse_expert(at.rest)):
            found.setdefault(at.layer, set()).add(parsed[0])
    return found
