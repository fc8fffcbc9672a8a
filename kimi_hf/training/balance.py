"""Router balance without an auxiliary loss: the correction bias is moved from outside, between optimiser steps.

**Quantile balancing** (Kimi K3): with target load q = k T / E, expert j's bias becomes minus the (q+1)-th largest margin
s_ij - a_i over the tokens i of a batch, where the threshold a_i is the (k+1)-th largest of s_i + b; then the mean is taken
off. **Sign** (DeepSeek-V3): b_j += rate * sign(mean load - load_j). The bias only selects; it never enters the mixing
weights, is no parameter, and stays as it is in evaluation.

A quantile update is one sweep of coordinate descent on the dual of balanced assignment, minimise over a and b
sum_i (k a_i + sum_j max(0, s_ij + b_j - a_i)) - q sum_j b_j: the best a for the old b, then the best b for that a. Every
a_i between the k-th and the (k+1)-th largest of s_i + b is a best one. K3 takes the lower end; **quantile-middle** takes the
middle, and comes to even loads faster where many tokens are alike (docs/training.md has the numbers).

Source: kimi_k3.md 5.5; DeepSeek-V3 (arXiv 2412.19437) 2.1.2.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import ConfigError
from ..modeling.modeling_kimi_linear import KimiLinearModel
from ..modeling.modeling_ladder import LadderModel
from ..modeling.moe import KimiRouter

RULES = ("quantile", "quantile-middle", "sign")
_BINS = 4096


def _range(bias: Tensor) -> tuple[float, float]:
    """Ends of the margins: scores lie in [0, 1], thresholds in b + [0, 1]."""
    return -1.0 - float(bias.max()), 1.0 - float(bias.min())


def margin_histogram(scores: Tensor, bias: Tensor, top_k: int, middle: bool = False) -> Tensor:
    """Where the margins s_ij - a_i of every expert lie.

    Args:
        scores: (N, E) raw scores. bias: (E,). top_k: experts a token, fewer than E.
        middle: a_i lies in the middle of the top_k-th and the (top_k+1)-th largest of s_i + b, not at the latter.
    Returns:
        (E, bins) float64 counts, so that histograms of parts and of processes add up.
    """
    scores, bias = scores.double(), bias.double()
    experts, (low, high) = scores.shape[1], _range(bias)
    best = (scores + bias).topk(top_k + 1, dim=1).values
    threshold = best[:, -2:].mean(dim=1, keepdim=True) if middle else best[:, -1:]
    place = ((scores - threshold - low) / (high - low) * _BINS).floor().long().clamp_(0, _BINS - 1)
    flat = place + torch.arange(experts, device=place.device) * _BINS
    return torch.bincount(flat.reshape(-1), minlength=experts * _BINS).view(experts, _BINS).double()


def quantile_bias(histogram: Tensor, bias: Tensor, target: float) -> Tensor:
    """The bias that puts `target` tokens of every expert above its thresholds, mean zero.

    Args:
        histogram: (E, bins) of `margin_histogram`. bias: (E,) the bias that histogram was taken with.
        target: tokens an expert should get, k T / E.
    Returns:
        (E,) float64; exact up to the width of a bin, inside which margins are taken to be spread evenly.
    """
    low, high = _range(bias)
    from_top = histogram.flip(1)
    above = from_top.cumsum(1)
    reached = (above >= target).to(torch.int8).argmax(dim=1)
    upper = above.gather(1, reached[:, None]).squeeze(1)
    inside = from_top.gather(1, reached[:, None]).squeeze(1)
    part = ((target - (upper - inside)) / inside.clamp_min(1)).clamp(0, 1)
    margin = high - (reached.double() + part) * (high - low) / _BINS
    return -(margin - margin.mean())


class RouterStatistics:
    """What one router did since the last update: loads, and a histogram of margins per expert. Padding is left out.

    Args:
        router: the router. It is watched by a forward hook, in training mode only.
        real: "mask" holds the mask of the tokens of the running forward, or None.
        middle: see `margin_histogram`.
    """

    def __init__(self, router: KimiRouter, real: dict[str, Tensor | None], middle: bool = False):
        self.router, self.real, self.middle = router, real, middle
        self.handle = router.register_forward_hook(self._watch)
        self.reset()

    def reset(self) -> None:
        experts, device = self.router.weight.shape[0], self.router.e_score_correction_bias.device
        self.load = torch.zeros(experts, dtype=torch.float64, device=device)
        self.margins = torch.zeros(experts, _BINS, dtype=torch.float64, device=device)
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def _watch(self, router: KimiRouter, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        # Gradient checkpointing runs the layer again in the backward pass; only the first run counts.
        if not router.training or torch._C._current_graph_task_id() != -1:
            return
        logits, _, indices = output
        real = self.real.get("mask")
        if real is not None and real.numel() == logits.shape[0]:
            logits, indices = logits[real.reshape(-1)], indices[real.reshape(-1)]
        if logits.shape[0] == 0:
            return
        scores = (logits.sigmoid() if router.activation == "sigmoid" else logits.softmax(-1)).double()
        self.load += torch.bincount(indices.reshape(-1), minlength=scores.shape[1])[: scores.shape[1]]
        share = scores / scores.sum(dim=1, keepdim=True)
        self.entropy += -(share * share.clamp_min(1e-30).log()).sum()
        self.tokens += scores.shape[0]
        if router.top_k < scores.shape[1]:
            self.margins += margin_histogram(scores, router.e_score_correction_bias, router.top_k, self.middle)

    def reduce(self) -> None:
        """Add the statistics of all processes."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            for tensor in (self.load, self.margins, self.entropy, self.tokens):
                dist.all_reduce(tensor)

    def summary(self) -> dict[str, float]:
        """max/mean load, normalised entropy of the scores (1 is uniform), and how many experts got nothing."""
        experts = self.load.numel()
        mean = self.load.mean().clamp_min(1e-12)
        return {
            "load_max_over_mean": float(self.load.max() / mean),
            "entropy": float(self.entropy / self.tokens.clamp_min(1) / torch.log(torch.tensor(float(experts)))),
            "dead_experts": float((self.load == 0).sum()),
        }

    def quantile_bias(self) -> Tensor:
        """(E,) float64: the bias that would have given every expert the target load, mean zero. After `reduce`."""
        target = self.router.top_k * float(self.tokens) / self.load.numel()
        return quantile_bias(self.margins, self.router.e_score_correction_bias, target)


