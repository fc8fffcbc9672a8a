"""Router load with and without balancing, from a router skewed on purpose: a plot and its numbers.

`python -m benchmarks.router_balance [--steps 200] [--out benchmarks/results]`
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch

import kimi_hf
from kimi_hf.training import RouterBalanceCallback, parameter_groups

ROWS, LENGTH = 16, 128
KEY = "router/worst_load_max_over_mean"


def skewed_model(seed: int = 0) -> kimi_hf.KimiLinearForCausalLM:
    """A small K3-style decoder in which two of sixteen experts win nearly every token."""
    torch.manual_seed(seed)
    config = kimi_hf.preset("kimi-k3-tiny").get_text_config()
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_experts": 16}
    for name, value in {**sizes, "num_experts_per_token": 2, "routed_expert_hidden_size": 32}.items():
        setattr(config, name, value)
    config.moe_intermediate_size = 32
    config.linear_attn_config |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 16}
    model = kimi_hf.KimiLinearForCausalLM(config)
    for layer in model.model.layers[config.first_k_dense_replace :]:
        layer.block_sparse_moe.gate.e_score_correction_bias[:2] = 2.0
    return model.train()


def read_sources(limit: int = 2_000_000) -> torch.Tensor:
    """Python files of the standard library as one row of byte ids."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
    return torch.tensor(list(text[:limit])) + 4


def run(rule: str | None, steps: int, seed: int = 0) -> list[float]:
    """max/mean load of the worst layer at every step of training on the standard library's sources."""
    model = skewed_model(seed)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
    rates = {"sign": 0.02}
    callback = RouterBalanceCallback(rule or "quantile", rate=rates.get(rule), update=rule is not None)
    callback.attach(model)
    generator = torch.Generator().manual_seed(seed)
    data, loads = read_sources(), []
    for _ in range(steps):
        start = torch.randint(len(data) - LENGTH, (ROWS, 1), generator=generator)
        ids = data[start + torch.arange(LENGTH)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loads.append(callback.step()[KEY])
    callback.detach()
    return loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    names = {"quantile": "quantile", "sign, rate 0.02": "sign", "none": None}
    loads = {name: run(rule, args.steps) for name, rule in names.items()}
    for name, series in loads.items():
        below = next((i + 1 for i in range(len(series)) if max(series[i:]) < 1.2), None)
        tail = series[-20:]
        print(
            f"{name:18} first {series[0]:.2f}, mean of the last 20 {sum(tail) / len(tail):.2f}, below 1.2 for good from {below}"
        )
    args.out.mkdir(exist_ok=True)
    report = {"seed": 0, "steps": args.steps, "experts": 16, "active": 2, "tokens_a_step": ROWS * LENGTH, KEY: loads}
    (args.out / "router_balance.json").write_text(json.dumps(report))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5))
    for name, series in loads.items():
        axes.plot(range(1, len(series) + 1), series, label=f"balance: {name}")
    axes.axhline(1.2, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="optimiser step", ylabel="max / mean load, worst layer", ylim=(0.9, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.out / "router_balance.png", dpi=110)


if __name__ == "__main__":
    main()
