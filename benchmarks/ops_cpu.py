"""Recurrent operations on CPU against their peers: `python -m benchmarks.ops_cpu`.

Peers: our own token-by-token reference, and the plain PyTorch paths of transformers' native Kimi Linear (chunked and
recurrent); fla's plain recurrence where fla is installed. Each row first checks that the variants agree, then times them
in turn (CPU time with one thread, wall time with more), counts the floating point operations the chunked algebra needs,
and divides by a matrix product rate measured beside it: the floor. `--memory` adds the peak extra memory of each
variant, measured in a process of its own.

Options: `--threads N`, `--only NAME,...` (`--list` shows them), `--rounds N`, `--budget SECONDS` a row, `--json FILE`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import interleave, machine, report
from kimi_hf.ops.delta_rule import delta_rule
from kimi_hf.ops.delta_rule.tiles import LONGEST_CHUNK
from kimi_hf.ops.dispatch import importable
from kimi_hf.ops.gated_norm import gated_norm
from kimi_hf.ops.kda import kda, kda_log_decay, l2_normalize
from kimi_hf.ops.linear_attention import linear_attention
from kimi_hf.ops.short_conv import short_conv

HEADS, DIM = 16, 128
Variant = Callable[..., tuple[Tensor, ...]]


def kda_inputs(T: int, heads: int = HEADS, batch: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    inputs = {name: torch.randn(batch, T, heads, DIM) for name in ("q", "k", "v", "g")}
    return inputs | {
        "beta": torch.randn(batch, T, heads),
        "A_log": torch.rand(heads),
        "dt_bias": torch.randn(heads * DIM) - 2,
    }


def ours(backend: str, bound: float | None) -> Variant:
    def run(q, k, v, g, beta, A_log, dt_bias):
        return kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=bound, backend=backend)[:1]

    return run


def native(name: str, bound: float | None) -> Variant:
    """transformers' fallback `name`, from the same raw inputs."""
    from transformers.models.kimi_linear import modeling_kimi_linear

    function = getattr(modeling_kimi_linear, name)
    function = getattr(function, "__wrapped__", function)

    def run(q, k, v, g, beta, A_log, dt_bias):
        log_decay = kda_log_decay(g, A_log, dt_bias, bound)
        state = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}
        return function(q, k, v, log_decay, torch.sigmoid(beta), **state)[:1]

    return run


def fla_recurrence(bound: float | None) -> Variant:
    from fla.ops.kda.naive import naive_recurrent_kda

    def run(q, k, v, g, beta, A_log, dt_bias):
        normalize = torch.nn.functional.normalize
        log_decay = kda_log_decay(g, A_log, dt_bias, bound)
        return naive_recurrent_kda(normalize(q, dim=-1), normalize(k, dim=-1), v, log_decay, torch.sigmoid(beta))[:1]

    return run


def kda_variants(bound: float | None) -> dict[str, Callable[[], Variant]]:
    variants = {
        "eager": lambda: ours("eager", bound),
        "reference": lambda: ours("reference", bound),
        "transformers chunked": lambda: native("chunk_kimi_delta_attention", bound),
        "transformers recurrent": lambda: native("recurrent_kimi_delta_attention", bound),
    }
    if importable("fla"):
        variants["fla recurrence"] = lambda: fla_recurrence(bound)
    return variants


def kda_flops(T: int, heads: int = HEADS, chunk: int = LONGEST_CHUNK, backward: bool = False) -> float:
    """Multiply-adds of the chunked algebra, times two; triangles counted as triangles, elementwise work not at all.

    Forward per token and head: products M and N (each half of 2 C K), the solve C V, N d C V, and three products with
    the state 2 K V each. Backward once more with every product's two transposes; recomputation is not counted.
    """
    state = 3 * 2 * DIM * DIM
    inside = 2 * chunk * DIM + 2 * chunk * DIM
    return (state + inside) * T * heads * (3 if backward else 1)


class Row:
    """Variants of one piece of work: `build()` gives closures, all returning the same tensors."""

    def __init__(self, name: str, make: Callable[[], dict[str, Callable[[], object]]], flops: float = 0.0):
        self.name, self.make, self.flops = name, make, flops


