"""Synthetic tasks and text: what the lab's models are trained and tested on. Everything follows from a seed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

IGNORED = -100
_POWER = 0.1  # queries come soon after the pairs, with a tail: gap x is drawn with weight power * x^(power - 1)


def recall(batch: int, length: int, pairs: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall: k1 v1 k2 v2 ... and later each key once more, asking for its value.

    Keys are drawn without replacement from the lower half of the vocabulary (0 is filler), values from the upper half.
    Position 2 N + 2 gap holds a query; the model must say the value right there. Everything else is filler.

    Args:
        batch: B. length: T, at least 4 N. pairs: N, fewer than vocab / 2.
    Returns:
        input_ids (B, T); labels (B, T), the value at queries and -100 elsewhere, not shifted.
    Source: MQAR of Zoology (arXiv 2312.04927), Appendix; written from the definition.
    """
    half = vocab // 2
    slots = (length - 2 * pairs) // 2
    keys = 1 + torch.rand(batch, half - 1, generator=generator).argsort(1)[:, :pairs]
    values = half + torch.randint(vocab - half, (batch, pairs), generator=generator)
    ids = torch.zeros(batch, length, dtype=torch.long)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    weights = _POWER * torch.arange(1, slots + 1, dtype=torch.float) ** (_POWER - 1)
    gaps = torch.multinomial(weights.expand(batch, -1), pairs, generator=generator)
    where = 2 * pairs + 2 * gaps
    labels = torch.full_like(ids, IGNORED)
    ids.scatter_(1, where, keys)
    labels.scatter_(1, where, values)
    return ids, labels


def bound_recall(
    batch: int, pairs: int, queries: int, vocab: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Recall of pairs that arrive as one token each: memory alone, without having to find out which value follows a key.

    Args:
        pairs: N, fewer than vocab / 2. queries: how many keys are asked for afterwards.
    Returns:
        first (B, N + queries), keys and queried keys; second (B, N + queries), their values and 0 for queries: the
        embeddings of the two are added. labels (B, N + queries), the value at queries and -100 elsewhere.
    """
    half = vocab // 2
    keys = 1 + torch.rand(batch, half - 1, generator=generator).argsort(1)[:, :pairs]
    values = half + torch.randint(vocab - half, (batch, pairs), generator=generator)
    asked = torch.randint(pairs, (batch, queries), generator=generator)
    first = torch.cat([keys, keys.gather(1, asked)], dim=1)
    second = torch.cat([values, torch.zeros_like(asked)], dim=1)
    labels = torch.cat([torch.full_like(keys, IGNORED), values.gather(1, asked)], dim=1)
    return first, second, labels


def switching(
    batch: int, length: int, pairs: int, vocab: int, contexts: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Recall in contexts: each tells its own pairs, some of them under keys that had other values before, and asks for them.

    Token 0 opens a context. What earlier contexts said is of no use any more, and in the way.

    Returns: as `recall`; a query asks for the value that its own context gave.
    """
    half, span = vocab // 2, length // contexts
    ids = torch.zeros(batch, length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for context in range(contexts):
        start = context * span + 1
        keys = 1 + torch.rand(batch, half - 1, generator=generator).argsort(1)[:, :pairs]
        values = half + torch.randint(vocab - half, (batch, pairs), generator=generator)
        ids[:, start : start + 2 * pairs : 2], ids[:, start + 1 : start + 2 * pairs : 2] = keys, values
        order = torch.rand(batch, pairs, generator=generator).argsort(1)
        at = start + 2 * pairs
        asked = min(pairs, span - 1 - 2 * pairs)
        ids[:, at : at + asked] = keys.gather(1, order)[:, :asked]
        labels[:, at : at + asked] = values.gather(1, order)[:, :asked]
    return ids, labels


def source_text(limit: int) -> bytes:
    """The sources of Python's standard library, files in order of name, cut to `limit` bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


class Text:
    """Bytes as tokens, the last tenth held out.

    Args:
        limit: how many bytes to read.
    """

    vocab = 256

    def __init__(self, limit: int):
        data = torch.frombuffer(bytearray(source_text(limit)), dtype=torch.uint8).long()
        cut = len(data) * 9 // 10
        self.train, self.held_out = data[:cut], data[cut:]

    def batch(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """(B, T) random windows of the training text."""
        starts = torch.randint(len(self.train) - length, (batch,), generator=generator)
        return torch.stack([self.train[start : start + length] for start in starts.tolist()])

    def test(self, batch: int, length: int) -> Tensor:
        """(B, T) windows of the held-out text, evenly spaced: the same for everybody."""
        starts = torch.linspace(0, len(self.held_out) - length, batch).long()
        return torch.stack([self.held_out[start : start + length] for start in starts.tolist()])
