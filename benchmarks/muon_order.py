"""How far two orders of summation drift apart: a batch at once and in two halves, with AdamW and with Muon, one process.

`python -m benchmarks.muon_order`
"""

import torch

import kimi_hf
from kimi_hf.training import MuonWithAdamW, parameter_groups

STEPS, RATE = 3, 1e-2


def small_model() -> kimi_hf.KimiLinearForCausalLM:
    """K3's parts at a width of 32, as in the tests."""
    torch.manual_seed(0)
    config = kimi_hf.preset("kimi-k3-tiny").get_text_config()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_experts": 8}
    ranks = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "attn_res_block_size": 2}
    experts = {"num_experts_per_token": 2, "moe_intermediate_size": 64, "routed_expert_hidden_size": 32}
    for name, value in {**sizes, **ranks, **heads, **experts}.items():
        setattr(config, name, value)
    config.linear_attn_config |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 16}
    return kimi_hf.KimiLinearForCausalLM(config).train()


def trained(optimizer: str, halves: int, steps: int) -> dict[str, torch.Tensor]:
    """Parameters after `steps` steps over the same ids, their gradients added up from `halves` parts."""
    model = small_model()
    if optimizer == "muon":
        stepper: torch.optim.Optimizer = MuonWithAdamW(model, lr=RATE)
    else:
        stepper = torch.optim.AdamW(parameter_groups(model), lr=RATE)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(4, model.config.vocab_size, (4, 12), generator=generator)
        for part in ids.chunk(halves):
            loss = model(input_ids=part, labels=part, num_items_in_batch=ids[:, 1:].numel()).loss
            loss.backward()
        stepper.step()
        stepper.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def main() -> None:
    for optimizer in ("adamw", "muon"):
        for steps in range(1, STEPS + 1):
            whole, parts = trained(optimizer, 1, steps), trained(optimizer, 2, steps)
            name = max(whole, key=lambda key: (whole[key] - parts[key]).abs().max())
            print(f"{optimizer:6} {steps} step(s): {(whole[name] - parts[name]).abs().max():.1e}, in {name}")


if __name__ == "__main__":
    main()