def kda_row(T: int, bound: float | None, backward: bool, skip: tuple[str, ...] = (), heads: int = HEADS) -> Row:
    gate = "bounded" if bound is not None else "softplus"
    work = "forward + backward" if backward else "forward"

    def make():
        inputs = list(kda_inputs(T, heads).values())
        cotangent = torch.randn_like(inputs[2])
        closures = {}
        for name, build in kda_variants(bound).items():
            if name in skip:
                continue
            function = build()

            def run(function=function):
                if not backward:
                    with torch.no_grad():
                        return function(*inputs)
                leaves = [x.detach().requires_grad_() for x in inputs]
                (o,) = function(*leaves)
                return torch.autograd.grad(o, leaves, cotangent)

            closures[name] = run
        return closures

    return Row(f"kda {work}, T {T}, {heads} heads, {gate}", make, kda_flops(T, heads, backward=backward))


def delta_row(T: int, backward: bool) -> Row:
    """Gated DeltaNet against the plain PyTorch path of transformers' Qwen3-Next."""

    def make():
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, T, HEADS, DIM) for _ in range(3))
        beta, g = torch.rand(1, T, HEADS), -torch.rand(1, T, HEADS)
        inputs = [q, l2_normalize(k), v, beta, g]

        def ours(backend):
            return lambda q, k, v, beta, g: delta_rule(l2_normalize(q), k, v, beta, g=g, backend=backend)[0]

        def transformers(q, k, v, beta, g):
            from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

            return torch_chunk_gated_delta_rule(l2_normalize(q), k, v, g, beta, output_final_state=False)[0]

        def run(function):
            if not backward:
                with torch.no_grad():
                    return (function(*inputs),)
            leaves = [x.detach().requires_grad_() for x in inputs]
            return torch.autograd.grad(function(*leaves).sum(), leaves)

        return {
            "eager": lambda: run(ours("eager")),
            "reference": lambda: run(ours("reference")),
            "transformers chunked": lambda: run(transformers),
        }

    return Row(f"gated delta rule, T {T}, {'forward + backward' if backward else 'forward'}", make)


def linear_row(T: int) -> Row:
    def make():
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, T, HEADS, DIM) for _ in range(3))

        def run(backend):
            with torch.no_grad():
                return linear_attention(q, k, v, backend=backend)[:1]

        return {"eager": lambda: run("eager"), "reference": lambda: run("reference")}

    return Row(f"linear attention, T {T}, forward", make)


def decode_row(batch: int, heads: int) -> Row:
    """One token: state read and written once."""

    def make():
        x = kda_inputs(1, heads, batch)
        state = torch.randn(batch, heads, DIM, DIM)
        from transformers.models.kimi_linear import modeling_kimi_linear

        recurrent = modeling_kimi_linear.recurrent_kimi_delta_attention

        @torch.no_grad()
        def eager():
            return kda(**x, initial_state=state, inplace_state=True)[:1]

        @torch.no_grad()
        def reference():
            return kda(**x, initial_state=state, inplace_state=True, backend="reference")[:1]

        @torch.no_grad()
        def transformers():
            decay = kda_log_decay(x["g"], x["A_log"], x["dt_bias"])
            o, new = recurrent(x["q"], x["k"], x["v"], decay, torch.sigmoid(x["beta"]), state, True, True)
            state.copy_(new)
            return (o,)

        def copy():
            return state.mul_(1.0)

        return {"eager": eager, "reference": reference, "transformers recurrent": transformers, "one pass": copy}

    return Row(f"kda decode, batch {batch}, {heads} heads", make)


def conv_row(T: int, channels: int, dtype: torch.dtype, backward: bool) -> Row:
    def make():
        x, weight = torch.randn(1, T, channels).to(dtype), torch.randn(channels, 4)

        def conv1d(x, weight):
            history = torch.nn.functional.pad(x.float().transpose(1, 2), (3, 0))
            y = torch.nn.functional.conv1d(history, weight[:, None], groups=channels)
            return torch.nn.functional.silu(y).transpose(1, 2).to(dtype)

        def run(function):
            if not backward:
                with torch.no_grad():
                    return (function(x, weight),)
            leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            y = function(*leaves)
            return torch.autograd.grad(y, leaves, torch.ones_like(y))

        return {
            "eager": lambda: run(lambda x, w: short_conv(x, w)[0]),
            "conv1d": lambda: run(conv1d),
            "reference": lambda: run(lambda x, w: short_conv(x, w, backend="reference")[0]),
        }

    return Row(
        f"short_conv, T {T}, {channels} channels, {dtype}, {'forward + backward' if backward else 'forward'}", make
    )


