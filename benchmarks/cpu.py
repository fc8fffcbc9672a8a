"""The runner of everything timed on a CPU: `python -m benchmarks.cpu`.

Two kinds of rows: operations (`benchmarks/ops_cpu.py`) and whole models beside transformers' native class
(`benchmarks/cpu_models.py`). The variants of a row are compared first, then run in turn. Floors: counted floating point
operations over a matrix-product rate, or counted bytes over a copy rate, whichever takes longer, both measured in the
same process beside the row. Peak memory is that of a process of its own per variant, beyond what it held before.

Options: `--threads N`, `--only NAME,...` (`--list` names them), `--rounds N`, `--budget SECONDS` a row, `--memory`,
`--json FILE` (a line a row, appended), `--table FILE` (from what the JSON file holds, nothing is run).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import cpu_models, ops_cpu
from benchmarks.cpu_table import table
from benchmarks.timing import interleave, machine, report

TARGET_OPS = ("kda4096", "kda4096-softplus", "kda1024", "kda-train", "kda-train-softplus")


def best_of(run: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of `times` runs, on the clock that the rows use."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = float("inf")
    for _ in range(times):
        start = clock()
        run()
        best = min(best, clock() - start)
    return best


def matmul_rate() -> float:
    """Floating point operations a second of a large fp32 product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 4096)
    return 2 * 1024 * 1024 * 4096 / best_of(lambda: torch.mm(a, b))


def copy_rate() -> float:
    """Bytes a second, read plus written, of copying 256 MB."""
    a, b = torch.zeros(64 << 20), torch.zeros(64 << 20)
    return 2 * a.nbytes / best_of(lambda: b.copy_(a))


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
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-m", "benchmarks.cpu", "--one", f"{row}:{variant}", "--threads", threads]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return float(out.stdout.strip().splitlines()[-1])


def run_one(row: str, variant: str) -> None:
    """Print the gigabytes by which the peak of one run exceeds what was resident before it."""
    ours = cpu_models.build_ours()
    native = cpu_models.build_native(ours) if variant == "native" else ours
    run = cpu_models.rows()[row].make(ours, native)[variant]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Linux resets the high-water mark
    before = ops_cpu.status("VmRSS")
    run()
    print((ops_cpu.status("VmHWM") - before) / 2**20)


def run_model_row(name: str, row: cpu_models.Row, ours, native, args: argparse.Namespace) -> dict:
    """Compare, time and weigh one row; the record that is written."""
    record: dict = {"row": name, "variants": {}}
    if row.timed:
        variants = row.make(ours, native)
        check(name, variants)
        flops, speed = matmul_rate(), copy_rate()
        record = report(name, interleave(variants, rounds=args.rounds, budget=args.budget), "ours")
        record |= {"matmul_gflops": flops / 1e9, "copy_gb": speed / 1e9}
        floor = max(row.flops / flops, row.bytes / speed)
        if floor:
            over = record["variants"]["ours"]["median"] / floor
            record |= {"floor_s": floor, "over_floor": over}
            print(f"  floor {floor * 1e3:.1f} ms ({flops / 1e9:.0f} GFLOP/s, {speed / 1e9:.1f} GB/s): {over:.2f}x")
    if not row.timed or (args.memory and name.startswith(("prefill", "train"))):
        record["peak_gb"] = {variant: peak_memory(name, variant) for variant in row.variants}
        print(f"{name}: peak " + ", ".join(f"{variant} {gb:.2f} GB" for variant, gb in record["peak_gb"].items()))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--json", help="append one JSON line a row to this file")
    parser.add_argument("--table", help="write the rows of --json as a table here, and run nothing")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.table:
        Path(args.table).write_text(table(Path(args.json).read_text().splitlines()))
        return
    if args.one:
        return run_one(*args.one.split(":"))
    models, operations = cpu_models.rows(), ops_cpu.rows()
    if args.list:
        return print("\n".join([*operations, *models]))
    chosen = [name for name in args.only.split(",") if name] or [*TARGET_OPS, *models]
    if unknown := [name for name in chosen if name not in models and name not in operations]:
        raise SystemExit(f"--only: no row is called {', '.join(unknown)}; --list names them")
    print(json.dumps(machine()))
    ours = native = None
    for name in chosen:
        if name in operations:
            record = ops_cpu.run_row(name, operations[name], args)
        else:
            ours = ours or cpu_models.build_ours()
            native = native or cpu_models.build_native(ours)
            record = run_model_row(name, models[name], ours, native, args)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(record | {"name": name, "machine": machine()}) + "\n")


if __name__ == "__main__":
    main()
