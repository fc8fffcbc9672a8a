"""Which mixer and which feed-forward each layer has: the released 1-based lists, turned into one checked plan.

Source: Kimi K3 and Kimi-Linear `config.json`, field `linear_attn_config`; both lists count layers from 1.
"""

from ..errors import ConfigError

FULL_ATTENTION_EVERY = 4


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


def fill_layer_lists(linear_attn_config: dict, num_hidden_layers: int) -> None:
    """Complete `kda_layers` and `full_attn_layers` in place: both by the released pattern, or one from the other."""
    full = linear_attn_config.get("full_attn_layers")
    kda = linear_attn_config.get("kda_layers")
    if full is None and kda is None:
        full = default_full_attention_layers(num_hidden_layers)
    if full is None:
        full = complement(kda, num_hidden_layers)
    if kda is None:
        kda = complement(full, num_hidden_layers)
    linear_attn_config["full_attn_layers"] = list(full)
    linear_attn_config["kda_layers"] = list(kda)


def check_layer_lists(kda_layers: list[int], full_attn_layers: list[int], num_hidden_layers: int) -> None:
    """Raise `ConfigError` unless the two 1-based lists split 1..num_hidden_layers between them."""
    for name, layers in (("kda_layers", kda_layers), ("full_attn_layers", full_attn_layers)):
        field = f"linear_attn_config.{name}"
        if not isinstance(layers, (list, tuple)) or not all(type(layer) is int for layer in layers):
            raise ConfigError(f"{field} must be a list of integers, got {layers!r}")
        if len(set(layers)) != len(layers):
            raise ConfigError(f"{field} names a layer twice: {sorted(layers)}")
        outside = [layer for layer in layers if not 1 <= layer <= num_hidden_layers]
        if outside:
            raise ConfigError(
                f"{field} counts layers from 1 to num_hidden_layers ({num_hidden_layers}), but holds {outside}"
            )
    both = sorted(set(kda_layers) & set(full_attn_layers))
    if both:
        raise ConfigError(
            f"linear_attn_config.kda_layers and linear_attn_config.full_attn_layers both hold {both}; "
            "every layer is one or the other"
        )
    neither = complement(list(kda_layers) + list(full_attn_layers), num_hidden_layers)
    if neither:
        raise ConfigError(
            f"linear_attn_config.kda_layers and linear_attn_config.full_attn_layers leave out layers {neither} "
            f"(counted from 1, num_hidden_layers {num_hidden_layers})"
        )
