"""Pre-train a small K3-style model from nothing on this machine, and see whether it was worth the trouble.

    python examples/pretrain_small.py                  # about ten minutes of one core a model
    python examples/pretrain_small.py --smoke          # seconds: does it run?

A decoder with everything Kimi K3 has (KDA and latent attention, attention over depth, 48 latent experts of which a byte
uses 4, balanced without an auxiliary loss) learns the sources of Python's standard library, byte by byte. Beside it learns
the GPT-2 rung of the ladder: same width, depth, optimiser and number of parameters that a byte uses. GPT-2's learning
rate is the best of five (0.0005 to 0.004), its initial spread the better of two; K3's are the first that were tried. GPT-2
runs twice, once over the same bytes and once for the same computing time. Both are told.

`--minutes` sets the number of steps, at a rate measured once; the clock is only reported, so that a slow machine gives the
same curves. Written are OUT/pretrain_small.jsonl (every logged step), .md (the table) and .png.
"""

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from kimi_hf import KimiLinearConfig, KimiLinearForCausalLM, LadderConfig, LadderForCausalLM, census
from kimi_hf.lab.tasks import Text
from kimi_hf.training import RouterBalanceCallback, parameter_groups

ROWS, LENGTH = 8, 256
STEPS_A_MINUTE = 60  # of the K3-style model, on one core of the machine this was written on
WIDTH, LAYERS, HEADS = 192, 6, 3
K3, SAME_BYTES, SAME_TIME = "Kimi K3 style", "GPT-2, same bytes", "GPT-2, same time"


@dataclass(frozen=True)
class Plan:
    """One run: which model, how long, how fast."""

    name: str
    steps: int
    rate: float
    seed: int
    evaluation_rows: int = 128
    text_bytes: int = 8_000_000


def k3_model(seed: int) -> KimiLinearForCausalLM:
    """10.9 million parameters, of which a byte uses 2.8 million: K3's parts at a fortieth of its width."""
    torch.manual_seed(seed)
    config = KimiLinearConfig(
        vocab_size=Text.vocab,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        linear_attn_config={
            "num_heads": HEADS,
            "head_dim": 64,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 3, 5],
            "full_attn_layers": [4, 6],
        },
        num_attention_heads=HEADS,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        mla_use_output_gate=True,
        attn_res_block_size=3,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        first_k_dense_replace=1,
        intermediate_size=2 * WIDTH,
        num_experts=48,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=128,
        routed_expert_hidden_size=WIDTH // 2,
        latent_moe_use_norm=True,
        rms_norm_eps=1e-5,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return KimiLinearForCausalLM(config)


def gpt2_model(seed: int) -> LadderForCausalLM:
    """2.8 million parameters, all of them used: GPT-2's layers at the same width and depth."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    no_ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    fields = {"vocab_size": Text.vocab, "max_position_embeddings": LENGTH, "initializer_range": 0.036}
    return LadderForCausalLM(LadderConfig.rung("gpt2-tiny", **fields, **sizes, **no_ids))


class Windows(Dataset):
    """`count` windows of text from random places; or, of held-out text, evenly spaced."""

    def __init__(self, text: Text, count: int, seed: int | None):
        if seed is None:
            self.rows = text.test(count, LENGTH)
        else:
            self.rows = text.batch(count, LENGTH, torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(plan: Plan) -> dict[str, Any]:
    """Train one model with transformers' Trainer; its log, its size and what it took."""
    torch.set_num_threads(1)
    model = k3_model(plan.seed) if plan.name == K3 else gpt2_model(plan.seed)
    text, counted = Text(plan.text_bytes), census(model.config)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=plan.rate, betas=(0.9, 0.95))
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            scratch,
            max_steps=plan.steps,
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS,
            learning_rate=plan.rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, plan.steps // 10),
            max_grad_norm=1.0,
            logging_steps=max(1, plan.steps // 60),
            eval_strategy="steps",
            eval_steps=max(1, plan.steps // 10),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=plan.seed,
        )
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=Windows(text, plan.steps * ROWS, plan.seed),
            eval_dataset=Windows(text, plan.evaluation_rows, None),
            optimizers=(optimizer, None),
            callbacks=[RouterBalanceCallback("quantile-middle")] if plan.name == K3 else [],
        )
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        final = trainer.evaluate()["eval_loss"]
    return {
        **asdict(plan),
        "parameters": counted.total,
        "activated": counted.activated,
        "bytes": plan.steps * ROWS * LENGTH,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "held_out_loss": final,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry],
    }


