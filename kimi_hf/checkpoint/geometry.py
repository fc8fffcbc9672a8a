"""The numbers of a configuration that decide tensor names and shapes, read from plain JSON.

The tools of this folder open checkpoints that other programs wrote, so they read config.json as it is and take the
released defaults for absent fields; they never build a model or its configuration class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_hf.configuration.quantization import is_released_mxfp4, released
from kimi_hf.errors import CheckpointError, ConfigError

PACKED_FORMAT = "mxfp4-pack-quantized"
# The released classes' own defaults, for fields that a config.json leaves out.
TEXT_DEFAULTS = {
    "vocab_size": 163840,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
}
VISION_DEFAULTS = {
    "vt_hidden_size": 1024,
    "vt_num_hidden_layers": 27,
    "qkv_hidden_size": 1536,
    "vt_intermediate_size": 4096,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "mm_hidden_size": 1024,
    "text_hidden_size": 7168,
}
_ALIASES = {"num_experts": "num_local_experts", "num_shared_experts": "n_shared_experts"}
_NATIVE_LINEAR = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_DTYPES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "float64": "F64"}


def load_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder (or the JSON file itself) as a dict.

    Raises: CheckpointError if it is absent, unreadable, or not a JSON object.
    """
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is absent; a checkpoint folder needs its config.json") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); restore the file") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a JSON {type(config).__name__}, expected an object")
    return config


def as_dict(config: Mapping[str, Any] | Any) -> Mapping[str, Any]:
    """A configuration object's released form, or the mapping itself."""
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    raise ConfigError(f"config is a {type(config).__name__}; expected a dict or a configuration object")


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part: `text_config` of a composite config, else the config itself."""
    section = config.get("text_config")
    return section if isinstance(section, Mapping) else config


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config, wherever it stands (text_config in the release, top level in re-exports)."""
    for holder in (text_section(config), config):
        section = holder.get("quantization_config")
        if section:
            return section
    return None


def is_kimi(config: Mapping[str, Any]) -> bool:
    """Whether the config is of a model whose layout this package knows (an absent model_type is given the benefit)."""
    return config.get("model_type") in ("kimi_k3", "kimi_linear", None)


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether the config says that routed experts are MXFP4."""
    return is_released_mxfp4(released(quantization_section(config)))


@dataclass(frozen=True)
class TextGeometry:
    """Sizes and switches of the decoder; layer indices are 0-based, `kda_layers` a set of them."""

    composite: bool
    packed: bool
    dtype: str
    vocab_size: int
    hidden: int
    num_layers: int
    intermediate: int
    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    mla_gate: bool
    kda_layers: frozenset[int]
    kda_heads: int
    kda_head_dim: int
    conv_width: int
    full_rank_gate: bool
    bounded_gate: bool
    num_experts: int
    moe_intermediate: int
    num_shared: int
    latent: int
    latent_norm: bool
    first_dense: int
    moe_freq: int
    attn_res: bool
    tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Any) -> TextGeometry:
        """Read the text part of a config.

        Raises: ConfigError naming the absent or contradictory field.
        """
        full = as_dict(config)
        text = text_section(full)
        linear = {"num_heads": _need(text, "num_attention_heads"), "head_dim": 128, **linear_section(text)}
        layers = _need(text, "num_hidden_layers")
        experts = _optional(text, "num_experts")
        kda = kda_layers(text)
        return cls(
            composite=isinstance(full.get("text_config"), Mapping),
            packed=is_packed(full),
            dtype=_dtype(text, full),
            vocab_size=_need(text, "vocab_size"),
            hidden=_need(text, "hidden_size"),
            num_layers=layers,
            intermediate=_need(text, "intermediate_size"),
            num_heads=_need(text, "num_attention_heads"),
            q_rank=_optional(text, "q_lora_rank"),
            kv_rank=_need(text, "kv_lora_rank"),
            nope_dim=_need(text, "qk_nope_head_dim"),
            rope_dim=text.get("qk_rope_head_dim", TEXT_DEFAULTS["qk_rope_head_dim"]) or 0,
            v_dim=_need(text, "v_head_dim"),
            mla_gate=bool(text.get("mla_use_output_gate")),
            kda_layers=kda,
            kda_heads=_need(linear, "num_heads", "linear_attn_config.") if kda else 0,
            kda_head_dim=_need(linear, "head_dim", "linear_attn_config.") if kda else 0,
            conv_width=linear.get("short_conv_kernel_size") or 4,
            full_rank_gate=bool(linear.get("use_full_rank_gate")),
            bounded_gate=linear.get("gate_lower_bound") is not None,
            num_experts=experts,
            moe_intermediate=_need(text, "moe_intermediate_size") if experts else 0,
            num_shared=_optional(text, "num_shared_experts"),
            latent=_optional(text, "routed_expert_hidden_size"),
            latent_norm=bool(text.get("latent_moe_use_norm")),
            first_dense=text.get("first_k_dense_replace") or 0,
            moe_freq=text.get("moe_layer_freq") or 1,
            attn_res=bool(text.get("attn_res_block_size")),
            tied=bool(text.get("tie_word_embeddings", full.get("tie_word_embeddings", False))),
        )

    def is_moe(self, layer: int) -> bool:
        return bool(self.num_experts) and layer >= self.first_dense and layer % self.moe_freq == 0

    @property
    def expert_width(self) -> int:
        """Z, the width that routed experts read and write."""
        return self.latent or self.hidden

    @property
    def stored_decay_shape(self) -> tuple[int, ...]:
        """Shape of `A_log` in the files: padded to head_dim in K3, (1, 1, H, 1) in Kimi-Linear."""
        if not self.bounded_gate:
            return (1, 1, self.kda_heads, 1)
        return (max(self.kda_heads, self.kda_head_dim),)

    @property
    def decay_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Every shape of `A_log` that is read: the two released ones and the bare (H,)."""
        heads = self.kda_heads
        return ((heads,), (max(heads, self.kda_head_dim),), (1, 1, heads, 1))


