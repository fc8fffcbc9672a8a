"""Whole models side by side on the CPU: `python -m benchmarks.cpu`.

The same random Kimi-Linear model (8 layers, hidden 1024, 8 heads of 128, latent 512, 32 experts top-4 of 512,
vocabulary 8192) built with transformers' native class and with ours, from the same weights. Logits are compared first; then
the two run in turn. Floors: counted floating point operations over a matrix-product rate, or counted bytes over a read rate,
both measured in the same process. Peak memory is measured in a process of its own per variant (`--memory`).

Options: `--threads N`, `--only NAME,...`, `--rounds N`, `--budget SECONDS` a row, `--json FILE`, `--memory`, `--list`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig as NativeConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM as NativeModel

import kimi_hf
from benchmarks.timing import interleave, machine, report

LAYERS, HIDDEN, HEADS, DIM, EXPERTS, TOP_K, VOCAB = 8, 1024, 8, 128, 32, 4, 8192
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 4096,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 512,
    "rms_norm_eps": 1e-5,
}


def build_ours() -> kimi_hf.KimiLinearForCausalLM:
    torch.manual_seed(0)
    config = kimi_hf.KimiLinearConfig(
        num_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        num_shared_experts=1,
        first_k_dense_replace=1,
        linear_attn_config={"num_heads": HEADS, "head_dim": DIM, "short_conv_kernel_size": 4},
        **SIZES,
    )
    return kimi_hf.KimiLinearForCausalLM(config).eval()


def build_native(ours: kimi_hf.KimiLinearForCausalLM) -> NativeModel:
    """The native class with the weights of `ours`."""
    config = NativeConfig(
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        linear_head_dim=DIM,
        linear_num_heads=HEADS,
        layer_types=ours.config.layer_types,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SIZES,
    )
    config._attn_implementation = "sdpa"
    model = NativeModel(config).eval()
    state, convs = {}, {}
    for name, tensor in ours.state_dict().items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        for part in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        if "_conv1d" in name:
            stem, which = name.split("_conv1d")[0][:-1], name.split("_conv1d")[0][-1]
            convs.setdefault(stem, {})[which] = tensor
            continue
        state[name] = tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor
    for stem, parts in convs.items():
        state[f"{stem}conv1d.weight"] = torch.cat([parts[which] for which in "qkv"])
    model.load_state_dict(state)
    return model


def ids(length: int, batch: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def prefill(model, length: int) -> Callable[[], Tensor]:
    tokens = ids(length)

    @torch.no_grad()
    def run():
        return model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits

    return run


def decode(model, context: int) -> Callable[[], Tensor]:
    """One token after `context` tokens; the cache is filled once and grows by the tokens timed."""
    with torch.no_grad():
        cache = model(input_ids=ids(context), use_cache=True, logits_to_keep=1).past_key_values
    token = ids(1)

    @torch.no_grad()
    def run():
        return model(input_ids=token, past_key_values=cache, use_cache=True).logits

    return run


def train(model, length: int) -> Callable[[], Tensor]:
    tokens = ids(length)

    def run():
        model.train()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        model.eval()
        return loss.detach()

    return run


def moe(model, tokens: int, implementation: str) -> Callable[[], Tensor]:
    block = model.model.layers[1].block_sparse_moe
    torch.manual_seed(tokens)
    hidden = torch.randn(1, tokens, HIDDEN)

    @torch.no_grad()
    def run():
        model.set_experts_implementation(implementation)
        return block(hidden)

    return run


ROWS: dict[str, Callable[[kimi_hf.KimiLinearForCausalLM, NativeModel], dict[str, Callable[[], Tensor]]]] = {
    **{f"prefill_{t}": lambda o, n, t=t: {"ours": prefill(o, t), "native": prefill(n, t)} for t in (1024, 4096)},
    **{f"decode_{t}": lambda o, n, t=t: {"ours": decode(o, t), "native": decode(n, t)} for t in (128, 4096, 16384)},
    **{f"train_{t}": lambda o, n, t=t: {"ours": train(o, t), "native": train(n, t)} for t in (512, 1024)},
    **{
        f"moe_{t}": lambda o, n, t=t: {
            "ours": moe(o, t, "kimi"),
            **{
                name: moe(o, t, name)
                for name in ("eager", "batched_mm", "grouped_mm")
                if t <= 64 or name != "batched_mm"
            },
        }
        for t in (1, 64, 2048)
    },
    "bf16_prefill_1024": lambda o, n: {
        "ours": prefill(build_ours().to(torch.bfloat16), 1024),
        "ours in fp32": prefill(o, 1024),
    },
}


def matmul_rate() -> float:
    """Floating point operations a second of a large fp32 product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 4096)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2 * 1024 * 1024 * 4096 / (time.perf_counter() - start))
    return best


