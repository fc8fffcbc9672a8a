"""The table that people read, from the JSON lines that `python -m benchmarks.cpu` wrote."""

from __future__ import annotations

import json

HEADER = """# Measured on a CPU

`python -m benchmarks.cpu --memory --json FILE`, then `--table`. Medians and quartiles of runs in turn in one process;
`native` is transformers' own Kimi Linear with the same weights. With one thread the process's CPU time is counted, with
more the wall clock. The floor counts the flops (or bytes) that the work needs over the rate of a matrix product (or a
copy) measured beside the row; peak memory is what one run adds in a process of its own.

{machines}

| row | threads | variant | median | quartiles | beside ours | ours over the floor | peak |
|---|---|---|---|---|---|---|---|
"""


def table(lines: list[str]) -> str:
    """Markdown; of rows that were measured twice with the same number of threads the later one counts."""
    records = {(record["name"], record["machine"]["threads"]): record for record in map(json.loads, lines)}
    machines = sorted({_machine(record["machine"]) for record in records.values()})
    body = [line for record in records.values() for line in _lines(record)]
    return HEADER.format(machines="\n".join(f"- {machine}" for machine in machines)) + "\n".join(body) + "\n"


def _machine(facts: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if name != "threads")


def _lines(record: dict) -> list[str]:
    peaks = _peaks(record)
    ours = record["variants"].get(record.get("ours", ""), {}).get("median")
    lines = []
    for variant in [*record["variants"], *(name for name in peaks if name not in record["variants"])]:
        timing = record["variants"].get(variant)
        cells = [record["name"], str(record["machine"]["threads"]), variant]
        if timing:
            cells += [_seconds(timing["median"]), f"{_seconds(timing['low'])} to {_seconds(timing['high'])}"]
            cells += [f"{timing['median'] / ours:.2f}x"]
        else:
            cells += ["", "", ""]
        is_ours = variant == record.get("ours")
        cells += [f"{record['over_floor']:.2f}x" if is_ours and "over_floor" in record else "", peaks.get(variant, "")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _peaks(record: dict) -> dict[str, str]:
    found = {name: f"{gb:.2f} GB" for name, gb in record.get("peak_gb", {}).items()}
    return found | {name: f"{mb:.0f} MB" for name, mb in record.get("peak_extra_mb", {}).items()}


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
