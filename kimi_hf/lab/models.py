"""Small ladder models of comparable size, and the one loop that trains them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..configuration import LadderConfig, census
from ..modeling.modeling_ladder import LadderForCausalLM
from .tasks import IGNORED

RUNGS = ("gpt2", "linear-transformer", "delta-net", "gated-delta-net", "kimi-linear", "kimi-k3")
HYBRID = ["kimi_delta_attention", "latent_attention"]


def build(
    rung: str, seed: int, *, width: int, layers: int, vocab: int, length: int, **changes: Any
) -> LadderForCausalLM:
    """A small model of a rung; equal seeds give equal weights.

    The Kimi rungs alternate KDA and MLA when they have fewer than four layers. Weights start wider than GPT-2's 0.02,
    which belongs to widths of hundreds.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 32),
        "max_position_embeddings": length,
        "initializer_range": 0.5 * width**-0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if rung.startswith("kimi") and layers < 4:
        fields["mixer"] = HYBRID
    torch.manual_seed(seed)
    return LadderForCausalLM(LadderConfig.rung(rung, **{**fields, **changes}))


def sizes(model: LadderForCausalLM) -> dict[str, int]:
    """Parameters, those one token uses, and the numbers a sequence leaves behind: constant ones and per token."""
    counted = census(model.config)
    return {
        "parameters": counted.total,
        "activated": counted.activated,
        "state_numbers": counted.state_bytes // 4 + counted.conv_state_bytes // 2,
        "numbers_per_token": counted.cache_bytes_per_token // 2,
    }


def train(
    model: LadderForCausalLM,
    objective: Callable[[int], Tensor],
    steps: int,
    rate: float,
    watch: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """AdamW with warm-up and a cosine to zero; returns every step's loss.

    Args:
        objective: step -> the loss of that step's batch.
        watch: called after every backward pass, before the optimiser moves.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / max(1, steps // 10))
            group["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = objective(step)
        optimizer.zero_grad()
        loss.backward()
        watch(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(round(loss.item(), 5))
    model.eval()
    return losses


def loss_of(model: LadderForCausalLM, ids: Tensor, labels: Tensor, added: Tensor | None = None) -> Tensor:
    """Cross entropy where there are labels, which stand where their logits stand."""
    logits = _logits(model, ids, added)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def accuracy(model: LadderForCausalLM, ids: Tensor, labels: Tensor, added: Tensor | None = None) -> float:
    """Share of labelled positions where the likeliest token is the label."""
    asked = labels != IGNORED
    hit = _logits(model, ids, added).argmax(-1) == labels
    return round(hit[asked].float().mean().item(), 5)


def _logits(model: LadderForCausalLM, ids: Tensor, added: Tensor | None) -> Tensor:
    """Logits (B, T, vocabulary); the embeddings of `added` (B, T) are added to those of `ids`."""
    embeddings = model.get_input_embeddings()
    embeds = embeddings(ids) if added is None else embeddings(ids) + embeddings(added)
    return model(inputs_embeds=embeds, use_cache=False).logits


def shifted(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Windows of text as (input, next tokens)."""
    return ids[:, :-1], ids[:, 1:].contiguous()


def thinned(losses: list[float], parts: int = 25) -> list[float]:
    """Means over about `parts` equal stretches, for a curve."""
    stretch = max(1, len(losses) // parts)
    return [round(sum(x) / len(x), 5) for x in (losses[i : i + stretch] for i in range(0, len(losses), stretch))]
