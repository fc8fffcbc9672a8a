"""What decoding costs: bytes kept and time a token, against the length of the context, measured on every rung."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from ...configuration import census, preset
from ...configuration.census import GPT2_SMALL
from ...modeling.cache import KimiCache
from ..experiment import FAILS, HOLDS, Experiment, Point, Results, Verdict, select, values_of
from ..models import RUNGS, build, sizes
from ..plots import PALETTE, STYLES, bars, label, panels

_WIDTH, _LAYERS = 256, 4
_FLOAT = 4


@torch.no_grad()
def decode(rung: str, context: int, steps: int, seed: int) -> dict[str, Any]:
    """Fill a cache with `context` tokens, then time single tokens; weights are random, which costs the same."""
    sparse = (
        {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 128} if rung.startswith("kimi") else {}
    )
    model = build(rung, seed, width=_WIDTH, layers=_LAYERS, vocab=512, length=context + steps + 4, **sparse).eval()
    ids = torch.randint(512, (1, context), generator=torch.Generator().manual_seed(seed))
    cache = KimiCache(model.config)
    for piece in ids.split(1024, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in layer.stored().values())
    token, times = ids[:, :1], []
    for step in range(steps + 2):
        begun = time.process_time()
        model(token, past_key_values=cache)
        if step >= 2:
            times.append(time.process_time() - begun)
    return {
        "bytes": held,
        "allocated_bytes": cache.memory_report()["total"],
        "milliseconds": 1e3 * statistics.median(times),
        "slowest_milliseconds": 1e3 * max(times),
        "read_gb_a_second": _read_rate(),
        **sizes(model),
    }


def _read_rate() -> float:
    """Gigabytes a second at which this process reads what is not in a processor cache."""
    numbers = torch.zeros(32 << 20)
    times = []
    for _ in range(4):
        begun = time.process_time()
        numbers.sum()
        times.append(time.process_time() - begun)
    return numbers.nbytes / min(times) / 1e9


def _reading_milliseconds(row: dict[str, Any], context: int, rate: float) -> float:
    """The least a token can take: reading the weights it uses and everything kept, once, at `rate` GB a second."""
    return 1e3 * (_FLOAT * row["activated"] + _predicted(row, context)) / (1e9 * rate)


def _judge_decoding(results: Results) -> Verdict:
    low, high = min(values_of(results, "context")), max(values_of(results, "context"))
    told, held = [], True
    for rung in RUNGS:
        first, last = (select(results, rung=rung, context=c)[0] for c in (low, high))
        grew, slower = last["bytes"] / first["bytes"], last["milliseconds"] / first["milliseconds"]
        expected = {c: _predicted(select(results, rung=rung, context=c)[0], c) for c in (low, high)}
        held &= abs(first["bytes"] / expected[low] - 1) < 0.02 and abs(last["bytes"] / expected[high] - 1) < 0.02
        told.append(f"{rung} {grew:.1f} x bytes, {slower:.1f} x time")
    return Verdict(
        HOLDS if held else FAILS,
        f"from {low} to {high} tokens: {'; '.join(told)}. Bytes {'agree' if held else 'do not agree'} with the "
        "configuration's own formula within 2 %",
    )


def _predicted(row: dict[str, Any], context: int) -> float:
    return _FLOAT * (row["state_numbers"] + row["numbers_per_token"] * context)


def _draw_decoding(results: Results):
    figure, axes = panels(2)
    contexts = values_of(results, "context")
    rate = max(row["read_gb_a_second"] for rung in RUNGS for row in select(results, rung=rung))
    for rung in RUNGS:
        rows = [select(results, rung=rung, context=c)[0] for c in contexts]
        axes[0].plot(contexts, [r["bytes"] / 2**20 for r in rows], linestyle="", **STYLES[rung])
        theory = [_predicted(r, c) / 2**20 for r, c in zip(rows, contexts, strict=True)]
        axes[0].plot(contexts, theory, color=STYLES[rung]["color"], linewidth=1)
        axes[1].plot(contexts, [r["milliseconds"] for r in rows], **STYLES[rung])
        least = [_reading_milliseconds(r, c, rate) for r, c in zip(rows, contexts, strict=True)]
        axes[1].plot(contexts, least, color=STYLES[rung]["color"], linewidth=1, linestyle=":")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    label(axes[0], "Memory of a sequence (lines: theory)", "tokens of context", "MiB kept, fp32")
    title = "Time of one more token (dots: reading it all once)"
    label(axes[1], title, "tokens of context", "processor milliseconds", legend=False)
    return figure


DECODING = Experiment(
    name="decoding",
    title="Memory and time of decoding",
    claim="A key/value cache grows with every token and is read whole for the next (N D numbers); a recurrent state stays at "
    "D² / heads numbers whatever the length; a hybrid grows slowly.",
    method=f"Width {_WIDTH}, {_LAYERS} layers, batch 1, fp32, one thread: a cache is filled with N tokens, then single tokens "
    "are timed (median, processor time). Lines in the memory plot are the configuration's formula, points what the cache "
    "holds; dotted lines in the time plot are the time of reading the weights in use and that memory once, at a rate "
    "measured in the same run.",
    points=lambda budget: [
        Point(f"{rung}, {context} tokens", decode, {"rung": rung, "context": context, "steps": steps, "seed": 0})
        for contexts, steps in [
            ((128, 512, 2048, 4096), 12) if budget == "small" else ((128, 512, 2048, 8192, 32768), 30)
        ]
        for rung in RUNGS
        for context in contexts
    ],
    judge=_judge_decoding,
    draw=_draw_decoding,
    alone=True,
)


def count(name: str) -> dict[str, Any]:
    """The census of a preset."""
    counted = census(preset(name))
    return {
        "total": counted.total,
        "activated": counted.activated,
        "parts": {part.name: part.total for part in counted.parts},
    }


def _ratios(results: Results) -> dict[str, float]:
    k3 = results["kimi-k3"]
    return {
        "stored": k3["total"] / GPT2_SMALL,
        "activated": k3["activated"] / GPT2_SMALL,
        "rounded": round(k3["total"] / 1e12, 1) * 1e12 / 124e6,
    }


def _judge_census(results: Results) -> Verdict:
    ratio = _ratios(results)
    exact = int(ratio["rounded"]) == 22_580
    return Verdict(
        HOLDS if exact else FAILS,
        f"2.8 T over 124 M is {int(ratio['rounded']):,}; counted exactly, {results['kimi-k3']['total']:,} stored parameters are "
        f"{ratio['stored']:,.0f} GPT-2s, and the {results['kimi-k3']['activated']:,} that one token uses are "
        f"{ratio['activated']:,.0f}. The number says nothing about data, compute, context or quality",
    )


def _draw_census(results: Results):
    figure, axes = panels(2)
    ratio = _ratios(results)
    bars(axes[0], ["stored", "used by a token"], [ratio["stored"], ratio["activated"]])
    axes[0].set_yscale("log")
    label(axes[0], "Kimi K3 over GPT-2 small", "", "times 124,439,808 parameters", legend=False)
    parts = sorted(results["kimi-k3"]["parts"].items(), key=lambda item: -item[1])[:7]
    axes[1].barh([name for name, _ in parts][::-1], [size / 1e9 for _, size in parts][::-1], color=PALETTE[0])
    axes[1].set_xscale("log")
    label(axes[1], "Where they are", "billion parameters", "", legend=False)
    return figure


CENSUS = Experiment(
    name="census",
    title="The number 22,580",
    claim="Kimi K3 is 22,580 times GPT-2.",
    method="Closed forms over the released configuration; no weight is needed.",
    points=lambda budget: [Point(name, count, {"name": name}) for name in ("gpt2", "kimi-k3", "kimi-linear-48b-a3b")],
    judge=_judge_census,
    draw=_draw_census,
)
