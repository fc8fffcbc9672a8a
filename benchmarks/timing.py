"""Interleaved timings of equivalent functions in one process."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant over all rounds: median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0])
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)


def interleave(variants: dict[str, Callable[[], object]], *, rounds: int, budget: float = 10.0) -> dict[str, Timing]:
    """Run the variants in turn, one warm-up round first, until `rounds` or `budget` seconds are spent.

    Interleaving keeps other load on the machine from favouring one variant, and every round starts with another one.
    With one thread the CPU time of the process is measured, else wall time.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    begun = time.perf_counter()
    for turn in range(rounds + 1):
        for place in range(len(variants)):
            name, run = list(variants.items())[(turn + place) % len(variants)]
            start = clock()
            run()
            if turn:
                seconds[name].append(clock() - start)
        if turn and time.perf_counter() - begun > budget:
            break
    return {name: Timing.of(values) for name, values in seconds.items()}


def report(row: str, timings: dict[str, Timing], ours: str, *, stream=None) -> dict:
    """Print one line a variant with its ratio to `ours`, and return the row as a JSON-ready dict."""
    base = timings[ours].median
    print(row)
    for name, timing in timings.items():
        ratio = timing.median / base
        print(
            f"  {name:34s} {timing.median * 1e3:10.3f} ms  [{timing.low * 1e3:.3f}, {timing.high * 1e3:.3f}]"
            f"  {ratio:6.2f}x"
        )
    record = {"row": row, "ours": ours, "variants": {name: asdict(timing) for name, timing in timings.items()}}
    if stream is not None:
        stream.write(json.dumps(record) + "\n")
    return record


def machine() -> dict[str, str | int]:
    """What the numbers depend on."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "isa": torch.backends.cpu.get_cpu_capability(),
    }
