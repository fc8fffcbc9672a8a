"""One command that tells everything about the kernels on a GPU, in under 8 minutes and without a network.

    python -m benchmarks.gpu_check                 # on a GPU
    python -m benchmarks.gpu_check --dry-run       # anywhere: toy sizes, kernels in triton's CPU interpreter
    python -m benchmarks.gpu_check --tune          # also time every kernel configuration and write the tuning table

1. ceilings: copy bandwidth and bf16 product rate of this device, against which everything below is held;
2. correctness: every operation's kernels, values and gradients, fp32 and bf16, against its float64 definition on the
   CPU, with no wait for the device allowed;
3. speed: forward, forward + backward and decoding (as a captured CUDA graph) against plain PyTorch, torch.compile and
   flash-linear-attention where importable;
4. layers: two at Kimi K3's geometry with 896 packed experts, step by step and with the step as a captured CUDA graph,
   and four of Kimi-Linear's beside transformers' own class.

Prints rows as they are made, then a table, and writes both to benchmarks/results/gpu_check.json and .md (a dry run only
to `--out`). The exit status is 1 when a correctness row fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
MINUTES = 7.5  # no new row is begun after this


def check_rows(cases, bench, sizes, dtypes) -> Iterator[dict]:
    """Largest error of each output and gradient, relative to the largest entry of the float64 definition's."""
    import torch

    bounds = {torch.float32: (3e-5, 3e-4), torch.bfloat16: (2e-2, 4e-2)}
    for case in cases:
        for dtype in dtypes:
            tensors = case.make(sizes, dtype, torch.Generator().manual_seed(0))
            expected, expected_grads = _results(case, tensors, "reference", torch.device("cpu"), torch.float64)
            for backend in ("triton", "fla") if dtype == torch.bfloat16 and _fla_serves(case) else ("triton",):
                waits = bench if backend == "triton" else None
                actual, grads = _results(case, tensors, backend, bench.device, None, waits)
                values = max(_error(a, e) for a, e in zip(actual, expected, strict=True))
                gradients = max((_error(grads[n], g) for n, g in expected_grads.items()), default=0.0)
                limit, grad_limit = bounds[dtype]
                passed = values <= limit and gradients <= grad_limit
                row = {"name": case.name, "dtype": str(dtype)[6:], "backend": backend}
                yield row | {"values": values, "gradients": gradients, "pass": passed}


def _fla_serves(case) -> bool:
    from kimi_hf.ops.dispatch import KNOWN_FLA, version_of

    return "fla" in case.rivals and version_of("fla-core") in KNOWN_FLA


def _error(actual, expected) -> float:
    difference = (actual.detach().cpu().double() - expected.detach()).abs().max()
    error = float(difference / expected.detach().abs().max().clamp(min=1e-30))
    return error if error == error else float("inf")


