"""Configurations by name: the released models, and small ones of the same shape that a laptop can train."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import ConfigError
from .configuration_kimi_k3 import KimiK3Config
from .configuration_kimi_linear import KimiLinearConfig
from .configuration_ladder import LadderConfig
from .layer_plan import complement, default_full_attention_layers

_TOKEN_IDS = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
_SMALL_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _linear_attn(layers: int, heads: int, head_dim: int, **extra: Any) -> dict[str, Any]:
    full = default_full_attention_layers(layers)
    return {
        "full_attn_layers": full,
        "kda_layers": complement(full, layers),
        "num_heads": heads,
        "head_dim": head_dim,
        "short_conv_kernel_size": 4,
        **extra,
    }


def _k3_text(layers: int, heads: int, head_dim: int, **fields: Any) -> dict[str, Any]:
    bounded = {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "linear_attn_config": _linear_attn(layers, heads, head_dim, **bounded),
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_shared_experts": 2,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        **fields,
    }


def _kimi_linear(layers: int, heads: int, head_dim: int, **fields: Any) -> KimiLinearConfig:
    return KimiLinearConfig(
        architectures=["KimiLinearForCausalLM"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        linear_attn_config=_linear_attn(layers, heads, head_dim),
        hidden_act="silu",
        rms_norm_eps=1e-5,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        first_k_dense_replace=1,
        **fields,
    )


def _kimi_k3() -> KimiK3Config:
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": weights}},
    }
    text = _k3_text(
        93,
        96,
        128,
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=33792,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        attn_res_block_size=12,
        num_experts=896,
        num_experts_per_token=16,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        max_position_embeddings=1048576,
        dtype="bfloat16",
        quantization_config=quantization,
        **_TOKEN_IDS,
    )
    return KimiK3Config(
        architectures=["KimiK3ForConditionalGeneration"],
        text_config=text,
        vision_config={},
        media_placeholder_token_id=163605,
        dtype="bfloat16",
        **_TOKEN_IDS,
    )


def _k3_reduced(text: dict[str, Any], vision: dict[str, Any]) -> KimiK3Config:
    return KimiK3Config(
        architectures=["KimiK3ForConditionalGeneration"],
        text_config={**text, **_SMALL_TOKEN_IDS},
        vision_config=vision,
        media_placeholder_token_id=3,
        **_SMALL_TOKEN_IDS,
    )


def _kimi_k3_tiny() -> KimiK3Config:
    text = _k3_text(
        8,
        4,
        32,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        attn_res_block_size=3,
        num_experts=24,
        num_experts_per_token=4,
        moe_intermediate_size=96,
        routed_expert_hidden_size=128,
        max_position_embeddings=4096,
    )
    return _k3_reduced(text, _vision(64, 2, 256))


def _kimi_k3_small() -> KimiK3Config:
    text = _k3_text(
        12,
        8,
        64,
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        q_lora_rank=192,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        attn_res_block_size=4,
        num_experts=32,
        num_experts_per_token=4,
        moe_intermediate_size=192,
        routed_expert_hidden_size=256,
        max_position_embeddings=8192,
    )
    return _k3_reduced(text, _vision(128, 4, 512))


def _vision(width: int, layers: int, text_hidden_size: int) -> dict[str, Any]:
    return {
        "vt_hidden_size": width,
        "vt_num_hidden_layers": layers,
        "vt_num_attention_heads": 2,
        "qkv_hidden_size": width,
        "vt_intermediate_size": 2 * width,
        "init_pos_emb_height": 16,
        "init_pos_emb_width": 16,
        "mm_hidden_size": width,
        "text_hidden_size": text_hidden_size,
    }


def _kimi_linear_48b() -> KimiLinearConfig:
    return _kimi_linear(
        27,
        32,
        128,
        vocab_size=163840,
        hidden_size=2304,
        intermediate_size=9216,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=256,
        num_experts_per_token=8,
        moe_intermediate_size=1024,
        model_max_length=1048576,
        dtype="bfloat16",
        **_TOKEN_IDS,
    )


def _kimi_linear_tiny() -> KimiLinearConfig:
    return _kimi_linear(
        8,
        4,
        32,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_experts=12,
        num_experts_per_token=3,
        moe_intermediate_size=96,
        **_SMALL_TOKEN_IDS,
    )


def _kimi_linear_small() -> KimiLinearConfig:
    return _kimi_linear(
        12,
        8,
        64,
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        num_experts=16,
        num_experts_per_token=4,
        moe_intermediate_size=224,
        **_SMALL_TOKEN_IDS,
    )


Preset = KimiK3Config | KimiLinearConfig | LadderConfig
_LADDER = ("gpt2", "linear-transformer", "delta-net", "gated-delta-net")
PRESETS: dict[str, Callable[[], Preset]] = {
    "kimi-k3": _kimi_k3,
    "kimi-k3-small": _kimi_k3_small,
    "kimi-k3-tiny": _kimi_k3_tiny,
    "kimi-linear-48b-a3b": _kimi_linear_48b,
    "kimi-linear-small": _kimi_linear_small,
    "kimi-linear-tiny": _kimi_linear_tiny,
    **{rung + size: partial(LadderConfig.rung, rung + size) for rung in _LADDER for size in ("", "-small", "-tiny")},
}


def preset(name: str) -> Preset:
    """A fresh configuration by name.

    Args:
        name: one of `PRESETS`; "-tiny" has about 10 million parameters, "-small" about 100 million.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not known; known are {', '.join(PRESETS)}")
    return PRESETS[name]()