def norm_row(tokens: int, dtype: torch.dtype, backward: bool) -> Row:
    def make():
        x, gate = (torch.randn(tokens, HEADS, DIM).to(dtype) for _ in range(2))
        weight = torch.rand(DIM)

        def run(backend):
            if not backward:
                with torch.no_grad():
                    return (gated_norm(x, weight, gate, eps=1e-5, backend=backend),)
            leaves = [y.detach().requires_grad_() for y in (x, weight, gate)]
            y = gated_norm(*leaves, eps=1e-5, backend=backend)
            return torch.autograd.grad(y, leaves, torch.ones_like(y))

        return {"eager": lambda: run("eager"), "reference": lambda: run("reference")}

    return Row(f"gated_norm, {tokens} tokens, {dtype}, {'forward + backward' if backward else 'forward'}", make)


def rows() -> dict[str, Row]:
    recurrent = ("transformers recurrent",)
    slow_backward = ("transformers recurrent", "fla recurrence", "reference")
    return {
        "kda4096": kda_row(4096, -5.0, False, recurrent),
        "kda4096-softplus": kda_row(4096, None, False, recurrent),
        "kda1024": kda_row(1024, None, False),
        "kda-train": kda_row(1024, -5.0, True, slow_backward),
        "kda-train-softplus": kda_row(1024, None, True, slow_backward),
        "kda-train-4": kda_row(1024, -5.0, True, ("transformers recurrent", "fla recurrence"), 4),
        "kda-train-4-softplus": kda_row(1024, None, True, ("transformers recurrent", "fla recurrence"), 4),
        "decode1": decode_row(1, 32),
        "decode4": decode_row(4, 32),
        "delta": delta_row(1024, False),
        "delta-train": delta_row(1024, True),
        "linear": linear_row(1024),
        "conv": conv_row(1024, 2048, torch.float32, False),
        "conv-bf16": conv_row(1024, 2048, torch.bfloat16, False),
        "conv-train": conv_row(1024, 2048, torch.float32, True),
        "norm": norm_row(1024, torch.float32, False),
        "norm-train": norm_row(1024, torch.float32, True),
    }


def check(name: str, closures: dict[str, Callable[[], object]]) -> None:
    """No speed number on a wrong result."""
    if name.startswith("decode"):
        return  # works on a state in place; the tests hold it to the reference
    expected = None
    for variant, run in closures.items():
        values = run()
        if expected is None:
            expected = values
        for actual, value in zip(values, expected, strict=True):
            error = (actual.float() - value.float()).abs().max() / value.float().abs().max().clamp_min(1e-20)
            if error > (2e-2 if value.dtype == torch.bfloat16 else 1e-3):
                raise SystemExit(f"{name}: {variant} differs by {error:.1e}; refusing to time it")


def gemm_rate() -> float:
    """Matrix product flops per second, on the clock that the rows use."""
    x = torch.randn(1024, 1024)
    timing = interleave({"gemm": lambda: x @ x}, rounds=15, budget=5.0)["gemm"]
    return 2 * 1024**3 / timing.median


def peak_extra(row: str, variant: str) -> float:
    """MB by which a variant's peak exceeds what was resident before it, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.ops_cpu", "--measure", f"{row}:{variant}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return float(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else float("nan")


def measure(row: str, variant: str) -> None:
    """Print the peak; Linux lets a process reset its own high-water mark."""
    run = rows()[row].make()[variant]
    gc.collect()
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before = status("VmRSS")
    run()
    print((status("VmHWM") - before) / 1024)


def status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))


def run_row(name: str, row: Row, arguments: argparse.Namespace) -> dict:
    """Compare and time the variants of one row; the record that is written."""
    closures = row.make()
    check(name, closures)
    before = gemm_rate()
    timings = interleave(closures, rounds=arguments.rounds, budget=arguments.budget)
    rate = (before + gemm_rate()) / 2
    record = report(row.name, timings, "eager")
    if row.flops:
        floor = row.flops / rate
        record |= {"gemm_gflops": rate / 1e9, "floor_s": floor, "over_floor": timings["eager"].median / floor}
        print(f"  floor {floor * 1e3:.1f} ms at {rate / 1e9:.0f} GFLOP/s: eager is {record['over_floor']:.2f}x")
    if arguments.memory:
        record["peak_extra_mb"] = {variant: peak_extra(name, variant) for variant in closures}
        print("  peak extra MB:", ", ".join(f"{v} {mb:.0f}" for v, mb in record["peak_extra_mb"].items()))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--json")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure:
        return measure(*arguments.measure.split(":"))
    table = rows()
    if arguments.list:
        return print("\n".join(table))
    chosen = arguments.only.split(",") if arguments.only else list(table)
    records = [machine(), *(run_row(name, table[name], arguments) for name in chosen)]
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
