"""Tiny ladder models: any combination of parts, a few milliseconds each."""

from typing import Any

import torch

from kimi_hf import LadderConfig, LadderForCausalLM

from ..contract.tiny import spread_weights

VOCAB = 61
MIXERS = (
    "softmax_attention",
    "linear_attention",
    "delta_net",
    "gated_delta_net",
    "kimi_delta_attention",
    "latent_attention",
)
FEED_FORWARDS = ("gelu_mlp", "swiglu", "situ_glu", "moe", "latent_moe")
RESIDUALS = ("sum", "block_attn_res", "full_attn_res")
POSITIONS = ("learned", "none")


def tiny_config(**changes: Any) -> LadderConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    sparse = {"moe", "latent_moe"} & set(_names(changes.get("feed_forward", "gelu_mlp")))
    if sparse:
        fields.update(num_experts=4, moe_intermediate_size=8)
    if changes.get("residual") == "block_attn_res":
        fields["attn_res_block_size"] = 1
    return LadderConfig(**{**fields, **changes})


def tiny_model(*, seed: int = 0, **changes: Any) -> LadderForCausalLM:
    """A model with spread weights in eval mode."""
    model = LadderForCausalLM(tiny_config(**changes)).eval()
    spread_weights(model, seed)
    return model


def tokens(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def _names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
