"""What a model keeps along time, layer by layer, read from its configuration. Importing this needs no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigError
from .configuration_kimi_linear import KimiLinearConfig
from .configuration_ladder import LadderConfig


@dataclass(frozen=True)
class LayerMemory:
    """What one layer keeps of one row.

    Attributes:
        kind: "latent" (MLA), "key_value" (softmax attention) or "state" (recurrent).
        heads: how many heads share a token's tensors (latent: one), or hold a state.
        widths: channels of the two tensors kept per token and head; empty for a state.
        state: (keys, values) of a head's fp32 state; linear attention has its normaliser as one more value column.
        window: (channels, width) of the convolutions' window; empty without convolutions.
    """

    kind: str
    heads: int
    widths: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    window: tuple[int, ...] = ()

    @property
    def numbers_per_token(self) -> int:
        """Numbers kept for every token; 0 where memory does not grow."""
        return self.heads * sum(self.widths)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, see `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "LayerMemory":
        return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()})


def cache_plan(config) -> tuple[LayerMemory, ...]:
    """One entry per layer of `config` (a composite one is asked for its text part).

    Raises:
        ConfigError: for a configuration of another model family.
    """
    text = config.get_text_config(decoder=True)
    if isinstance(text, LadderConfig):
        return tuple(_layer(text, name) for name in text.mixers)
    if isinstance(text, KimiLinearConfig):
        names = {"linear_attention": "kimi_delta_attention", "full_attention": "latent_attention"}
        return tuple(_layer(text, names[kind]) for kind in text.layer_types)
    raise ConfigError(
        f"caches are made for KimiLinearConfig, KimiK3Config and LadderConfig, got {type(text).__name__}; give model.config"
    )


def _layer(c: KimiLinearConfig | LadderConfig, mixer: str) -> LayerMemory:
    if mixer == "latent_attention":
        return LayerMemory("latent", 1, widths=(c.kv_lora_rank, c.qk_rope_head_dim))
    if mixer == "softmax_attention":
        return LayerMemory("key_value", c.num_attention_heads, widths=(c.head_dim, c.head_dim))
    if mixer == "kimi_delta_attention":
        linear = c.linear_attn_config
        heads, keys = linear["num_heads"], linear["head_dim"]
        return LayerMemory(
            "state", heads, state=(keys, keys), window=(3 * heads * keys, linear["short_conv_kernel_size"])
        )
    heads, keys = c.linear_num_heads, c.linear_head_dim
    values = c.linear_value_head_dim or keys
    if mixer == "linear_attention":
        return LayerMemory("state", heads, state=(keys, values + 1))
    width = c.delta_options(mixer)["short_conv_kernel_size"]
    window = (heads * (2 * keys + values), width) if width else ()
    return LayerMemory("state", heads, state=(keys, values), window=window)
