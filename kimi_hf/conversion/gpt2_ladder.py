"""GPT-2 as the lowest rung of the ladder, and back.

The ladder names its parts as the released Kimi files do and keeps q, k and v apart; GPT-2 stacks them in `c_attn` and
stores the four projections of a layer as (in, out). Nothing else differs, so every value goes over unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kimi_hf.errors import ConfigError

State = dict[str, torch.Tensor]

# GPT-2 name without layer prefix -> ladder names; several: the rows are stacked.
OUTSIDE = {
    "transformer.wte": ("model.embed_tokens",),
    "transformer.wpe": ("model.embed_positions",),
    "transformer.ln_f": ("model.norm",),
}
INSIDE = {
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}
# GPT-2 config field -> ladder config field.
FIELDS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "norm_eps",
    "activation_function": "activation_function",
    "resid_pdrop": "residual_dropout",
    "embd_pdrop": "embedding_dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "initializer_range",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "dtype": "dtype",
}
RUNG = {
    "mixer": "softmax_attention",
    "feed_forward": "gelu_mlp",
    "residual": "sum",
    "positions": "learned",
    "norm": "layer_norm",
}
GPT2_DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}


def _modules(layers: int) -> dict[str, tuple[str, ...]]:
    """Every GPT-2 module with its ladder modules."""
    modules = dict(OUTSIDE)
    for layer in range(layers):
        for theirs, ours in INSIDE.items():
            modules[f"transformer.h.{layer}.{theirs}"] = tuple(f"model.layers.{layer}.{name}" for name in ours)
    return modules


def _is_projection(module: str) -> bool:
    return ".c_" in module


def gpt2_to_ladder(state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    """Tensors and config of a HF GPT-2 (as `gpt2.read_gpt2` gives them) in the ladder's spelling.

    Biases that a nanoGPT without any brought along as zeros are left out again, and `bias` is then false.

    Raises: ConfigError for GPT-2 switches that the ladder does not have.
    """
    fixed = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True}
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ConfigError(f"{name} is {config[name]}; the ladder's GPT-2 only knows {value}")
    biases = [tensor for name, tensor in state.items() if name.endswith(".bias")]
    bias = bool(config.get("nanogpt_bias", True)) or any(bool(tensor.any()) for tensor in biases)
    result: State = {}
    for theirs, ours in _modules(config["n_layer"]).items():
        weight = state[f"{theirs}.weight"]
        weight = weight.t() if _is_projection(theirs) else weight
        for name, part in zip(ours, weight.chunk(len(ours)), strict=True):
            result[f"{name}.weight"] = part.contiguous()
        if bias and f"{theirs}.bias" in state:
            for name, part in zip(ours, state[f"{theirs}.bias"].chunk(len(ours)), strict=True):
                result[f"{name}.bias"] = part.contiguous()
    fields = {ours: config.get(theirs, GPT2_DEFAULTS.get(theirs)) for theirs, ours in FIELDS.items()}
    target = {
        "model_type": "kimi_ladder",
        "architectures": ["LadderForCausalLM"],
        **{name: value for name, value in fields.items() if value is not None},
        **RUNG,
        "bias": bias,
        "tie_word_embeddings": True,
    }
    if config.get("n_inner") not in (None, 4 * config["n_embd"]):
        target["intermediate_size"] = config["n_inner"]
    return result, target


def ladder_to_gpt2(state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    """The way back; a ladder without biases gets zeros, and the config remembers that as `nanogpt_bias`.

    Raises: ConfigError for another rung than GPT-2, naming the field.
    """
    for name, value in RUNG.items():
        found = config.get(name, value)
        if found != value and found != [value] * len(found if isinstance(found, list) else ()):
            raise ConfigError(f"{name} is {found!r}; only the GPT-2 rung has a GPT-2 layout, which is {value!r}")
    if not config.get("tie_word_embeddings", True):
        raise ConfigError("tie_word_embeddings is false; GPT-2 ties them, so there is no place for lm_head.weight")
    bias = config.get("bias")
    bias = True if bias is None else bool(bias)
    result: State = {}
    for theirs, ours in _modules(config["num_hidden_layers"]).items():
        weight = torch.cat([state[f"{name}.weight"] for name in ours])
        if theirs not in ("transformer.wte", "transformer.wpe"):
            parts = [state.get(f"{name}.bias") for name in ours]
            zeros = torch.zeros(weight.shape[0], dtype=weight.dtype)
            result[f"{theirs}.bias"] = torch.cat(parts) if bias else zeros
        result[f"{theirs}.weight"] = (weight.t() if _is_projection(theirs) else weight).contiguous()
    target = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **{theirs: config[ours] for theirs, ours in FIELDS.items() if config.get(ours) is not None},
        "n_inner": config.get("intermediate_size") or 4 * config["hidden_size"],
        "tie_word_embeddings": True,
        "nanogpt_bias": bias,
    }
    target.setdefault("activation_function", "gelu_new")
    target.setdefault("layer_norm_epsilon", 1e-5)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        target.setdefault(name, 0.0)
    return result, target


def ladder_names(layers: int, bias: bool) -> set[str]:
    """Every tensor of a ladder GPT-2 (its tied head left out)."""
    names = set()
    for theirs, ours in _modules(layers).items():
        for name in ours:
            names.add(f"{name}.weight")
            if bias and theirs not in ("transformer.wte", "transformer.wpe"):
                names.add(f"{name}.bias")
    return names
