"""What a fixed-size memory does, without any training: overwriting, capacity, a long run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.delta_rule import delta_rule
from ...ops.kda import kda
from ...ops.linear_attention import linear_attention
from ..experiment import FAILS, HOLDS, Experiment, Point, Results, Verdict, mean, select, values_of
from ..plots import label, panels, style

MEMORIES = ("additive", "delta rule")


def _write(memory: str, keys: Tensor, values: Tensor) -> Tensor:
    """The state (K, V) after writing pairs (N, K), (N, V) in order: S += k v^T, or the delta rule with beta = 1."""
    if memory == "additive":
        return keys.T @ values
    k, v = keys[None, :, None], values[None, :, None]
    beta = torch.ones(k.shape[:3])
    return delta_rule(torch.zeros_like(k), k, v, beta, output_final_state=True)[1][0, 0]


def _error(state: Tensor, keys: Tensor, values: Tensor) -> float:
    """Mean squared error of what the keys read, relative to the values' own mean square."""
    return float((keys @ state - values).square().mean() / values.square().mean())


def _unit(count: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(count, width, generator=generator), dim=-1)


def overwrite(memory: str, times: int, seed: int, width: int = 64, count: int = 4) -> dict[str, Any]:
    """Write `count` keys `times` times over, each time with new values; how wrong are the last values read?"""
    generator = torch.Generator().manual_seed(seed)
    keys = _unit(count, width, generator)
    values = torch.randn(times, count, width, generator=generator)
    state = _write(memory, keys.repeat(times, 1), values.flatten(0, 1))
    return {"error": _error(state, keys, values[-1])}


def _judge_overwriting(results: Results) -> Verdict:
    worst = max(values_of(results, "times"))
    additive = mean(r["error"] for r in select(results, memory="additive", times=worst))
    delta = mean(r["error"] for r in select(results, memory="delta rule", times=worst))
    held = delta < 0.1 and additive > 1
    return Verdict(
        HOLDS if held else FAILS,
        f"after {worst} rewrites of each key the additive state reads its last value with relative squared error "
        f"{additive:.3g}, the delta rule with {delta:.3g}",
    )


def _draw_errors(results: Results, argument: str, title: str, x: str):
    figure, (axis,) = panels(1)
    for i, memory in enumerate(MEMORIES):
        xs = values_of(results, argument)
        axis.plot(
            xs,
            [mean(r["error"] for r in select(results, memory=memory, **{argument: n})) for n in xs],
            **style(i, memory),
        )
    axis.axhline(1, color="grey", linestyle=":", label="as wrong as reading nothing")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    label(axis, title, x, "relative squared error of reading")
    return figure


OVERWRITING = Experiment(
    name="overwriting",
    title="Writing one key again",
    claim="An additive state mixes all values a key ever had; the delta rule replaces the old one.",
    method="4 random unit keys in d = 64, each written 1 to 64 times with new random values (beta = 1), then read once; mean "
    "of several seeds. No training.",
    points=lambda budget: [
        Point(f"{memory}, {times} times, seed {seed}", overwrite, {"memory": memory, "times": times, "seed": seed})
        for memory in MEMORIES
        for times in (1, 2, 4, 8, 16, 32, 64)
        for seed in range(4 if budget == "small" else 16)
    ],
    judge=_judge_overwriting,
    draw=lambda results: _draw_errors(
        results, "times", "Overwriting: error of the last value", "times each key was written"
    ),
)


