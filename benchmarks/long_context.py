"""A million tokens through a small hybrid model, and time and memory over length beside other models.

    python -m benchmarks.long_context                   # everything; writes results/long_context.json and .png
    python -m benchmarks.long_context --tokens 100000   # a shorter text
    python -m benchmarks.long_context --only curves

Stream: the text goes through the model in chunks with one cache, in fp32 and in bf16. Noted on the way: CPU seconds
inside KDA layers and inside the latent-attention layer, norms of the recurrent states, cache bytes beside those the
census predicts, and whether the last token finds what was planted near the beginning.

Curves: prefill, decode and peak memory at moderate lengths for this package's Kimi-Linear, transformers' own, and
transformers' GPT-2, of equal widths, one process each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.long_context_model import answer, build, text
from benchmarks.timing import machine
from kimi_hf import KimiCache, KimiLinearConfig, KimiLinearForCausalLM, census
from kimi_hf.modeling.mixers import KimiDeltaAttention, MultiHeadLatentAttention
from kimi_hf.modeling.token_store import capacity

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLANTED_AT, VALUE = 1_000, 5
LENGTHS = (512, 1024, 2048, 4096, 8192)
NEW = 16


def clock_mixers(model) -> dict[str, float]:
    """CPU seconds spent inside each kind of mixer, counted by hooks while the model runs."""
    spent = {"kda": 0.0, "latent_attention": 0.0}
    names = {KimiDeltaAttention: "kda", MultiHeadLatentAttention: "latent_attention"}

    def start(module, *_):
        module.started = time.process_time()

    def stop(module, *_):
        spent[names[type(module)]] += time.process_time() - module.started

    for module in model.modules():
        if type(module) in names:
            module.register_forward_pre_hook(start)
            module.register_forward_hook(stop)
    return spent


def predicted_bytes(config: KimiLinearConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of a cache of `tokens` tokens, counted from the configuration. The census counts activations in 2 bytes."""
    counted, scale = census(config), torch.finfo(dtype).bits // 16
    growing = counted.cache_bytes_per_token * capacity(tokens)
    return (growing + counted.conv_state_bytes) * scale + counted.state_bytes