@dataclass(frozen=True)
class VisionGeometry:
    """Sizes of the vision tower and the projector."""

    dtype: str
    hidden: int
    num_layers: int
    qkv: int
    intermediate: int
    patch: int
    pos_height: int
    pos_width: int
    merge: int
    mm_hidden: int
    text_hidden: int
    attn_bias: bool
    linear_bias: bool
    patch_bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Any) -> VisionGeometry | None:
        """Read `vision_config` of a composite config; None if there is none."""
        full = as_dict(config)
        vision = full.get("vision_config")
        if not isinstance(vision, Mapping):
            return None
        height, width = vision.get("merge_kernel_size") or (2, 2)
        sizes = {name: _need(vision, name, "vision_config.", VISION_DEFAULTS) for name in VISION_DEFAULTS}
        return cls(
            dtype=_dtype(vision, full),
            hidden=sizes["vt_hidden_size"],
            num_layers=sizes["vt_num_hidden_layers"],
            qkv=sizes["qkv_hidden_size"],
            intermediate=sizes["vt_intermediate_size"],
            patch=sizes["patch_size"],
            pos_height=sizes["init_pos_emb_height"],
            pos_width=sizes["init_pos_emb_width"],
            merge=height * width,
            mm_hidden=sizes["mm_hidden_size"],
            text_hidden=sizes["text_hidden_size"],
            attn_bias=bool(vision.get("attn_bias")),
            linear_bias=bool(vision.get("linear_bias")),
            patch_bias=bool(vision.get("patch_embed_proj_bias")),
        )


def linear_section(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """`linear_attn_config`, or what transformers' native class spells with flat fields and 0-based `layer_types`."""
    linear = text.get("linear_attn_config")
    if linear is not None:
        return linear
    native = {name: text[alias] for name, alias in _NATIVE_LINEAR.items() if alias in text}
    if "layer_types" in text:
        kinds = enumerate(text["layer_types"], start=1)
        native["kda_layers"] = [number for number, kind in kinds if kind == "linear_attention"]
    return native


def kda_layers(text: Mapping[str, Any]) -> frozenset[int]:
    """0-based indices of the KDA layers, from the 1-based lists of `linear_attn_config`.

    Without lists every fourth layer counted from 1, and the last one, is full attention.

    Raises: ConfigError if the lists name a layer twice, or one that does not exist.
    """
    layers = _need(text, "num_hidden_layers")
    linear = linear_section(text)
    listed, full = linear.get("kda_layers"), linear.get("full_attn_layers")
    if listed is None and full is None:
        return frozenset(i for i in range(layers) if (i + 1) % 4 and i != layers - 1)
    if listed is None:
        listed = [n for n in range(1, layers + 1) if n not in set(full)]
    wrong = [n for n in listed if not 1 <= n <= layers]
    if wrong or len(set(listed)) != len(listed) or (full is not None and set(listed) & set(full)):
        raise ConfigError(
            f"linear_attn_config.kda_layers is {list(listed)} and full_attn_layers {full}: every layer number from 1 "
            f"to num_hidden_layers={layers} may appear once; the lists count from 1"
        )
    return frozenset(n - 1 for n in listed)


def _need(section: Mapping[str, Any], field: str, where: str = "", defaults: Mapping[str, int] | None = None) -> int:
    value = section.get(field, (TEXT_DEFAULTS if defaults is None else defaults).get(field))
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}{field} is {value!r}; expected a positive integer")
    return value


def _optional(section: Mapping[str, Any], field: str) -> int:
    value = section.get(field, section.get(_ALIASES.get(field, "")))
    return 0 if value is None or value == 0 else _need({field: value}, field)


def _dtype(section: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    for holder in (section, full):
        value = holder.get("dtype", holder.get("torch_dtype"))
        if value is not None:
            name = str(value).removeprefix("torch.")
            if name not in _DTYPES:
                raise ConfigError(f"dtype is {value!r}; expected one of {', '.join(_DTYPES)}")
            return _DTYPES[name]
    return "BF16"
