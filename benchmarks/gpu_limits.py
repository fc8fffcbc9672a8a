"""What each operation must move and compute at Kimi K3's sizes, and how long that takes a GPU at its rated speed.

    python -m benchmarks.gpu_limits [--bandwidth 3.35e12] [--flops 989e12]

The defaults are an H100 SXM's rated memory bandwidth and dense bf16 rate. Nothing is measured here; `gpu_check.py`
measures, against ceilings of the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu_cases import CASES, SPEED


def rows(bandwidth: float, flops: float) -> Iterator[str]:
    """Markdown: the operation, least bytes, counted flops, the time either takes, and which is longer."""
    yield "| operation | least MB | counted GFLOP | limit | ms |"
    yield "|---|---|---|---|---|"
    for case in CASES:
        for count in (1, 8, 64) if case.decodes else (SPEED.rows,):
            sizes = replace(SPEED, rows=count)
            for train in (False, True) if case.trains else (False,):
                moved, computed = case.bytes(sizes, train), case.flops(sizes, train)
                times = {"bandwidth": moved / bandwidth, "products": computed / flops}
                limit = max(times, key=times.get)
                name = case.name + (f", {count} rows" if case.decodes else "") + (", training" if train else "")
                yield f"| {name} | {moved / 1e6:.1f} | {computed / 1e9:.1f} | {limit} | {times[limit] * 1e3:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes a second")
    parser.add_argument("--flops", type=float, default=989e12, help="bf16 flops a second")
    arguments = parser.parse_args()
    print("\n".join(rows(arguments.bandwidth, arguments.flops)))


if __name__ == "__main__":
    main()