@torch.no_grad()
def stream(name: str, tokens: int, chunk: int) -> dict[str, Any]:
    """Run the text through the model in one dtype; one point per 1/50 of the way."""
    torch.set_num_threads(1)
    dtype = DTYPES[name]
    model, ids = build(dtype), text(tokens, PLANTED_AT, VALUE)
    cache, spent, points = KimiCache(model.config), clock_mixers(model), []
    every = max(1, tokens // chunk // 50)
    begun = time.process_time()
    for i, piece in enumerate(ids.split(chunk, dim=1)):
        logits = model(piece, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
        if i % every == 0 or cache.length == tokens:
            states = [layer.recurrent_states[0] for layer in cache.layers[:3]]
            total, predicted = cache.memory_report()["total"], predicted_bytes(model.config, cache.length, dtype)
            points.append(
                {
                    "tokens": cache.length,
                    "cpu_seconds": time.process_time() - begun,
                    "kda_cpu_seconds": spent["kda"],
                    "latent_attention_cpu_seconds": spent["latent_attention"],
                    "state_norms": [float(x.norm()) for x in states],
                    "states_finite": all(bool(torch.isfinite(x).all()) for x in states),
                    "cache_bytes": total,
                    "predicted_bytes": predicted,
                }
            )
    return {
        "dtype": name,
        "tokens": tokens,
        "chunk": chunk,
        "planted_at": PLANTED_AT,
        "recalled": answer(logits) == VALUE,
        "answer_logits": logits[8:16].tolist(),
        "states_finite": all(point["states_finite"] for point in points),
        "largest_state_norm": max(max(point["state_norms"]) for point in points),
        "cache_bytes_as_predicted": all(point["cache_bytes"] == point["predicted_bytes"] for point in points),
        "kda_linear_fit": linear_fit(points),
        "peak_resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "points": points,
    }


def linear_fit(points: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds a token of all KDA layers by least squares, and how much of the variance a line explains."""
    x = torch.tensor([point["tokens"] for point in points], dtype=torch.float64)
    y = torch.tensor([point["kda_cpu_seconds"] for point in points], dtype=torch.float64)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum().clamp(min=1e-12)
    rest = y - y.mean() - slope * (x - x.mean())
    explained = 1 - rest.square().sum() / (y - y.mean()).square().sum().clamp(min=1e-12)
    return {"us_per_token": float(slope * 1e6), "r_squared": float(explained)}


def _kimi_config(cls, **changes):
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "pad_token_id": None,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    }
    return cls(**{**fields, **changes})


def curve_models() -> dict[str, Any]:
    """Name -> a function that builds the model; all have four layers of width 128 and dense feed-forwards."""

    def ours():
        return KimiLinearForCausalLM._from_config(_kimi_config(KimiLinearConfig, num_experts=None))

    def native():
        from transformers.models.kimi_linear import KimiLinearConfig as Config
        from transformers.models.kimi_linear import KimiLinearForCausalLM as Model

        # It has no model without experts: all its layers are made dense instead.
        config = _kimi_config(
            Config, num_experts=8, num_experts_per_token=2, moe_intermediate_size=64, mlp_layer_types=["dense"] * 4
        )
        return Model._from_config(config)

    def gpt2():
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=512, n_embd=128, n_layer=4, n_head=4, n_positions=max(LENGTHS) + NEW)
        return GPT2LMHeadModel._from_config(config)

    return {"kimi_hf kimi_linear": ours, "transformers kimi_linear": native, "transformers gpt2": gpt2}


@torch.no_grad()
def measure(name: str, length: int) -> dict[str, Any]:
    """One model at one length, in this process: CPU seconds of prefill and of a decode step, peak memory, cache bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = curve_models()[name]().eval()
    ids = torch.randint(0, 512, (1, length + NEW))
    model(ids[:, :128], use_cache=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    cache = model(ids[:, :length], use_cache=True, logits_to_keep=1).past_key_values
    prefill = time.process_time() - start
    start = time.process_time()
    for i in range(NEW):
        model(ids[:, length + i : length + i + 1], past_key_values=cache)
    decode = (time.process_time() - start) / NEW
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "model": name,
        "length": length,
        "prefill_cpu_seconds": prefill,
        "decode_cpu_ms_per_token": decode * 1e3,
        "peak_mib": peak / 1024,
        "cache_bytes": cache_bytes(cache),
    }


def cache_bytes(cache) -> int:
    """Bytes of all tensors that any kind of cache holds, without spare room."""
    total = 0
    for layer in cache.layers:
        for x in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            total += 0 if x is None else x.numel() * x.element_size()
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            total += sum(x.numel() * x.element_size() for x in states.values() if x is not None)
    return total


def draw(report: dict[str, Any], path: Path) -> None:
    """Time, memory and norms over length, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 8.5))
    (kda, softmax, norms), (prefill, peak, held) = axes
    for run in report.get("stream", []):
        points, label = run["points"], run["dtype"]
        x = [point["tokens"] / 1e6 for point in points]
        kda.plot(x, [point["kda_cpu_seconds"] for point in points], label=label)
        softmax.plot(x, [point["latent_attention_cpu_seconds"] for point in points], label=label)
        dashes = "-" if label == "float32" else ":"
        for layer in range(3):
            norm = [point["state_norms"][layer] for point in points]
            norms.plot(x, norm, dashes, label=f"{label}, layer {layer}")
    for axis, title in ((kda, "KDA layers: CPU seconds so far"), (softmax, "latent attention: CPU seconds so far")):
        axis.set(title=title, xlabel="million tokens")
    norms.set(title="norms of the KDA states", xlabel="million tokens", ylim=(0, None))
    for name in curve_models():
        rows = [row for row in report.get("curves", []) if row["model"] == name]
        x = [row["length"] for row in rows]
        prefill.loglog(x, [row["prefill_cpu_seconds"] for row in rows], marker="o", label=name)
        peak.loglog(x, [max(row["peak_mib"], 0.1) for row in rows], marker="o", label=name)
        held.loglog(x, [row["cache_bytes"] / 2**20 for row in rows], marker="o", label=name)
    for axis, title in ((prefill, "prefill: CPU seconds"), (peak, "peak memory: MiB"), (held, "cache: MiB")):
        axis.set(title=title, xlabel="tokens")
        axis.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
        axis.minorticks_off()
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--only", choices=("stream", "curves"), help="leave the other part as it is in the results")
    parser.add_argument("--out", type=Path, default=RESULTS / "long_context.json")
    args = parser.parse_args()
    report = json.loads(args.out.read_text()) if args.only and args.out.exists() else {}
    os.environ["OMP_NUM_THREADS"] = "1"
    # Every measurement in a process of its own: peak memory is a property of a process.
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        if args.only != "curves":
            jobs = [(name, args.tokens, args.chunk) for name in DTYPES]
            report["stream"] = pool.starmap(stream, jobs, chunksize=1)
        if args.only != "stream":
            jobs = [(name, length) for name in curve_models() for length in LENGTHS]
            report["curves"] = pool.starmap(measure, jobs, chunksize=1)
    report["machine"] = machine()
    report["about"] = "CPU seconds of one thread; the machine was shared, two processes ran side by side"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, args.out.with_suffix(".png"))
    for run in report.get("stream", []):
        last, fit = run["points"][-1], run["kda_linear_fit"]
        print(
            f"{run['dtype']}: {run['tokens']:,} tokens, {last['cpu_seconds']:.0f} CPU s (KDA {last['kda_cpu_seconds']:.0f}, "
            f"{fit['us_per_token']:.1f} us a token, R2 {fit['r_squared']:.6f}); cache {last['cache_bytes']:,} bytes, as "
            f"predicted: {run['cache_bytes_as_predicted']}; states finite: {run['states_finite']}, largest norm "
            f"{run['largest_state_norm']:.2f}; recalled: {run['recalled']}"
        )
    for row in report.get("curves", []):
        print(
            f"{row['model']:26s} {row['length']:6d} tokens: prefill {row['prefill_cpu_seconds']:8.3f} s, decode "
            f"{row['decode_cpu_ms_per_token']:7.2f} ms, peak {row['peak_mib']:8.1f} MiB, cache {row['cache_bytes']:,} bytes"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
