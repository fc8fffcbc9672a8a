"""Trained on the standard library's sources: residual streams over depth, router load, and all rungs as language models."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from ...modeling.moe import KimiRouter
from ...modeling.residual import DepthQuery
from ...training.balance import RouterBalanceCallback
from ..experiment import FAILS, HOLDS, OPEN, Experiment, Point, Results, Verdict, mean, select
from ..models import RUNGS, build, loss_of, shifted, sizes, train
from ..plots import STYLES, dots, label, panels, style
from ..tasks import Text

_BYTES = 2_000_000
RESIDUALS = ("sum", "block_attn_res", "full_attn_res")
# Nats a byte by which seeds of one such short run differ; stands in where there is only one seed.
_NOISE = 0.05


def _texts(model, text: Text, batch: int, length: int, seed: int):
    """The objective: loss on random windows of the training text."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return lambda step: loss_of(model, *shifted(text.batch(batch, length + 1, generator)))


@torch.no_grad()
def _held_out(model, text: Text, length: int) -> float:
    """Loss on 64 fixed windows of the held-out text, nats a byte."""
    model.eval()
    ids = text.test(64, length + 1)
    return mean(loss_of(model, *shifted(part)).item() for part in ids.split(16))


def depth(residual: str, seed: int, steps: int, layers: int, batch: int, length: int, rate: float) -> dict[str, Any]:
    """Train a deep narrow model; norms of states and gradients by layer, and how the depth queries spread."""
    text = Text(_BYTES)
    model = build(
        "gated-delta-net", seed, width=32, layers=layers, vocab=Text.vocab, length=length, residual=residual,
        **({"attn_res_block_size": max(1, layers // 4)} if residual == "block_attn_res" else {}),
    )  # fmt: skip
    gradients: list[list[float]] = []

    def watch(step: int) -> None:
        norms = [
            torch.stack([p.grad.norm() for p in layer.self_attn.parameters() if p.grad is not None]).norm().item()
            for layer in model.model.layers
        ]
        gradients.append(norms)

    losses = train(model, _texts(model, text, batch, length, seed), steps, rate, watch)
    ids, _ = shifted(text.test(8, length + 1))
    written, weights = _inside(model, ids)
    late = gradients[-max(1, steps // 4) :]
    return {
        "loss": losses,
        "held_out": _held_out(model, text, length),
        "hidden_rms": written,
        "gradient_norm": [mean(step[i] for step in late) for i in range(layers)],
        "depth_weights": weights,
        **sizes(model),
    }


@torch.no_grad()
def _inside(model, ids) -> tuple[list[float], list[list[float]]]:
    """RMS of what every layer's mixer reads, and every depth query's mean weights (sealed sources, then the open one)."""
    read, weights = [], []

    def norm(module, args):
        read.append(args[0].square().mean().sqrt().item())

    def spread(module, args):
        norm_weight, stream = args
        if not stream.bank:
            return
        sources = (
            torch.stack([*stream.bank[1:], stream.prefix])
            if stream.prefix is not None
            else torch.stack(stream.bank[1:])
        )
        unit = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + module.eps)
        share = torch.softmax(unit @ (norm_weight * module.weight[0]), dim=0)
        weights.append([round(x, 4) for x in share.mean(dim=(1, 2)).tolist()])

    handles = [layer.input_layernorm.register_forward_pre_hook(norm) for layer in model.model.layers]
    handles += [m.register_forward_pre_hook(spread) for m in model.modules() if isinstance(m, DepthQuery)]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return read, weights


def _judge_depth(results: Results) -> Verdict:
    rows = {residual: select(results, residual=residual) for residual in RESIDUALS}
    grew = {residual: mean(r["hidden_rms"][-1] / r["hidden_rms"][0] for r in found) for residual, found in rows.items()}
    uneven = {
        residual: mean(max(r["gradient_norm"]) / min(r["gradient_norm"]) for r in found)
        for residual, found in rows.items()
    }
    held_out = {residual: mean(r["held_out"] for r in found) for residual, found in rows.items()}
    spread = [statistics.stdev(r["held_out"] for r in found) for found in rows.values() if len(found) > 1]
    noise = max(spread, default=_NOISE)
    told = "; ".join(
        f"{r}: hidden RMS grows {grew[r]:.2f} x, gradients differ {uneven[r]:.1f} x between layers, held-out loss "
        f"{held_out[r]:.3f}"
        for r in RESIDUALS
    )
    if max(grew["block_attn_res"], grew["full_attn_res"]) >= grew["sum"]:
        return Verdict(FAILS, told)
    gains = [held_out["sum"] - held_out[r] for r in RESIDUALS[1:]]
    spreads = max(uneven[r] for r in RESIDUALS[1:]) < 0.8 * uneven["sum"]
    if spreads and min(gains) > noise:
        return Verdict(HOLDS, told)
    if min(gains) < -noise:
        return Verdict(FAILS, told)
    open_parts = [] if spreads else ["the spread of gradients"]
    open_parts += [] if min(gains) > noise else [f"the loss (seeds differ by {noise:.2f})"]
    return Verdict(OPEN, f"states stay level as claimed, but {' and '.join(open_parts)} do not separate here: {told}")


def _draw_depth(results: Results):
    figure, axes = panels(5, width=4.4, rows=2)
    for i, residual in enumerate(RESIDUALS):
        rows = select(results, residual=residual)
        layers = range(1, len(rows[0]["hidden_rms"]) + 1)
        axes[0].plot(layers, [mean(r["hidden_rms"][k - 1] for r in rows) for k in layers], **style(i, residual))
        axes[1].plot(layers, [mean(r["gradient_norm"][k - 1] for r in rows) for k in layers], **style(i, residual))
        smooth = rows[0]["loss"]
        window = max(1, len(smooth) // 20)
        averaged = [mean(smooth[max(0, k - window) : k + 1]) for k in range(len(smooth))]
        axes[2].plot(range(1, len(smooth) + 1), averaged, **{**style(i, residual), "marker": ""})
    axes[1].set_yscale("log")
    label(axes[0], "What a layer reads", "layer", "RMS of the hidden state")
    label(axes[1], "Gradients of the mixers", "layer", "gradient norm, last quarter of training")
    label(axes[2], "Training", "steps", "loss, nats a byte")
    for axis, residual in zip(axes[3:], RESIDUALS[1:], strict=True):
        weights = select(results, residual=residual)[0]["depth_weights"]
        grid = torch.full((len(weights), max(map(len, weights))), float("nan"))
        for row, shares in enumerate(weights):
            grid[row, : len(shares)] = torch.tensor(shares)
        image = axis.imshow(
            grid.numpy(), aspect="auto", cmap="cividis", vmin=0, origin="lower", interpolation="nearest"
        )
        axis.grid(False)
        figure.colorbar(image, ax=axis, label="mean weight")
        label(axis, f"Depth weights: {residual}", "source, oldest first", "read, bottom to top", legend=False)
    return figure


DEPTH = Experiment(
    name="depth",
    title="Reading over depth",
    claim="In a summed stream hidden states grow with depth; attention over depth keeps them level, spreads gradients, and "
    "trains better at equal compute.",
    method="Gated DeltaNet, narrow and deep, bytes of the standard library's sources; equal steps (depth attention costs a few "
    "per cent more of them). Blocks are a quarter of the layers. Held-out loss on the same windows for all.",
    points=lambda budget: [
        Point(
            f"{residual}, seed {seed}", depth,
            {"residual": residual, "seed": seed, "steps": steps, "layers": layers, "batch": 8, "length": 64, "rate": 5e-3},
        )
        for steps, layers, seeds in [(150, 12, 1) if budget == "small" else (600, 24, 2)]
        for residual in RESIDUALS
        for seed in range(seeds)
    ],
    judge=_judge_depth,
    draw=_draw_depth,
)  # fmt: skip

RULES = ("none", "sign", "quantile")


def router_load(rule: str, seed: int, steps: int, experts: int) -> dict[str, Any]:
    """Train a small MoE with a balancing rule; load and the share of each expert."""
    text, length = Text(_BYTES), 64
    model = build(
        "kimi-linear", seed, width=32, layers=2, vocab=Text.vocab, length=length, num_experts=experts,
        num_experts_per_token=2, moe_intermediate_size=32, feed_forward="moe",
    )  # fmt: skip
    balance = RouterBalanceCallback(
        "quantile" if rule == "none" else rule, update=rule != "none", rate=_RATES.get(rule)
    )
    balance.attach(model)
    uneven: list[float] = []
    losses = train(
        model, _texts(model, text, 16, length, seed), steps, 5e-3,
        lambda step: uneven.append(balance.step()["router/load_max_over_mean"]),
    )  # fmt: skip
    balance.detach()
    loads = _loads(model, shifted(text.test(32, length + 1))[0])
    return {"uneven": uneven, "loss": losses, "held_out": _held_out(model, text, length), "loads": loads}


_RATES = {"sign": 0.02}  # larger than the 0.001 of long runs, so that a short one shows what the rule does


@torch.no_grad()
def _loads(model, ids) -> list[list[float]]:
    """Per router, each expert's load over the mean load, on held-out text."""
    found = []

    def watch(module, args, output):
        counts = torch.bincount(output[2].reshape(-1), minlength=module.weight.shape[0]).float()
        found.append([round(x, 3) for x in (counts / counts.mean()).tolist()])

    handles = [m.register_forward_hook(watch) for m in model.modules() if isinstance(m, KimiRouter)]
    model.eval()
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def _judge_router(results: Results) -> Verdict:
    late = {rule: mean(mean(r["uneven"][-20:]) for r in select(results, rule=rule)) for rule in RULES}
    told = ", ".join(f"{rule} {value:.2f}" for rule, value in late.items())
    if late["none"] < 1.3:
        return Verdict(OPEN, f"the load stayed even by itself: {told}")
    held = max(late["sign"], late["quantile"]) < 0.8 * late["none"]
    return Verdict(HOLDS if held else FAILS, f"largest load over mean load, last 20 steps: {told}")


def _draw_router(results: Results):
    figure, axes = panels(2)
    for i, rule in enumerate(RULES):
        row = select(results, rule=rule)[0]
        axes[0].plot(range(1, len(row["uneven"]) + 1), row["uneven"], **{**style(i, rule), "marker": ""})
        for layer, loads in enumerate(row["loads"][:1]):
            axes[1].plot(
                range(1, len(loads) + 1), sorted(loads, reverse=True), **style(i, f"{rule}, layer {layer + 1}")
            )
    axes[0].axhline(1, color="grey", linestyle=":")
    axes[1].axhline(1, color="grey", linestyle=":")
    label(axes[0], "Router load in training", "steps", "largest load / mean load")
    label(axes[1], "Experts after training, held-out text", "expert, busiest first", "load / mean load")
    return figure


ROUTER = Experiment(
    name="router-load",
    title="Keeping experts busy",
    claim="A correction bias moved from outside the loss keeps the experts evenly loaded.",
    method="Two layers, 16 experts, 2 a token, bytes of the standard library's sources; no rule, the sign rule (rate 0.02), and "
    "K3's quantile rule.",
    points=lambda budget: [
        Point(f"{rule}, seed {seed}", router_load, {"rule": rule, "seed": seed, "steps": steps, "experts": 16})
        for steps, seeds in [(100, 1) if budget == "small" else (800, 2)]
        for rule in RULES
        for seed in range(seeds)
    ],
    judge=_judge_router,
    draw=_draw_router,
)


def language(
    rung: str, seed: int, steps: int, width: int, layers: int, batch: int, length: int, rate: float
) -> dict[str, Any]:
    """Train a rung on the sources; loss along the way and on held-out text."""
    text = Text(_BYTES)
    model = build(rung, seed, width=width, layers=layers, vocab=Text.vocab, length=length, **_equal_size(rung, width))
    losses = train(model, _texts(model, text, batch, length, seed), steps, rate)
    return {"loss": losses, "held_out": _held_out(model, text, length), **sizes(model)}


def _equal_size(rung: str, width: int) -> dict[str, Any]:
    """Feed-forwards that give every rung about the active parameters of GPT-2's 12 D^2 a layer."""
    if rung == "gated-delta-net":
        return {"intermediate_size": _eights(7 * width / 3)}
    if rung == "kimi-linear":
        experts = {"num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1}
        return {**experts, "intermediate_size": _eights(8 * width / 3), "moe_intermediate_size": _eights(3 * width / 4)}
    if rung == "kimi-k3":
        experts = {"num_experts": 8, "num_experts_per_token": 4, "num_shared_experts": 1}
        return {**experts, "intermediate_size": _eights(7 * width / 3), "moe_intermediate_size": _eights(2 * width / 3)}
    return {}


def _eights(x: float) -> int:
    return max(8, round(x / 8) * 8)


def _by_rung(results: Results) -> dict[str, tuple[float, float]]:
    found = {}
    for rung in RUNGS:
        losses = [r["held_out"] for r in select(results, rung=rung)]
        found[rung] = (mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0)
    return found


def _judge_language(results: Results) -> Verdict:
    found = _by_rung(results)
    told = ", ".join(f"{rung} {loss:.3f} (spread {spread:.3f})" for rung, (loss, spread) in found.items())
    order = [found[rung][0] for rung in RUNGS]
    noise = max(spread for _, spread in found.values())
    if max(order) - min(order) < 2 * noise:
        return Verdict(OPEN, f"seeds differ as much as rungs do: {told}")
    falling = all(after < before + noise for before, after in zip(order[1:], order[2:], strict=False))
    return Verdict(HOLDS if falling else FAILS, f"held-out loss, nats a byte: {told}")


def _draw_language(results: Results):
    figure, axes = panels(2)
    found = _by_rung(results)
    for rung in RUNGS:
        rows = select(results, rung=rung)
        window = max(1, len(rows[0]["loss"]) // 20)
        curves = [[mean(r["loss"][max(0, k - window) : k + 1]) for k in range(len(r["loss"]))] for r in rows]
        xs = range(1, len(curves[0]) + 1)
        axes[0].plot(xs, [mean(c[k - 1] for c in curves) for k in xs], **{**STYLES[rung], "marker": ""})
        low, high = ([f(c[k - 1] for c in curves) for k in xs] for f in (min, max))
        axes[0].fill_between(xs, low, high, color=STYLES[rung]["color"], alpha=0.2)
    label(axes[0], "Training (band: seeds)", "steps", "loss, nats a byte")
    dots(axes[1], list(found), [loss for loss, _ in found.values()], [spread for _, spread in found.values()])
    label(axes[1], "Held-out loss (lines: spread of seeds)", "", "nats a byte", legend=False)
    return figure


LANGUAGE = Experiment(
    name="language",
    title="All rungs as language models",
    claim="From linear attention upwards every rung models text at least as well as the one below it.",
    method="Bytes of the standard library's sources, equal tokens, about equal active parameters, two seeds, one learning rate "
    "for all; held-out windows are the same for all.",
    points=lambda budget: [
        Point(
            f"{rung}, seed {seed}", language,
            {"rung": rung, "seed": seed, "steps": steps, "width": width, "layers": 4, "batch": batch, "length": length,
             "rate": 5e-3},
        )
        for steps, width, batch, length in [(150, 64, 8, 64) if budget == "small" else (600, 96, 16, 128)]
        for rung in RUNGS
        for seed in range(2)
    ],
    judge=_judge_language,
    draw=_draw_language,
)  # fmt: skip