def seconds_a_step(model: torch.nn.Module) -> float:
    """Processor time of a training step, the least of three."""
    torch.set_num_threads(1)
    ids, times = torch.randint(Text.vocab, (ROWS, LENGTH)), []
    for _ in range(4):
        started = time.process_time()
        model(input_ids=ids, labels=ids).loss.backward()
        times.append(time.process_time() - started)
    return min(times[1:])


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| model | seed | parameters | used by a byte | bytes seen | lr | processor s | wall s | held-out loss, nats a byte |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        numbers = [f"{run[key]:,}" for key in ("parameters", "activated", "bytes")]
        cells = [run["name"], str(run["seed"]), *numbers, f"{run['rate']:g}", f"{run['cpu_seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} | {run['wall_seconds']:.0f} | {run['held_out_loss']:.3f} |")
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Losses over bytes and over processor time; below them the load of the busiest expert."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (over_bytes, over_time, load) = plt.subplots(1, 3, figsize=(15, 4))
    for run in runs:
        held = [(e["step"], e["eval_loss"]) for e in run["log"] if "eval_loss" in e]
        color, label = f"C{[K3, SAME_BYTES, SAME_TIME].index(run['name'])}", f"{run['name']}, seed {run['seed']}"
        for axes, scale in ((over_bytes, ROWS * LENGTH / 1e6), (over_time, run["cpu_seconds"] / run["steps"] / 60)):
            axes.plot([s * scale for s, _ in held], [loss for _, loss in held], "o-", color=color, label=label, ms=3)
        logged = [e for e in run["log"] if "router/load_max_over_mean" in e]
        for key, style in (("load_max_over_mean", "-"), ("worst_load_max_over_mean", ":")):
            if logged:
                values = [e[f"router/{key}"] for e in logged]
                load.plot([e["step"] for e in logged], values, style, color=color, label=f"{key}, seed {run['seed']}")
    over_bytes.set(xlabel="million bytes seen", ylabel="held-out loss, nats a byte")
    over_time.set(xlabel="minutes of one core")
    load.set(xlabel="step", ylabel="max / mean load of a batch", ylim=(0.9, 8))
    for axes in (over_bytes, over_time, load):
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def plans(args: argparse.Namespace) -> list[Plan]:
    """K3 style, GPT-2 over as many bytes, GPT-2 for as long: how much faster it is, is measured first."""
    if args.smoke:
        steps, faster, small = 2, 1.5, {"evaluation_rows": 2, "text_bytes": 100_000}
    else:
        steps, small = max(10, round(args.minutes * STEPS_A_MINUTE)), {}
        faster = seconds_a_step(k3_model(0)) / seconds_a_step(gpt2_model(0))
    lengths = ((K3, steps, args.k3_rate), (SAME_BYTES, steps, args.gpt2_rate))
    lengths += ((SAME_TIME, round(steps * faster), args.gpt2_rate),)
    return [Plan(name, length, rate, seed, **small) for seed in args.seed for name, length, rate in lengths]


def write(runs: list[dict[str, Any]], folder: Path) -> None:
    """The log of every run behind a line that describes it, the table and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for run in runs:
        lines.append({name: value for name, value in run.items() if name != "log"})
        lines += [{"name": run["name"], "seed": run["seed"], **entry} for entry in run["log"]]
    (folder / "pretrain_small.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "pretrain_small.md").write_text(table(runs) + "\n")
    plot(runs, folder / "pretrain_small.png")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="of one core, for the K3-style model")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or several")
    parser.add_argument("--k3-rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--gpt2-rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--jobs", type=int, default=2, help="models that train at the same time, a thread each")
    parser.add_argument("--smoke", action="store_true", help="two steps of everything")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.smoke or args.jobs == 1:
        runs = [train(plan) for plan in plans(args)]
    else:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            runs = list(pool.map(train, plans(args)))
    write(runs, args.out)
    print(table(runs))


if __name__ == "__main__":
    main()
