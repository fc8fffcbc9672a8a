"""The language-model head: logits, or in training the loss of a few tokens at a time without keeping their logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import logging

from ..errors import ConfigError, ShapeError

logger = logging.get_logger(__name__)

IGNORED = -100


class CausalHead:
    """Logits and loss of a model with an `lm_head`; `set_chunked_loss` keeps the vocabulary from setting the peak."""

    _chunked_loss_tokens: int | None = None

    def set_chunked_loss(self, tokens: int | None = 1024) -> None:
        """Compute the training loss `tokens` positions at a time; None computes all logits at once again.

        While it is on, a forward in training mode with `labels` returns `logits=None`: the logits of a chunk are freed
        once its loss is known and computed again in the backward. With N tokens and V words the peak is
        `tokens * V` numbers instead of `N * V`, at the price of one more product with the head. Loss and gradients are
        those of the plain way, summed in another order. Evaluation, and a model with a `loss_function` of the user's,
        go the plain way.

        Raises:
            ConfigError: `tokens` is not a positive integer.
        """
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise ConfigError(f"set_chunked_loss(tokens={tokens!r}): give a number of tokens from 1 up, or None")
        self._chunked_loss_tokens = tokens

    def _logits_and_loss(
        self, hidden: Tensor, labels: Tensor | None, logits_to_keep: int | Tensor, **kwargs
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of hidden states (B, T, D) and labels (B, T): logits (B, T or fewer, V) and the mean loss; either may be None."""
        if labels is None:
            return self.lm_head(slice_logits_to_keep(hidden, logits_to_keep)), None
        own_loss = hasattr(self, "_loss_function")  # the user's, with labels as the user likes
        if not own_loss:
            _check_labels(labels, hidden, logits_to_keep)
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if self._chunked_loss_tokens and self.training and whole and not own_loss:
            logits = None
            loss = chunked_loss(hidden, self.lm_head, labels, tokens=self._chunked_loss_tokens, **kwargs)
        else:
            logits = self.lm_head(slice_logits_to_keep(hidden, logits_to_keep))
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if self.training:
            _warn_of_overflow(loss, hidden)
        return logits, loss


def chunked_loss(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    tokens: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """Next-token cross-entropy in fp32 of head(hidden), the mean over labels that are not `ignore_index`.

    Args:
        hidden: (B, T, D). labels: (B, T), shifted here unless `shift_labels` (B, T) are given.
        head: maps (n, D) to (n, V); called as a module, so that hooks, adapters and sharding act on it.
        tokens: positions whose logits exist at one time.
        num_items_in_batch: divides the sum instead of the number of labels (gradient accumulation).
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden.device)
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, wanted in zip(hidden.flatten(0, -2).split(tokens), targets.split(tokens), strict=True):
        total = total + checkpoint(_summed_loss, rows, wanted, head, ignore_index, use_reentrant=False)
    count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _summed_loss(rows: Tensor, wanted: Tensor, head: nn.Module, ignore_index: int) -> Tensor:
    return nn.functional.cross_entropy(head(rows).float(), wanted, ignore_index=ignore_index, reduction="sum")


def _check_labels(labels: Tensor, hidden: Tensor, logits_to_keep: int | Tensor) -> None:
    kept = hidden.shape[1] if isinstance(logits_to_keep, int) else logits_to_keep.numel()
    if isinstance(logits_to_keep, int) and logits_to_keep:
        kept = min(logits_to_keep, kept)
    if labels.shape != (hidden.shape[0], kept):
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)}, and the logits cover {(hidden.shape[0], kept)} (rows, tokens); give "
            f"one label per token, {IGNORED} where no loss is wanted (they are shifted here)"
        )


def _warn_of_overflow(loss: Tensor, hidden: Tensor) -> None:
    """Say what a loss that is not finite means in fp16. Only there is it looked at, which waits for the device."""
    if torch.compiler.is_compiling():
        return
    kind = hidden.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if torch.float16 in (hidden.dtype, autocast) and not bool(torch.isfinite(loss).all()):
        logger.warning_once(
            "The loss is not finite: in float16 an activation left its range of 65,504 (KDA's states stay in float32, but "
            "what is read from them is float16 again). Train in bfloat16 (bf16=True, dtype=torch.bfloat16) or in float32."
        )
