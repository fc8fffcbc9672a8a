"""What a `LadderConfig` may name, and which part reads which field."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .checks import layer_count, one_of

# Mixer -> what transformers' caches and masks call its kind of layer.
MIXERS = {
    "softmax_attention": "full_attention",
    "linear_attention": "linear_attention",
    "delta_net": "linear_attention",
    "gated_delta_net": "linear_attention",
    "kimi_delta_attention": "linear_attention",
    "latent_attention": "full_attention",
}
FEED_FORWARDS = ("gelu_mlp", "swiglu", "situ_glu", "moe", "latent_moe")
RESIDUALS = ("sum", "block_attn_res", "full_attn_res")
_DELTA = ("delta_net", "gated_delta_net")
_RECURRENT = ("linear_attention", *_DELTA, "kimi_delta_attention")
SPARSE = ("moe", "latent_moe")
# Field -> the parts that read it. All of these start as None (or off): set without such a part they would silently do
# nothing, so that is an error; left out with such a part they take the default of that part.
READERS: dict[str, tuple[str, ...]] = {
    "linear_num_heads": _RECURRENT,
    "linear_head_dim": _RECURRENT,
    "linear_value_head_dim": ("linear_attention", *_DELTA),
    "short_conv_kernel_size": (*_DELTA, "kimi_delta_attention"),
    "output_norm": _DELTA,
    "output_gate": _DELTA,
    "gate_lower_bound": ("kimi_delta_attention",),
    "use_full_rank_gate": ("kimi_delta_attention",),
    "attention_dropout": ("softmax_attention", "latent_attention"),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate"),
        ("latent_attention",),
    ),
    "intermediate_size": ("gelu_mlp", "swiglu", "situ_glu"),
    "activation_function": ("gelu_mlp",),
    "activation_situ_beta": ("situ_glu", *SPARSE),
    "activation_situ_linear_beta": ("situ_glu", *SPARSE),
    **dict.fromkeys(
        (
            "hidden_act",
            "num_experts",
            "num_experts_per_token",
            "num_shared_experts",
            "moe_intermediate_size",
            "moe_router_activation_func",
            "moe_renormalize",
            "routed_scaling_factor",
            "num_expert_group",
            "topk_group",
            "output_router_logits",
        ),
        SPARSE,
    ),
    "routed_expert_hidden_size": ("latent_moe",),
    "latent_moe_use_norm": ("latent_moe",),
    "attn_res_block_size": ("block_attn_res",),
    "bias": ("layer_norm", "softmax_attention", "linear_attention", "gelu_mlp"),
}
# Mixer -> short convolution width (0: none), norm and gate on its output, as its paper has them.
DELTA_DEFAULTS = {
    "delta_net": {"short_conv_kernel_size": 0, "output_norm": False, "output_gate": False},
    "gated_delta_net": {"short_conv_kernel_size": 4, "output_norm": True, "output_gate": True},
}


def check_parts(fields: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a part that `fields` name does not exist, or if lists of them are longer than the model."""
    layers = fields["num_hidden_layers"]
    layer_count("num_hidden_layers", layers)
    for field, allowed in (("mixer", tuple(MIXERS)), ("feed_forward", FEED_FORWARDS)):
        value = fields[field]
        if not isinstance(value, (str, list, tuple)):
            raise ConfigError(
                f"{field} must be a name or a list of names, got {value!r}; known are {', '.join(allowed)}"
            )
        names = as_list(value)
        if not 1 <= len(names) <= layers:
            raise ConfigError(
                f"{field} names {len(names)} layers, but num_hidden_layers is {layers}; give one name, or a list of at most "
                "that many, which is repeated"
            )
        for name in names:
            one_of(field, name, allowed)
    one_of("residual", fields["residual"], RESIDUALS)
    one_of("positions", fields["positions"], ("learned", "none"))
    one_of("norm", fields["norm"], ("layer_norm", "rms_norm"))


def as_list(names: str | list[str] | tuple[str, ...]) -> list[str]:
    """A name or several as a list."""
    return [names] if isinstance(names, str) else list(names)
