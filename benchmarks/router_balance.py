"""Router load with and without balancing, from a router skewed on purpose: a plot, a table and their numbers.

`python -m benchmarks.router_balance [--steps 200] [--lr 1e-3] [--seed 0] [--out benchmarks/results]`; with `--lr 0` the
scores stand still, and what is left is the noise of a batch.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kimi_hf
from kimi_hf.training import RouterBalanceCallback, parameter_groups

ROWS, LENGTH, HELD_OUT_ROWS = 64, 128, 256
BLOCK, EVERY_BLOCK = 512, 10  # every tenth block of the text is held out: other text, from the same files
WARM_UP, EVERY = 20, 10
BATCH, HELD_OUT = "one batch", "held out"
RULES: dict[str, dict[str, Any]] = {
    "quantile": {"rule": "quantile"},
    "quantile-middle": {"rule": "quantile-middle"},
    "sign, rate 0.02": {"rule": "sign", "rate": 0.02},
    "none": {"update": False},
}


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
    for router in routers(model):
        router.e_score_correction_bias[:2] = 2.0
    return model.train()


def routers(model: kimi_hf.KimiLinearForCausalLM) -> list[torch.nn.Module]:
    return [layer.block_sparse_moe.gate for layer in model.model.layers if hasattr(layer, "block_sparse_moe")]


def read_sources(limit: int = 2_000_000) -> Tensor:
    """Python files of the standard library as one row of byte ids."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
    return torch.tensor(list(text[:limit])) + 4


def split(data: Tensor) -> tuple[Tensor, Tensor]:
    """Text to train on, and every tenth block of it, held out."""
    blocks = data[: len(data) // BLOCK * BLOCK].view(-1, BLOCK)
    held_out = torch.arange(len(blocks)) % EVERY_BLOCK == 0
    return blocks[~held_out].flatten(), blocks[held_out].flatten()


def windows(data: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """(rows, LENGTH) ids from random places."""
    return data[torch.randint(len(data) - LENGTH, (rows, 1), generator=generator) + torch.arange(LENGTH)]


@torch.no_grad()
def worst_load(model: kimi_hf.KimiLinearForCausalLM, ids: Tensor) -> float:
    """max/mean load over all tokens of `ids`, of the worst layer, with the model as it stands."""
    loads = [torch.zeros(router.weight.shape[0], dtype=torch.long) for router in routers(model)]

    def count(load: Tensor):
        def hook(module: torch.nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
            load.add_(torch.bincount(output[2].flatten(), minlength=len(load)))

        return hook

    handles = [r.register_forward_hook(count(load)) for r, load in zip(routers(model), loads, strict=True)]
    model.eval()  # the callback watches in training mode only
    for part in ids.split(64):
        model(input_ids=part)
    model.train()
    for handle in handles:
        handle.remove()
    return max(float(load.max() / load.double().mean()) for load in loads)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to zero, as a share of the peak."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def run(rule: dict[str, Any], steps: int, lr: float, seed: int) -> dict[str, Any]:
    """max/mean load of the worst layer, every step over the batch, every tenth over held-out text."""
    model, started = skewed_model(seed), time.perf_counter()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    callback = RouterBalanceCallback(**rule)
    callback.attach(model)
    train, rest = split(read_sources())
    generator = torch.Generator().manual_seed(seed)
    held_out = windows(rest, HELD_OUT_ROWS, torch.Generator().manual_seed(seed))
    result: dict[str, Any] = {BATCH: [], HELD_OUT: {"0": worst_load(model, held_out)}}
    for step in range(steps):
        ids = windows(train, ROWS, generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        result[BATCH].append(callback.step()["router/worst_load_max_over_mean"])
        if (step + 1) % EVERY == 0:
            result[HELD_OUT][str(step + 1)] = worst_load(model, held_out)
    callback.detach()
    return {**result, "loss": loss.item(), "seconds": time.perf_counter() - started}


def table(results: dict[str, dict[str, Any]], limit: float = 1.2) -> str:
    """Markdown: where every rule started and ended, and when it got below `limit` to stay."""
    lines = [
        f"| balance | first batch | last held out | last 20 batches, mean | held out below {limit} for good from step | loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        held = [(int(step), load) for step, load in result[HELD_OUT].items()]
        below = next((step for i, (step, _) in enumerate(held) if max(load for _, load in held[i:]) < limit), "never")
        tail = result[BATCH][-20:]
        cells = [f"{result[BATCH][0]:.2f}", f"{held[-1][1]:.2f}", f"{sum(tail) / len(tail):.2f}", str(below)]
        lines.append(f"| {name} | {' | '.join(cells)} | {result['loss']:.3f} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4))
    for index, (name, result) in enumerate(results.items()):
        axes.plot(range(1, len(result[BATCH]) + 1), result[BATCH], color=f"C{index}", alpha=0.35, linewidth=0.8)
        steps = [int(step) for step in result[HELD_OUT]]
        axes.plot(steps, result[HELD_OUT].values(), color=f"C{index}", label=f"balance: {name}")
    axes.axhline(1.2, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="optimiser step", ylabel="max / mean load, worst layer", yscale="log")
    axes.set_yticks([1, 1.2, 1.5, 2, 3, 4, 6, 8], labels=["1", "1.2", "1.5", "2", "3", "4", "6", "8"], minor=False)
    axes.legend(title="thick: held-out text, thin: one batch", fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.93))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    results = {}
    for name, rule in RULES.items():
        results[name] = run(rule, args.steps, args.lr, args.seed)
        print(table({name: results[name]}).splitlines()[-1], flush=True)
    args.out.mkdir(exist_ok=True, parents=True)
    setting = {"seed": args.seed, "steps": args.steps, "lr": args.lr, "experts": 16, "active": 2}
    setting |= {"tokens_a_step": ROWS * LENGTH, "held_out_tokens": HELD_OUT_ROWS * LENGTH}
    (args.out / "router_balance.json").write_text(json.dumps({**setting, "runs": results}))
    (args.out / "router_balance.md").write_text(f"{table(results)}\n\n{json.dumps(setting)}\n")
    plot(results, args.out / "router_balance.png")


if __name__ == "__main__":
    main()
