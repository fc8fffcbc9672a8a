"""Drawing: one colour-blind safe palette, a colour and marker for every rung that never changes."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for every kind of colour vision; markers say the same again.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
)
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_RUNGS = ("gpt2", "linear-transformer", "delta-net", "gated-delta-net", "kimi-linear", "kimi-k3")
STYLES = {
    rung: {"color": color, "marker": marker, "label": rung}
    for rung, color, marker in zip(_RUNGS, (BLACK, RED, ORANGE, SKY, GREEN, BLUE), MARKERS, strict=False)
}


def style(index: int, label: Any) -> dict[str, Any]:
    """Line style number `index`."""
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)], "label": str(label)}


def panels(count: int, width: float = 5.4, height: float = 3.9, rows: int = 1) -> tuple[Figure, list[Any]]:
    """A figure with `count` panels in so many rows; panels that are left over stay empty."""
    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "lines.markersize": 5})
    columns = -(-count // rows)
    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, constrained_layout=True)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:count])


def label(axis: Any, title: str, x: str, y: str, legend: bool = True) -> None:
    axis.set(title=title, xlabel=x, ylabel=y)
    if legend:
        axis.legend(fontsize=8, framealpha=0.9)


def bars(axis: Any, names: list[str], heights: list[float]) -> None:
    """Bars from zero with their numbers above them."""
    drawn = axis.bar(range(len(names)), heights, color=_colors(names))
    axis.bar_label(drawn, [f"{h:,.0f}" if h >= 100 else f"{h:.3g}" for h in heights], fontsize=8, padding=2)
    _names(axis, names)


def dots(axis: Any, names: list[str], heights: list[float], spreads: list[float]) -> None:
    """Points with the spread of their seeds, for differences too small for bars that start at zero."""
    for i, (height, spread, color) in enumerate(zip(heights, spreads, _colors(names), strict=True)):
        axis.errorbar(i, height, yerr=spread, fmt="o", color=color, capsize=5)
        axis.annotate(f"{height:.3g}", (i, height), xytext=(7, 0), textcoords="offset points", fontsize=8, va="center")
    axis.set_xlim(-0.5, len(names) - 0.2)
    _names(axis, names)


def _colors(names: list[str]) -> list[str]:
    return [STYLES[name]["color"] if name in STYLES else PALETTE[i % len(PALETTE)] for i, name in enumerate(names)]


def _names(axis: Any, names: list[str]) -> None:
    axis.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axis.margins(y=0.15)
