"""Small models for the training tests."""

import torch

import kimi_hf


def tiny_config(**changes):
    """A K3-style text config with four layers, AttnRes, latent experts."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "mla_use_output_gate": True,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "linear_attn_config": {"num_heads": 2, "head_dim": 16, "gate_lower_bound": -5.0, "use_full_rank_gate": True},
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
    }
    return kimi_hf.KimiLinearConfig(**{**fields, **changes})


def tiny_model(seed: int = 0, **changes):
    torch.manual_seed(seed)
    return kimi_hf.KimiLinearForCausalLM(tiny_config(**changes))


def tokens(rows: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