def forward_flops(length: int) -> float:
    """Matrix products of a forward over `length` tokens, logits of one position."""
    config = kimi_hf.census(build_config())
    weights = config.activated - VOCAB * HIDDEN
    kda_layers = LAYERS - LAYERS // 4
    recurrence = kda_layers * HEADS * (6 * DIM * DIM + 8 * 64 * DIM)
    attention = (LAYERS - kda_layers) * HEADS * (192 + 128) * length / 2 * 2
    return length * (2 * weights + recurrence + attention)


def build_config() -> kimi_hf.KimiLinearConfig:
    with torch.device("meta"):
        return build_ours().config


def check(row: str, variants: dict[str, Callable[[], Tensor]]) -> None:
    """Refuse to time variants that disagree."""
    if row.startswith("decode"):
        return  # running it moves the caches; prefill and the tests compare these
    results = {name: run().float() for name, run in variants.items()}
    tolerance = 0.5 if row.startswith("bf16") else 2e-3
    for name, value in results.items():
        distance = (value - results["ours"]).abs().max().item()
        if distance > tolerance:
            raise SystemExit(f"{row}: {name} differs from ours by {distance:.2e}; not timed")


def peak_memory(row: str, variant: str) -> float:
    """Peak resident gigabytes of a process that runs one variant once, beyond what it held before."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.cpu",
        "--one",
        f"{row}:{variant}",
        "--threads",
        str(torch.get_num_threads()),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return float(out.stdout.strip().splitlines()[-1])


def run_one(row: str, variant: str) -> None:
    ours = build_ours()
    native = build_native(ours) if variant == "native" else ours
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ROWS[row](ours, native)[variant]()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--json", help="append one JSON line a row to this file")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.list:
        print("\n".join(ROWS))
        return
    if args.one:
        return run_one(*args.one.split(":"))
    chosen = [name for name in args.only.split(",") if name] or list(ROWS)
    ours = build_ours()
    native = build_native(ours)
    print(json.dumps(machine()))
    for row in chosen:
        variants = ROWS[row](ours, native)
        check(row, variants)
        rate = matmul_rate()
        record = report(row, interleave(variants, rounds=args.rounds, budget=args.budget), "ours")
        record.update(machine=machine(), matmul_gflops=rate / 1e9)
        if row.startswith(("prefill", "train")):
            floor = forward_flops(int(row.split("_")[-1])) * (3 if row.startswith("train") else 1) / rate
            record["floor_seconds"] = floor
            print(f"  floor {floor * 1e3:.0f} ms at {rate / 1e9:.0f} GFLOP/s: ours is at "
                  f"{record['variants']['ours']['median'] / floor:.1f}x")  # fmt: skip
        if args.memory and row.startswith(("prefill", "train")):
            record["peak_gb"] = {name: peak_memory(row, name) for name in variants}
            print("  peak memory " + ", ".join(f"{name} {gb:.2f} GB" for name, gb in record["peak_gb"].items()))
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