def capacity(memory: str, width: int, ratio: float, seed: int) -> dict[str, Any]:
    """Store `ratio` d random pairs once each in a d x d state, then read all of them."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(ratio * width))
    keys, values = _unit(count, width, generator), torch.randn(count, width, generator=generator)
    return {"error": _error(_write(memory, keys, values), keys, values), "pairs": count}


def _judge_capacity(results: Results) -> Verdict:
    ratios = values_of(results, "ratio")
    additive = {x: mean(r["error"] for r in select(results, memory="additive", ratio=x)) for x in ratios}
    delta = {x: mean(r["error"] for r in select(results, memory="delta rule", ratio=x)) for x in ratios}
    off = max(abs(additive[x] / x - 1) for x in ratios if x >= 0.25)
    better = all(delta[x] < additive[x] for x in ratios)
    return Verdict(
        HOLDS if off < 0.2 and better else FAILS,
        f"the additive error is N / d within {100 * off:.0f} % for N / d from 0.25 to {max(ratios):g}; at N = d it is "
        f"{additive[1.0]:.2f}, that of the delta rule {delta[1.0]:.2f}",
    )


def _draw_capacity(results: Results):
    figure, axes = panels(2)
    ratios = values_of(results, "ratio")
    for axis, memory in zip(axes, MEMORIES, strict=True):
        for i, width in enumerate(values_of(results, "width")):
            chosen = [select(results, memory=memory, width=width, ratio=x) for x in ratios]
            axis.plot(ratios, [mean(r["error"] for r in rows) for rows in chosen], **style(i, f"d = {width}"))
        axis.plot(ratios, ratios, color="grey", linestyle=":", label="N / d")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylim(0.01, 5)
        label(axis, f"Capacity: {memory}", "stored pairs over state width, N / d", "relative squared error of reading")
    return figure


CAPACITY = Experiment(
    name="capacity",
    title="How many pairs fit into d x d numbers",
    claim="Interference grows with the number of pairs over d (as N / d for an additive state); correcting errors lowers it.",
    method="N random unit keys with random values are written once into a d x d state, then all are read; mean of seeds. No "
    "training.",
    points=lambda budget: [
        Point(f"{m}, d {d}, N/d {x:g}, seed {s}", capacity, {"memory": m, "width": d, "ratio": x, "seed": s})
        for m in MEMORIES
        for d in (32, 64, 128)
        for x in (0.125, 0.25, 0.5, 1.0, 2.0)
        for s in range(3 if budget == "small" else 10)
    ],
    judge=_judge_capacity,
    draw=_draw_capacity,
)

RULES = ("linear attention", "linear attention, undivided sum", "delta rule", "gated delta rule", "KDA")


def long_run(rule: str, seed: int, tokens: int = 100_000, width: int = 32) -> dict[str, Any]:
    """Norm of the state along `tokens` of random q, k, v; the decays are those of fresh models."""
    generator = torch.Generator().manual_seed(seed)
    state, norms, outputs, at, done = None, [], [], [], 0
    marks = sorted({round(10 ** (x / 4)) for x in range(4, 21)})
    for mark in [m for m in marks if m <= tokens]:
        size = (1, mark - done, 1, width)
        q, k, v = (torch.randn(size, generator=generator) for _ in range(3))
        logits = torch.randn(size[:3], generator=generator)
        o, state = _advance(rule, q, k, v, logits, state)
        norms.append(float(state[0].norm() if isinstance(state, tuple) else state.norm()))
        outputs.append(float(o[:, -16:].square().mean().sqrt()))
        at.append(mark)
        done = mark
    return {"steps": at, "state_norm": norms, "output_rms": outputs}


def _advance(rule: str, q: Tensor, k: Tensor, v: Tensor, logits: Tensor, state):
    kept = {"initial_state": state, "output_final_state": True}
    if rule.startswith("linear attention"):
        return linear_attention(q, k, v, normalize="undivided" not in rule, **kept)
    if rule == "KDA":
        heads, width = k.shape[2:]
        rate = torch.logspace(-3, -1, width)  # as a fresh model's decays, log-uniform over its channels
        bias = (rate / 4 + torch.log(-torch.expm1(-rate / 4))).repeat(heads)
        return kda(q, k, v, torch.zeros_like(k), logits, A_log=torch.full((heads,), 4.0).log(), dt_bias=bias, **kept)
    unit = torch.nn.functional.normalize
    g = None if rule == "delta rule" else torch.full_like(logits, -0.01)
    return delta_rule(unit(q, dim=-1), unit(k, dim=-1), v, torch.sigmoid(logits), g=g, **kept)


def _growth(results: Results, rule: str) -> float:
    """How many times larger the state is at the end than after 1,000 tokens."""
    found = []
    for r in select(results, rule=rule):
        early = r["state_norm"][r["steps"].index(1000)]
        found.append(r["state_norm"][-1] / early)
    return mean(found)


def _judge_stability(results: Results) -> Verdict:
    growth = {rule: _growth(results, rule) for rule in RULES}
    bounded = all(growth[rule] < 1.5 for rule in ("delta rule", "gated delta rule", "KDA"))
    held = bounded and growth["linear attention"] > 5
    told = ", ".join(f"{rule} {value:.2f}" for rule, value in growth.items())
    return Verdict(HOLDS if held else FAILS, f"norm of the state after 100,000 steps over that after 1,000: {told}")


def _draw_stability(results: Results):
    figure, axes = panels(2)
    for i, rule in enumerate(RULES):
        first = select(results, rule=rule)[0]
        axes[0].plot(first["steps"], first["state_norm"], **style(i, rule))
        axes[1].plot(first["steps"], first["output_rms"], **style(i, rule))
    for axis, what in zip(axes, ("norm of the state", "root mean square of the output"), strict=True):
        axis.set_xscale("log")
        axis.set_yscale("log")
        label(axis, f"A long run: {what}", "tokens", what, legend=False)
    axes[0].legend(fontsize=8, loc="center right")
    return figure


STABILITY = Experiment(
    name="stability",
    title="A hundred thousand tokens",
    claim="An additive state grows without end; states that are edited or that forget stay within bounds.",
    method="Random q, k, v and write strengths for 100,000 tokens, K = V = 32, in fp32 through the package's own operations; "
    "decays as in fresh models (a fixed 0.01 a step for the scalar gate). Untrained, so it shows the rules, not a model.",
    points=lambda budget: [
        Point(f"{rule}, seed {seed}", long_run, {"rule": rule, "seed": seed})
        for rule in RULES
        for seed in range(1 if budget == "small" else 4)
    ],
    judge=_judge_stability,
    draw=_draw_stability,
)
