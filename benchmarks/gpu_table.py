"""The report of `gpu_check.py` as Markdown."""

from __future__ import annotations

COLUMNS = {
    "correctness": ("name", "dtype", "backend", "values", "gradients", "pass"),
    "speed": ("name", "rows", "train", "backend", "seconds", "of_copy", "of_product", "peak", "error"),
    "layers": ("name", "seconds", "tokens_per_s", "peak", "weights", "replay_error"),
    "native": ("name", "who", "seconds"),
}
NOTES = {
    "correctness": "Largest error relative to the largest entry of the float64 definition on the CPU.",
    "speed": "Median. `of_copy` and `of_product`: least bytes and counted flops over the ceilings above. `peak`: memory "
    "during the call beyond its inputs.",
    "layers": "A KDA and an MLA layer of Kimi K3's geometry with 896 packed experts each.",
    "native": "Kimi-Linear's geometry, dense experts; \"native\" is transformers' own class.",
}


def table(report: dict) -> str:
    """All sections, one table each."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    copy, product = report["ceilings"]["copy_bytes_per_s"], report["ceilings"]["bf16_flops_per_s"]
    lines = [
        f"# Kernels on {report['device']}",
        "",
        f"Made by `python -m benchmarks.gpu_check` with {versions}, in {report['minutes']:.1f} minutes.",
        f"Ceilings measured in the same run: copy {copy / 1e9:.0f} GB/s, bf16 product {product / 1e12:.0f} TFLOP/s.",
        "",
        *(f"- {line}" for line in report["goals"]),
    ]
    for section, columns in COLUMNS.items():
        rows = report.get(section)
        if rows:
            used = [c for c in columns if any(row.get(c) is not None for row in rows)]
            lines += ["", f"## {section.capitalize()}", "", NOTES[section], "", _line(used), _line(["---"] * len(used))]
            lines += [_line([_cell(column, row.get(column)) for column in used]) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if column == "seconds":
        return f"{value * 1e3:.3f} ms"
    if column in ("of_copy", "of_product"):
        return f"{value:.0%}"
    if column in ("peak", "weights"):
        return f"{value / 2**20:.0f} MiB"
    if column == "train":
        return "forward and backward" if value else "forward"
    return f"{value:.2g}" if isinstance(value, float) else str(value)