def _results(case, tensors, backend, device, dtype, bench=None):
    """Outputs (also those written in place) and gradients of a fixed random functional of them."""
    import torch

    leaves = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().clone().to(device)
        if tensor.is_floating_point():
            tensor = (tensor.to(dtype) if dtype else tensor).requires_grad_(case.trains)
        leaves[name] = tensor
    with bench.no_waiting() if bench else nullcontext(), nullcontext() if case.trains else torch.no_grad():
        outputs = case.call(leaves, backend)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None]
    outputs += [leaves[name] for name in case.updates]
    if not case.trains:
        return outputs, {}
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(o.shape, generator=generator).to(device, o.dtype) for o in outputs]
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    with bench.no_waiting() if bench else nullcontext():
        grads = torch.autograd.grad(outputs, [leaves[n] for n in names], cotangents, allow_unused=True)
    return outputs, {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def speed_rows(cases, bench, sizes, dtype, ceilings, decode_rows) -> Iterator[dict]:
    """Seconds, share of the copy bandwidth and of the product rate, for our kernels and the rivals."""
    import torch

    for case in cases:
        for rows in decode_rows if case.decodes else (sizes.rows,):
            at = replace(sizes, rows=rows)
            for train in (False, True) if case.trains else (False,):
                for backend in ("triton", *case.rivals):
                    row = {
                        "name": case.name,
                        "rows": rows if case.decodes else None,
                        "train": train,
                        "backend": backend,
                    }
                    try:
                        row |= _timed(case, bench, at, dtype, backend, train)
                    except Exception as error:  # a rival that is not installed or declines is a row, not an end
                        if backend == "triton":
                            raise
                        if bench.on_gpu:
                            torch.cuda.empty_cache()
                        yield row | {"error": str(error)[:120]}
                        continue
                    yield row | {
                        "of_copy": case.bytes(at, train) / row["seconds"] / ceilings["copy_bytes_per_s"],
                        "of_product": case.flops(at, train) / row["seconds"] / ceilings["bf16_flops_per_s"],
                    }


def _timed(case, bench, sizes, dtype, backend, train) -> dict:
    import torch

    generator = torch.Generator(bench.device).manual_seed(0)
    tensors = {
        n: t.requires_grad_(train and t.is_floating_point()) for n, t in case.make(sizes, dtype, generator).items()
    }
    run = _runner(case, tensors, backend, train)
    with nullcontext() if train else torch.no_grad():
        if case.decodes and backend == "triton":
            run = bench.graphed(run)
        return {"seconds": bench.time(run), "peak": bench.peak(run)}


def _runner(case, tensors, backend, train) -> Callable[[], object]:
    import torch

    call = case.call
    if backend == "compile":
        call, backend = torch.compile(case.call, dynamic=False), "reference"
    leaves = [t for t in tensors.values() if t.requires_grad]

    def run() -> object:
        outputs = call(tensors, backend)
        if train:
            outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None]
            torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True)
        return outputs

    return run


def tune(cases, bench, sizes, dtype) -> dict[str, str]:
    """{"kernel/key": fastest configuration}: each kernel's configurations by the time of the operation around it."""
    import torch

    from kimi_hf.ops import kernels_common

    best: dict[str, str] = {}
    for case in cases:
        generator = torch.Generator(bench.device).manual_seed(0)
        tensors = {n: t.requires_grad_(case.trains and t.is_floating_point())
                   for n, t in case.make(sizes, dtype, generator).items()}  # fmt: skip
        run = _runner(case, tensors, "triton", case.trains)
        kernels_common.seen_choices.clear()
        with nullcontext() if case.trains else torch.no_grad():
            run()
            for kernel, (configs, key) in dict(kernels_common.seen_choices).items():
                times = {}
                for config in configs if len(configs) > 1 else ():
                    with kernels_common.force_config(kernel, config.name):
                        try:
                            times[config.name] = bench.time(run, runs=10)
                        except Exception as error:  # a tile that this GPU has no shared memory for
                            print(f"  {kernel} {config.name}: {str(error)[:80]}")
                if times:
                    best[f"{kernel}/{key}"] = min(times, key=times.get)
    return best


