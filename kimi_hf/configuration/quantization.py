"""Where the released `quantization_config` goes while a model is in memory, and back.

The release keeps a compressed-tensors block inside `text_config`. transformers would hand that block to a quantizer
that cannot read packed experts, so a config that finds the MXFP4 format routes it to our own quantizer by name and
carries the released block inside; writing the config puts the released block back, unchanged.
"""

import copy
from typing import Any

from ..errors import ConfigError
from .checks import string

RELEASED_METHOD = "compressed-tensors"
RELEASED_FORMAT = "mxfp4-pack-quantized"
QUANT_METHOD = "kimi_mxfp4"
GROUP_SIZE = 32
_FIELD = "quantization_config"
# Linear layers that are not packed. The last two patterns are not in the release, whose list leaves these layers out
# although they are stored plain: a reader that goes by the list alone would take them for packed.
NOT_PACKED = (
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*lm_head.*",
    r"re:.*vision_tower.*",
    r"re:.*mm_projector.*",
    r"re:.*routed_expert_(down|up)_proj.*",
    r"re:.*_res_proj.*",
)


def released_block() -> dict[str, Any]:
    """A new `quantization_config` in the released schema, for experts that were not packed by the release."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP_SIZE,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": RELEASED_FORMAT,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": RELEASED_FORMAT,
        "global_compression_ratio": None,
        "ignore": list(NOT_PACKED),
        "kv_cache_scheme": None,
        "quant_method": RELEASED_METHOD,
        "quantization_status": "compressed",
    }


def is_released_mxfp4(block: Any) -> bool:
    """Whether a `quantization_config` block is the released MXFP4 format."""
    return (
        isinstance(block, dict) and block.get("quant_method") == RELEASED_METHOD and _format(block) == RELEASED_FORMAT
    )


def agreed(outer: Any, inner: Any) -> Any:
    """The one block of a composite, which may stand at its top, in its `text_config`, or the same in both.

    Raises:
        ConfigError: two different blocks.
    """
    if outer is not None and inner is not None and released(outer) != released(inner):
        raise ConfigError(
            f"{_FIELD} names {_method(outer)}, but text_config.{_FIELD} names {_method(inner)}, and the two differ; keep the one "
            "that the tensors are stored in"
        )
    return inner if outer is None else outer


def route(block: Any) -> Any:
    """The block our quantizer reads, for a block as released; every other block is returned as it is.

    Raises:
        ConfigError: what `check_block` refuses.
    """
    check_block(block)
    if isinstance(block, dict) and block.get("quant_method") == RELEASED_METHOD:
        return {"quant_method": QUANT_METHOD, "released": copy.deepcopy(block)}
    return block


def check_block(block: Any) -> None:
    """Raise `ConfigError` for a block that names no method, compressed-tensors in another format than MXFP4, or MXFP4 with
    other groups than 32.
    """
    if block is None or hasattr(block, "to_dict"):
        return
    if not isinstance(block, dict):
        raise ConfigError(f"{_FIELD} must be an object with a quant_method, got {block!r}")
    method = block.get("quant_method")
    if method is None and any(str(key).startswith("load_in_") for key in block):
        return  # bitsandbytes wrote no method once
    string(f"{_FIELD}.quant_method", method)
    if method == QUANT_METHOD and block.get("released") is not None:
        block = block["released"]
    if not isinstance(block, dict) or method not in (RELEASED_METHOD, QUANT_METHOD):
        return
    groups = block.get("config_groups")
    if groups is not None and not (isinstance(groups, dict) and all(isinstance(x, dict) for x in groups.values())):
        raise ConfigError(f"{_FIELD}.config_groups must be an object of objects, got {groups!r}")
    if _format(block) != RELEASED_FORMAT and method == RELEASED_METHOD:
        raise ConfigError(
            f"{_FIELD}.format is {_format(block)!r}; of compressed-tensors only {RELEASED_FORMAT!r} can be "
            "read here. Convert the checkpoint to plain bf16 or to that format first"
        )
    for name, group in (groups or {}).items():
        _check_group(f"{_FIELD}.config_groups.{name}", group)


def released(block: Any) -> Any:
    """The block as released, for a block as `route` made it; every other block is returned as it is."""
    if not isinstance(block, dict) and hasattr(block, "to_dict"):
        block = block.to_dict()
    if isinstance(block, dict) and block.get("quant_method") == QUANT_METHOD and block.get("released"):
        return copy.deepcopy(block["released"])
    return block


def _check_group(name: str, group: dict[str, Any]) -> None:
    weights = group.get("weights")
    if weights is None:
        weights = {}
    if not isinstance(weights, dict):
        raise ConfigError(f"{name}.weights must be an object, got {weights!r}")
    found = (weights.get("num_bits", 4), weights.get("type", "float"), weights.get("group_size", GROUP_SIZE))
    if found != (4, "float", GROUP_SIZE):
        raise ConfigError(
            f"{name}.weights asks for num_bits, type, group_size = {found}; MXFP4 is (4, 'float', {GROUP_SIZE})"
        )
    if group.get("input_activations") is not None:
        raise ConfigError(f"{name}.input_activations must be null: activations stay in the model's own dtype")


def _method(block: Any) -> str:
    block = released(block)
    if not isinstance(block, dict):
        return repr(block)
    return f"quant_method {block.get('quant_method')!r} (format {block.get('format')!r})"


def _format(block: dict) -> Any:
    """The packing format: named at the top, or by the groups when they agree."""
    if block.get("format"):
        return block["format"]
    groups = block.get("config_groups")
    formats = [group.get("format") for group in (groups.values() if isinstance(groups, dict) else ())]
    return formats[0] if formats and all(found == formats[0] for found in formats) else None
