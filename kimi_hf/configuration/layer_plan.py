"""Which mixer and which feed-forward each layer has: the released 1-based lists, turned into one checked plan.

Source: Kimi K3 and Kimi-Linear `config.json`, field `linear_attn_config`; both lists count layers from 1.
"""

from typing import Any

from ..errors import ConfigError
from .checks import kinds, lower_bound, positive_int, switch

FULL_ATTENTION_EVERY = 4
LISTS = ("kda_layers", "full_attn_layers")
LINEAR_ATTN_FIELDS = (
    *LISTS,
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "use_full_rank_gate",
    "gate_lower_bound",
)
_REMEDY = "give both lists in linear_attn_config, or null for both to have the released pattern"


def default_full_attention_layers(num_hidden_layers: int) -> list[int]:
    """The released pattern, 1-based: every fourth layer counted from 1, and the last layer."""
    layers = list(range(FULL_ATTENTION_EVERY, num_hidden_layers + 1, FULL_ATTENTION_EVERY))
    if not layers or layers[-1] != num_hidden_layers:
        layers.append(num_hidden_layers)
    return layers


def complement(layers: list[int], num_hidden_layers: int) -> list[int]:
    """The 1-based layers that are not in `layers`."""
    present = set(layers)
    return [layer for layer in range(1, num_hidden_layers + 1) if layer not in present]


def fill_linear_attn_config(linear: dict[str, Any], layers: int, heads: int, memory: dict[str, Any]) -> None:
    """Complete `linear_attn_config` in place: sizes, and the lists by the released pattern, or one from the other.

    May be called again when the number of layers or heads has changed. What was filled in is filled in anew; lists that
    were given are cut to fewer layers, and stay as they are for more (which `check_layer_lists` then refuses).

    Args:
        layers, heads: `num_hidden_layers` and `num_attention_heads`.
        memory: what the last call wrote, kept for the next one; empty for lists that were just given.
    """
    if "num_heads" not in linear or memory.get("num_heads") == linear["num_heads"]:
        linear["num_heads"] = memory["num_heads"] = heads
    linear.setdefault("head_dim", 128)
    linear.setdefault("short_conv_kernel_size", 4)
    given, shown = {}, {}
    for name in LISTS:
        current, (wrote, origin) = linear.get(name), memory.get(name, (None, None))
        if current is not None and not _is_layer_list(current):
            return
        again = current is not None and current == wrote
        given[name] = origin if again else current
        shown[name] = given[name]
        if again and origin is not None:
            shown[name] = [layer for layer in origin if layer <= layers]
    full, kda = shown["full_attn_layers"], shown["kda_layers"]
    if full is None:
        full = default_full_attention_layers(layers) if kda is None else complement(kda, layers)
    if kda is None:
        kda = complement(full, layers)
    for name, value in (("full_attn_layers", full), ("kda_layers", kda)):
        linear[name] = list(value)
        memory[name] = (list(value), given[name])


def check_linear_attn_config(linear: Any, num_hidden_layers: int) -> None:
    """Raise `ConfigError` unless `linear` is a complete and possible `linear_attn_config`."""
    if not isinstance(linear, dict):
        raise ConfigError(f"linear_attn_config must be an object with {', '.join(LINEAR_ATTN_FIELDS)}, got {linear!r}")
    unknown = sorted(map(str, set(linear) - set(LINEAR_ATTN_FIELDS)))
    if unknown:
        raise ConfigError(
            f"linear_attn_config holds unknown fields {unknown}; known are {', '.join(LINEAR_ATTN_FIELDS)}"
        )
    for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
        positive_int(f"linear_attn_config.{name}", linear.get(name))
    if linear.get("use_full_rank_gate") is not None:
        switch("linear_attn_config.use_full_rank_gate", linear["use_full_rank_gate"])
    check_layer_lists(linear.get("kda_layers"), linear.get("full_attn_layers"), num_hidden_layers)
    lower_bound("linear_attn_config.gate_lower_bound", linear.get("gate_lower_bound"))


def check_layer_lists(kda_layers: Any, full_attn_layers: Any, num_hidden_layers: int) -> None:
    """Raise `ConfigError` unless the two 1-based lists split 1..num_hidden_layers between them."""
    lists = {"kda_layers": kda_layers, "full_attn_layers": full_attn_layers}
    # One list is filled in from the other, so it is absent only beside one that cannot be read: that one is named.
    for name, layers in sorted(lists.items(), key=lambda item: item[1] is None):
        if not _is_layer_list(layers):
            raise ConfigError(f"linear_attn_config.{name} must be a list of integers, got {layers!r}")
    for name, layers in lists.items():
        field = f"linear_attn_config.{name}"
        if len(set(layers)) != len(layers):
            raise ConfigError(f"{field} names a layer twice: {sorted(layers)}; {_REMEDY}")
        outside = [layer for layer in layers if not 1 <= layer <= num_hidden_layers]
        if outside:
            raise ConfigError(
                f"{field} counts layers from 1 to num_hidden_layers ({num_hidden_layers}), but holds {outside}; {_REMEDY}"
            )
    both = sorted(set(kda_layers) & set(full_attn_layers))
    if both:
        raise ConfigError(
            f"linear_attn_config.kda_layers and linear_attn_config.full_attn_layers both hold {both}; "
            f"every layer is one or the other: {_REMEDY}"
        )
    neither = complement([*kda_layers, *full_attn_layers], num_hidden_layers)
    if neither:
        raise ConfigError(
            f"linear_attn_config.kda_layers and linear_attn_config.full_attn_layers leave out layers {neither} "
            f"(counted from 1, num_hidden_layers {num_hidden_layers}); {_REMEDY}"
        )


def lists_of(layer_types: list[str], num_hidden_layers: int) -> dict[str, list[int]]:
    """The two lists for a native config's 0-based `layer_types`."""
    kinds("layer_types", layer_types, ("linear_attention", "full_attention"), num_hidden_layers)
    return {
        "kda_layers": [i + 1 for i, kind in enumerate(layer_types) if kind == "linear_attention"],
        "full_attn_layers": [i + 1 for i, kind in enumerate(layer_types) if kind == "full_attention"],
    }


def dense_prefix(mlp_layer_types: list[str], num_hidden_layers: int) -> int:
    """`first_k_dense_replace` for a native config's `mlp_layer_types`: how many leading layers are dense."""
    kinds("mlp_layer_types", mlp_layer_types, ("dense", "sparse"), num_hidden_layers)
    dense = next((i for i, kind in enumerate(mlp_layer_types) if kind == "sparse"), len(mlp_layer_types))
    if "dense" in mlp_layer_types[dense:]:
        raise ConfigError("mlp_layer_types has a dense layer after a sparse one; use moe_layer_freq for such patterns")
    return dense


def _is_layer_list(layers: Any) -> bool:
    return isinstance(layers, (list, tuple)) and all(type(layer) is int for layer in layers)
