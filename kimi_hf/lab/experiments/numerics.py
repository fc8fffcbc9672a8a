"""Recurrent and chunked forms of one rule: equal results, different cost."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ...ops.delta_rule import delta_rule
from ...ops.kda import kda, l2_normalize
from ...ops.linear_attention import linear_attention
from ..experiment import FAILS, HOLDS, Experiment, Point, Results, Verdict, select
from ..plots import BLACK, BLUE, ORANGE, label, panels, style

RULES = ("linear attention", "delta rule", "gated delta rule", "KDA")
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}


def _call(rule: str, inputs: list[Tensor], backend: str) -> Tensor:
    q, k, v, gate, beta = inputs
    if rule == "linear attention":
        return linear_attention(q, k, v, backend=backend)[0]
    if rule == "KDA":
        heads, width = k.shape[2:]
        return kda(
            q, k, v, gate, beta, A_log=torch.zeros(heads), dt_bias=torch.full((heads * width,), -3.0), backend=backend
        )[0]  # fmt: skip
    g = -torch.nn.functional.softplus(gate[..., 0].float() - 3) if rule == "gated delta rule" else None
    return delta_rule(l2_normalize(q), l2_normalize(k), v, torch.sigmoid(beta.float()), g=g, backend=backend)[0]


def compare(rule: str, length: int, dtype: str, seed: int) -> dict[str, Any]:
    """Largest difference between the token-by-token definition and the chunked form, over the largest entry."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, length, 2, 32)] * 4 + [(1, length, 2)]
    inputs = [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes]
    cotangent = torch.randn(shapes[2], generator=generator)
    found = {}
    for backend in ("reference", "eager"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o = _call(rule, leaves, backend)
        (o.float() * cotangent).sum().backward()
        found[backend] = [o.detach(), *(x.grad for x in leaves[:3])]
    # Gradients are measured against the largest of all three: one of them may be zero by definition (T = 1).
    pairs = list(zip(found["eager"], found["reference"], strict=True))
    off = [float((a.float() - b.float()).abs().max()) for a, b in pairs]
    largest = [float(b.float().abs().max()) for _, b in pairs]
    return {"values": off[0] / largest[0], "gradients": max(off[1:]) / max(largest[1:])}


def _judge_equality(results: Results) -> Verdict:
    worst = {dtype: max(max(r["values"], r["gradients"]) for r in select(results, dtype=dtype)) for dtype in LIMITS}
    held = all(worst[dtype] <= limit for dtype, limit in LIMITS.items())
    told = ", ".join(f"{dtype} {worst[dtype]:.1e} (allowed {limit:.0e})" for dtype, limit in LIMITS.items())
    return Verdict(HOLDS if held else FAILS, f"largest relative difference of values and gradients: {told}")


def _draw_equality(results: Results):
    figure, axes = panels(2)
    for axis, what in zip(axes, ("values", "gradients"), strict=True):
        for i, rule in enumerate(RULES):
            for dtype, line in (("float32", "-"), ("bfloat16", "--")):
                rows = select(results, rule=rule, dtype=dtype)
                lengths = [r["arguments"]["length"] for r in rows]
                look = style(i, rule if dtype == "float32" else None)
                if dtype == "bfloat16":
                    look["label"] = "_"
                axis.plot(range(len(rows)), [max(r[what], 1e-8) for r in rows], linestyle=line, **look)
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yscale("log")
        label(axis, f"Chunked against recurrent: {what}", "tokens", "largest difference / largest entry")
    figure.supxlabel("solid: fp32, dashed: bf16; exact equality is drawn at 1e-8", fontsize=9)
    return figure


EQUALITY = Experiment(
    name="equality",
    title="Recurrent and chunked are one rule",
    claim="The chunked form gives the recurrence's values and gradients, at any length and dtype, to rounding.",
    method="Random inputs, 2 heads of 32; the package's token-by-token definitions against its chunked operations, values and "
    "gradients of q, k, v.",
    points=lambda budget: [
        Point(f"{rule}, T {T}, {dtype}", compare, {"rule": rule, "length": T, "dtype": dtype, "seed": 0})
        for rule in RULES
        for dtype in LIMITS
        for T in ((1, 7, 63, 64, 65, 200) if budget == "small" else (1, 7, 63, 64, 65, 200, 1000, 3000))
    ],
    judge=_judge_equality,
    draw=_draw_equality,
)


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The WY form of the delta rule with a chosen chunk length, written for counting: q, k, v (H, L, d), beta (H, L).

    Within a chunk, u = (I + tril(diag(beta) k k^T, -1))^-1 diag(beta) (v - k S); o = q S + tril(q k^T) u; S += k^T u.
    """
    heads, length, width = k.shape
    S = k.new_zeros(heads, width, v.shape[-1])
    eye = torch.eye(chunk)
    outputs = []
    for start in range(0, length, chunk):
        part = slice(start, start + chunk)
        qc, kc, vc, bc = q[:, part], k[:, part], v[:, part], beta[:, part, None]
        system = eye + torch.tril(bc * (kc @ kc.transpose(1, 2)), -1)
        u = torch.linalg.solve_triangular(system, bc * (vc - kc @ S), upper=False, unitriangular=True)
        outputs.append(qc @ S + torch.tril(qc @ kc.transpose(1, 2)) @ u)
        S = S + kc.transpose(1, 2) @ u
    return torch.cat(outputs, dim=1)


def chunk_cost(chunk: int, length: int, width: int, repeats: int, seed: int) -> dict[str, Any]:
    """Counted multiply-adds of the matrix products, and the time of a forward, at one chunk length."""
    generator = torch.Generator().manual_seed(seed)
    heads = 4
    q, k, v = (torch.randn(heads, length, width, generator=generator) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.rand(heads, length, generator=generator)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            chunked_delta_rule(q, k, v, beta, chunk)
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            chunked_delta_rule(q, k, v, beta, chunk)
            times.append(time.perf_counter() - begun)
    products = counter.get_total_flops() / 2 / heads
    return {"products": products, "solve": length * chunk * width / 2, "milliseconds": 1e3 * statistics.median(times)}


def _judge_chunks(results: Results) -> Verdict:
    rows = list(results.values())
    fewest = min(rows, key=lambda r: r["products"])["arguments"]["chunk"]
    fastest = min(rows, key=lambda r: r["milliseconds"])
    formula = max(abs(r["products"] / _formula(r["arguments"]) - 1) for r in rows)
    held = fastest["arguments"]["chunk"] > fewest and formula < 0.01
    return Verdict(
        HOLDS if held else FAILS,
        f"counted products follow 3 L d^2 + 3 L C d within {100 * formula:.1f} %, so C = {fewest} needs fewest; the fastest is "
        f"C = {fastest['arguments']['chunk']} at {fastest['milliseconds']:.1f} ms",
    )


def _formula(arguments: dict[str, Any]) -> float:
    """k S, q S, k^T u cost L d^2 each; k k^T, q k^T and its product with u cost L C d each."""
    L, C, d = arguments["length"], arguments["chunk"], arguments["width"]
    return 3 * L * d * d + 3 * L * C * d


def _draw_chunks(results: Results):
    figure, (axis,) = panels(1, width=7)
    rows = list(results.values())
    xs = [r["arguments"]["chunk"] for r in rows]
    axis.plot(xs, [r["products"] / 1e6 for r in rows], color=BLUE, marker="o", label="counted products a head")
    L, d = rows[0]["arguments"]["length"], rows[0]["arguments"]["width"]
    axis.plot(xs, [_formula(r["arguments"]) / 1e6 for r in rows], color=BLACK, linestyle=":", label="3 L d² + 3 L C d")
    causal = [(2 * L * d * d + 2 * L * c * d) / 1e6 for c in xs]
    axis.plot(xs, causal, color="grey", linestyle="--", label="2 L d² + 2 L C d (the article's count)")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    label(axis, f"Chunk length, L = {L}, d = {d}", "chunk length C", "million multiply-adds a head")
    times = axis.twinx()
    times.grid(False)
    times.plot(xs, [r["milliseconds"] for r in rows], color=ORANGE, marker="s", label="measured time (right)")
    times.set_ylabel("milliseconds, one thread")
    times.set_ylim(bottom=0)
    lines = [*axis.get_lines(), *times.get_lines()]
    axis.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)
    return figure


CHUNKS = Experiment(
    name="chunk-size",
    title="The length of a chunk",
    claim="Work grows linearly with the chunk length (a term in L d² and one in L C d), yet the fastest chunk is not the "
    "shortest: hardware likes large products.",
    method="The WY form of the delta rule written plainly, 4 heads, one thread; products counted by PyTorch's flop counter (it "
    "does not see the triangular solve, another L C d / 2), time as the median of several forwards. The article's count leaves "
    "out products that its notation shares or halves by causality.",
    points=lambda budget: [
        Point(f"C {chunk}", chunk_cost, {"chunk": chunk, "length": length, "width": 64, "repeats": repeats, "seed": 0})
        for length, repeats in [(2048, 5) if budget == "small" else (8192, 9)]
        for chunk in (2, 4, 8, 16, 32, 64, 128, 256, 512)
    ],
    judge=_judge_chunks,
    draw=_draw_chunks,
    alone=True,
)