def goals(report: dict) -> list[str]:
    """The goals of the first run, each with what was measured."""
    seconds = {(r["name"], r["rows"], r["train"], r["backend"]): r for r in report["speed"] if "seconds" in r}
    lines = []
    for train in (False, True):
        ours, fla = (seconds.get(("kda bounded", None, train, b)) for b in ("triton", "fla"))
        if ours and fla:
            ratio = fla["seconds"] / ours["seconds"]
            lines.append(f"KDA {'training' if train else 'forward'} against fla: {ratio:.2f}x (goal >= 1)")
    shares = {"kda_decode": ("1 / {:.2f} of reading and writing the state once (goal 1.3)", True),
              "situ_glu": ("{:.0%} of copy bandwidth (goal 80%)", False),
              "depth_attention": ("{:.0%} of copy bandwidth (goal 80%)", False),
              "gated_norm": ("{:.0%} of copy bandwidth (goal 80%)", False),
              "experts decode": ("{:.0%} of copy bandwidth (goal 70%)", False)}  # fmt: skip
    for (name, rows, train, backend), row in seconds.items():
        if backend == "triton" and not train and name in shares:
            text, inverse = shares[name]
            value = 1 / row["of_copy"] if inverse else row["of_copy"]
            lines.append(f"{name}{f', {rows} rows' if rows else ''}: {text.format(value)}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU, kernels in the interpreter")
    parser.add_argument("--tune", action="store_true", help="time every configuration, write the tuning table")
    parser.add_argument("--only", default="", help="cases whose name contains this; no layers")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no new row after this")
    parser.add_argument("--out", type=Path, help="folder of the JSON and the table; of a whole run on a GPU: results/")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported by anything below
    import torch

    from benchmarks.gpu_table import table

    if not arguments.dry_run and not torch.cuda.is_available():
        print("gpu_check: no GPU is visible; run it on one, or with --dry-run", file=sys.stderr)
        return 2
    report = run(arguments)
    print("\n" + table(report))
    out = arguments.out or (None if arguments.dry_run or arguments.only else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "gpu_check.md").write_text(table(report))
    return 0 if all(row["pass"] for row in report["correctness"]) else 1


def run(arguments: argparse.Namespace) -> dict:
    """All sections, printed row by row as they are made."""
    import torch
    import triton

    import kimi_hf
    from benchmarks.gpu_cases import CASES, CHECK, SPEED, TOY
    from benchmarks.gpu_layer import layer_rows, native_rows
    from benchmarks.gpu_measure import Bench

    begun = time.perf_counter()
    dry = arguments.dry_run
    bench = Bench(torch.device("cpu" if dry else "cuda:0"))
    check, speed, dtype = (TOY, TOY, torch.float32) if dry else (CHECK, SPEED, torch.bfloat16)
    cases = timed = [case for case in CASES if arguments.only in case.name]
    if dry:  # every operation is checked; of the timing code a few rows are enough
        timed = [replace(case, rivals=()) for case in cases if case.name in ("gated_norm", "kda_decode")]
        kimi_hf.set_backend("triton")
    report: dict = {
        "device": "cpu (dry run)" if dry else torch.cuda.get_device_name(0),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "kimi_hf": kimi_hf.__version__},
        "ceilings": bench.ceilings(),
    }
    sections: dict[str, Callable[[], Iterator[dict]]] = {
        "correctness": lambda: check_rows(cases, bench, check, (dtype,) if dry else (torch.float32, torch.bfloat16)),
        "speed": lambda: speed_rows(timed, bench, speed, dtype, report["ceilings"], (2,) if dry else (1, 8, 64)),
    }
    if not arguments.only:
        sections["layers"] = lambda: layer_rows(bench, dry, 5 if dry else speed.tokens)
        sections["native"] = lambda: native_rows(bench, dry, 5 if dry else 2048)
    for name, rows in sections.items():
        report[name] = []
        for row in rows():
            report[name].append(row)
            print(f"{name:12} " + "  ".join(f"{k} {_short(v)}" for k, v in row.items() if v is not None), flush=True)
            if time.perf_counter() - begun > 60 * arguments.minutes:
                print(f"{name}: {arguments.minutes} minutes are over, the rest is left out")
                break
    if arguments.tune:
        best = tune(timed, bench, speed, dtype)
        if dry:
            print(f"{len(best)} choices, not written: a dry run measures nothing")
        else:
            _write_tuning(best, report["device"])
    report["goals"] = goals(report)
    report["minutes"] = (time.perf_counter() - begun) / 60
    return report


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _write_tuning(best: dict[str, str], device: str) -> None:
    from kimi_hf.ops.kernels_common import TUNED_FILE

    table = json.loads(TUNED_FILE.read_text()) if TUNED_FILE.exists() else {}
    table[device] = table.get(device, {}) | best
    TUNED_FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"{len(best)} choices for {device} written to {TUNED_FILE}")


if __name__ == "__main__":
    raise SystemExit(main())