class RouterBalanceCallback(TrainerCallback):
    """Keeps the experts of every MoE layer evenly loaded while a Trainer trains, and logs how even they are.

    Statistics are collected over all micro-batches of a step and all processes; the bias changes after the optimiser
    step and acts from the next forward on.

    Args:
        rule: "quantile" (the default, K3's), "quantile-middle" or "sign".
        rate: step of the sign rule; for the others, how far to move towards the new bias (1, the default, is all the way;
            less averages over batches, and lags behind scores that move).
        update: False only measures and logs.
    Raises:
        ConfigError: an unknown rule; at the start of training: a model without experts.
    """

    def __init__(self, rule: str = "quantile", rate: float | None = None, update: bool = True):
        if rule not in RULES:
            raise ConfigError(f"rule must be one of {RULES}, got {rule!r}")
        self.rule, self.update = rule, update
        self.rate = rate if rate is not None else (1e-3 if rule == "sign" else 1.0)
        self.statistics: dict[str, RouterStatistics] = {}
        self.last: dict[str, float] = {}
        self._handles: list[Any] = []

    def attach(self, model: nn.Module) -> None:
        """Start watching every router of `model`.

        Raises:
            ConfigError: there is none.
        """
        self.detach()
        real: dict[str, Tensor | None] = {"mask": None}
        for name, module in model.named_modules():
            if isinstance(module, KimiRouter):
                self.statistics[name] = RouterStatistics(module, real, middle=self.rule == "quantile-middle")
            elif isinstance(module, (KimiLinearModel, LadderModel)):
                self._handles.append(module.register_forward_pre_hook(_remember_mask(real), with_kwargs=True))
        if not self.statistics:
            raise ConfigError(
                "RouterBalanceCallback: the model has no routed experts (num_experts is null); leave it out"
            )

    def detach(self) -> None:
        """Stop watching."""
        for handle in (*self._handles, *(s.handle for s in self.statistics.values())):
            handle.remove()
        self._handles, self.statistics = [], {}

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Move every bias by what was seen since the last call; returns the averages over layers, for a log."""
        summaries = []
        for statistics in self.statistics.values():
            statistics.reduce()
            if float(statistics.tokens) == 0:
                continue
            summaries.append(statistics.summary())
            if self.update:
                self._move(statistics)
            statistics.reset()
        if summaries:
            self.last = {f"router/{key}": sum(s[key] for s in summaries) / len(summaries) for key in summaries[0]}
            self.last["router/worst_load_max_over_mean"] = max(s["load_max_over_mean"] for s in summaries)
        return self.last

    def _move(self, statistics: RouterStatistics) -> None:
        bias = statistics.router.e_score_correction_bias
        if self.rule == "sign":
            change = torch.sign(statistics.load.mean() - statistics.load) * self.rate
            bias += change.to(bias.dtype)
        else:
            new = statistics.quantile_bias().to(bias.dtype)
            bias += self.rate * (new - bias)

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        self.attach(model)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.step()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.detach()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs is not None and "loss" in logs and self.last:
            logs.update(self.last)
            if state.log_history:
                state.log_history[-1].update(self.last)


def _remember_mask(real: dict[str, Tensor | None]):
    """A forward pre-hook that keeps the 2-D mask of the tokens a forward brings."""

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        inputs = kwargs.get("input_ids", args[0] if args else None)
        inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
        plain = isinstance(mask, Tensor) and mask.ndim == 2 and inputs is not None
        real["mask"] = mask[:, -inputs.shape[1] :].bool() if plain else None

    return hook
