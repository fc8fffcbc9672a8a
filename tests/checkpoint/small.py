"""Models of a few thousand parameters, for tests that write or load one many times."""

import torch

import kimi_hf


def small_model(name: str, **changes):
    """A two-layer relative of a preset in bf16, one layer of each mixer, the second with experts."""
    torch.manual_seed(0)
    config = kimi_hf.preset(name).get_text_config()
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_experts": 4}
    for field, value in {**sizes, "moe_intermediate_size": 32, "num_experts_per_token": 2, **changes}.items():
        setattr(config, field, value)
    config.linear_attn_config |= {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16}
    if config.attn_res_block_size:
        config.attn_res_block_size, config.routed_expert_hidden_size = 1, 32
    return kimi_hf.KimiLinearForCausalLM(config).to(torch.bfloat16)
