"""Which tokens of a forward are real, and where documents begin: decided once, used by every mixer.

A mixer that carries a state over time must not let padding touch it, and packed documents must not see each other.
No mixer reads a mask for that; it asks the `SequenceLayout` built here to lay its inputs out so that each sequence
is contiguous, and to put the outputs back.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask
from transformers.utils import is_torchdynamo_compiling

from ..errors import CacheError, ShapeError
from ..ops.continued_attention import worth_continuing

# A gate logit so low that the gate is exactly 0 in every dtype, and finite so that no gradient becomes NaN.
_SHUT = -6.0e4


class PaddedRows:
    """One sequence per row, with padding anywhere: real tokens move to the front, the rest neither decays nor writes.

    Shapes do not depend on the mask's values, so this works under `torch.compile` and without a host sync.

    Args:
        real: (B, T) bool, True where the token is real.
    """

    cu_seqlens = None

    def __init__(self, real: Tensor):
        self.real = real
        self.order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
        self.inverse = torch.argsort(self.order, dim=1)
        self.lengths = real.sum(dim=1)
        self.tail = torch.arange(real.shape[1], device=real.device) >= self.lengths[:, None]

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, C) in token order -> (B, T, C) with each row's real tokens first."""
        return x.gather(1, self.order[..., None].expand(-1, -1, x.shape[-1]))

    def unpack(self, y: Tensor) -> Tensor:
        """(B, T, C) as `pack` laid it out -> token order, zero at padding."""
        y = y.gather(1, self.inverse[..., None].expand(-1, -1, y.shape[-1]))
        return y.masked_fill(~self.real[..., None], 0)

    def shut(self, logits: Tensor) -> Tensor:
        """Close a packed gate (B, T, C) at the padding: no decay, no write."""
        return logits.masked_fill(self.tail[..., None], _SHUT)

    def last_inputs(self, before: Tensor | None, x: Tensor, width: int) -> Tensor:
        """The last `width` real inputs of each row, oldest first.

        Args:
            before: (B, C, width) inputs that came before, or None for none.
            x: (B, T, C), packed.
        Returns:
            (B, C, width)
        """
        if before is None:
            before = x.new_zeros(x.shape[0], x.shape[2], width)
        whole = torch.cat([before.to(x.dtype), x.transpose(1, 2)], dim=-1)
        columns = self.lengths[:, None] + torch.arange(width, device=x.device)
        return whole.gather(2, columns[:, None, :].expand(-1, x.shape[2], -1))


class PackedDocuments:
    """Several documents behind one another in a row: laid out as one row with cumulative lengths.

    Args:
        starts: (B, T) bool, True at the first token of each document (also at each row's first real token).
        real: (B, T) bool or None, True where the token is real.
    """

    def __init__(self, starts: Tensor, real: Tensor | None = None):
        self.shape = starts.shape
        flat = starts.reshape(-1)
        self.indices = None
        if real is not None:
            self.indices = real.reshape(-1).nonzero().squeeze(1)
            flat = flat[self.indices]
        begins = flat.nonzero().squeeze(1)
        self.cu_seqlens = torch.cat([begins, begins.new_tensor([flat.shape[0]])]).to(torch.int32)

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (1, n, C): the real tokens of all rows behind one another."""
        x = x.reshape(1, -1, x.shape[-1])
        return x if self.indices is None else x[:, self.indices]

    def unpack(self, y: Tensor) -> Tensor:
        """(1, n, C) -> (B, T, C), zero at padding."""
        if self.indices is not None:
            whole = y.new_zeros(1, self.shape[0] * self.shape[1], y.shape[-1])
            y = whole.index_copy(1, self.indices, y)
        return y.reshape(*self.shape, y.shape[-1])

    def shut(self, logits: Tensor) -> Tensor:
        """Nothing to close: padding was left out by `pack`."""
        return logits

    def positions(self) -> Tensor:
        """(B, T): how far each token is into its document; 0 at padding."""
        bounds = self.cu_seqlens.long()
        tokens = torch.arange(int(bounds[-1]), device=bounds.device)
        inside = tokens - torch.repeat_interleave(bounds[:-1], bounds.diff())
        return self.unpack(inside[None, :, None])[..., 0]


SequenceLayout = PaddedRows | PackedDocuments


@dataclass
class MaskInfo:
    """What one forward's masks say, in the form each kind of mixer wants.

    Attributes:
        attention: the mask for softmax mixers, in the form the chosen attention implementation takes (or None).
        layout: how recurrent mixers lay out their inputs; None when every row is one sequence without padding.
        flash_kwargs: cumulative lengths for flash attention on packed documents.
        real: (B, S) bool or integers, which tokens are real, cached ones included; None when all are, or nobody knows.
        continues: there is no mask because every query sees the whole past and, causally, the new tokens: softmax mixers
            use `continued_attention`.
    """

    attention: Any = None
    layout: SequenceLayout | None = None
    flash_kwargs: dict[str, Any] | None = None
    real: Tensor | None = None
    continues: bool = False


def build_mask_info(
    config,
    inputs_embeds: Tensor,
    attention_mask: Tensor | dict | None,
    past_key_values,
    position_ids: Tensor | None,
    packing: dict[str, Any],
) -> MaskInfo:
    """Read the masks of one forward once.

    Args:
        inputs_embeds: (B, T, D).
        attention_mask: (B, S) with S the cached length plus T (or just T), 1 for real tokens; a ready 4-D mask; or the
            dict of ready masks that `generate` makes for static caches.
        past_key_values: the cache, or None.
        position_ids: (B, T) or (1, T); restarts at 0 mark packed documents.
        packing: `cu_seq_lens_q`, `cu_seq_lens_k`, `seq_idx`, as collators emit them; other keys are ignored.
    Raises:
        ShapeError: a mask or a set of boundaries that does not fit the input, or boundaries that disagree.
        CacheError: packed documents together with a cache.
    """
    batch, length = inputs_embeds.shape[:2]
    if hasattr(past_key_values, "check_model"):
        past_key_values.check_model(config, batch)
    if isinstance(attention_mask, dict):
        layout = padded_layout(attention_mask.get("linear_attention"), length)
        return MaskInfo(attention_mask.get("full_attention"), layout)
    past = cached_length(past_key_values)
    attention_mask = _full_mask(attention_mask, past_key_values, past, batch, length)
    starts = document_starts(batch, length, attention_mask, position_ids, packing, inputs_embeds.device, past)
    if starts is not None:
        if past_key_values is not None:
            raise CacheError(
                "packed documents (restarting position_ids, cu_seq_lens or seq_idx) cannot fill a cache: one row holds "
                "several sequences. Pass use_cache=False and no past_key_values, or one document per row"
            )
        return _packed_mask_info(config, inputs_embeds, attention_mask, starts)
    layout = real = None
    if attention_mask is not None and attention_mask.ndim == 2:
        layout, real = padded_layout(attention_mask, length), attention_mask
    attention = None
    if attention_mask is None and _continues(config, inputs_embeds, past_key_values, past):
        return MaskInfo(None, continues=True)
    if "full_attention" in config.layer_types:
        if length == 1 and real is not None and isinstance(past, int) and _would_wait(config, inputs_embeds):
            attention = real[:, None, None].bool()  # one query sees every real token
        else:
            attention = create_causal_mask(
                config=config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
            )
    return MaskInfo(attention, layout, real=real)


def _would_wait(config, inputs_embeds: Tensor) -> bool:
    """Whether making the mask would ask an accelerator if there is padding at all, and wait for the answer."""
    on_accelerator = inputs_embeds.device.type != "cpu" and not is_torchdynamo_compiling()
    return on_accelerator and config._attn_implementation == "sdpa"


def _continues(config, inputs_embeds: Tensor, cache, past: int | Tensor) -> bool:
    """Whether several tokens follow a growing cache and no mask is needed to say so."""
    if not hasattr(cache, "check_model") or config._attn_implementation != "sdpa" or config.attention_dropout:
        return False  # others' caches may hold more than they were given, other attentions bring their own masks
    return isinstance(past, int) and worth_continuing(inputs_embeds, inputs_embeds.shape[1], past)


def cached_length(cache) -> int | Tensor:
    """How many tokens `cache` holds (a tensor for static ones), 0 without one.

    Raises:
        CacheError: it cannot say, because it is a plain one and all layers are recurrent.
    """
    if cache is None:
        return 0
    try:
        return cache.get_seq_length()
    except ValueError as error:
        raise CacheError(
            f"this {type(cache).__name__} cannot say how many tokens it holds, because the model has recurrent layers only. "
            "Pass past_key_values=kimi_hf.KimiCache(model.config), or none at all"
        ) from error


def token_positions(
    mask_info: MaskInfo, position_ids: Tensor | None, past_key_values, length: int, device: torch.device
) -> Tensor:
    """The position of every present token, (B, T) or (1, T): as given, or counted over real tokens of its document."""
    if position_ids is not None:
        return position_ids
    if isinstance(mask_info.layout, PackedDocuments):
        return mask_info.layout.positions()
    if mask_info.real is not None:
        return (mask_info.real.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
    return (cached_length(past_key_values) + torch.arange(length, device=device))[None]


def _full_mask(mask: Tensor | None, cache, past: int | Tensor, batch: int, length: int) -> Tensor | None:
    """The mask over cached and new tokens: what was given, completed by the padding that the cache remembers."""
    if mask is not None and mask.ndim not in (2, 4):
        raise ShapeError(f"attention_mask must have 2 or 4 dimensions, got shape {tuple(mask.shape)}")
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is not None and (mask.shape[0] != batch or mask.shape[1] < length):
        raise ShapeError(
            f"attention_mask has shape {tuple(mask.shape)}, but the input has {batch} rows of {length} tokens; give one "
            "column per token, cached ones included"
        )
    if mask is not None:
        _check_ones_and_zeros(mask)
    remembers = hasattr(cache, "padding_mask")
    known = cache.padding_mask if remembers else None
    if isinstance(past, int) and past:
        if mask is None and known is not None:
            mask = torch.ones(batch, length, dtype=torch.bool, device=known.device)
        if mask is not None and length < mask.shape[1] < past + length:
            raise ShapeError(
                f"attention_mask has {mask.shape[1]} columns, but {past} tokens are cached and {length} are new; give one "
                f"column per token ({past + length}), or for the new ones only ({length})"
            )
        if mask is not None and mask.shape[1] < past + length:
            new = mask[:, -length:].bool()
            if known is None:
                known = torch.ones(batch, past, dtype=torch.bool, device=new.device)
            mask = torch.cat([known, new], dim=1)
    if mask is not None and isinstance(past, int):
        mask = mask[:, -(past + length) :]
    if remembers:
        cache.remember_padding(mask)
    return mask


def _check_ones_and_zeros(mask: Tensor) -> None:
    """Refuse a mask that numbers documents; on an accelerator the question would wait for the device."""
    if mask.dtype == torch.bool or mask.device.type != "cpu" or is_torchdynamo_compiling():
        return
    if mask.numel() and bool(((mask != 0) & (mask != 1)).any()):
        raise ShapeError(
            f"attention_mask holds values from {mask.min().item()} to {mask.max().item()}; give 1 for real tokens and 0 for "
            "padding. Documents packed into one row are told by position_ids that restart, cu_seq_lens_q/k or seq_idx"
        )


def padded_layout(mask: Tensor | None, length: int) -> PaddedRows | None:
    """The layout for a 2-D mask whose last `length` columns are the present tokens; None when all of them are real."""
    if mask is None:
        return None
    real = mask[:, -length:].bool()
    # The question costs a host sync on an accelerator and breaks a graph; there the general layout is used instead.
    if not is_torchdynamo_compiling() and real.device.type == "cpu" and bool(real.all()):
        return None
    return PaddedRows(real)


def document_starts(
    batch: int,
    length: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    packing: dict[str, Any],
    device: torch.device,
    past: int | Tensor = 0,
) -> Tensor | None:
    """Where documents begin, (B, T) bool, or None when every row is one sequence.

    Raises:
        ShapeError: boundaries that are out of order, do not cover the row, or disagree with each other.
    """
    real = None
    if attention_mask is not None and attention_mask.ndim == 2:
        real = attention_mask[:, -length:].bool()
    elif attention_mask is not None:
        position_ids = None  # a ready 4-D mask already says who sees whom
    found = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if packing.get(name) is not None:
            found[name] = _starts_from_lengths(name, packing[name], batch, length, device)
    if packing.get("seq_idx") is not None:
        found["seq_idx"] = _starts_from_index(packing["seq_idx"], batch, length)
    if position_ids is not None and length > 1 and not is_torchdynamo_compiling() and isinstance(past, int):
        starts = _starts_from_positions(position_ids, batch, length, real)
        if starts is not None:
            found["position_ids"] = starts
        elif found and position_ids.shape[0] == batch:
            found["position_ids"] = _row_starts(batch, length, device)
    if not found:
        return None
    (first, starts), *others = found.items()
    for name, other in others:
        if not torch.equal(starts.cpu(), other.cpu()):
            raise ShapeError(
                f"{first} and {name} put document boundaries in different places; give boundaries that agree"
            )
    if not bool((starts.sum(dim=1) > 1).any()):
        return None
    if real is not None and not bool(real.all()):
        row = torch.arange(batch, device=device)
        starts = starts.clone()
        starts[row, real.to(torch.int8).argmax(dim=1)] = True
    return starts


def _row_starts(batch: int, length: int, device: torch.device) -> Tensor:
    starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
    starts[:, 0] = True
    return starts


def _starts_from_lengths(name: str, cumulative: Tensor, batch: int, length: int, device: torch.device) -> Tensor:
    if cumulative.is_floating_point() or cumulative.numel() != cumulative.shape[-1]:
        raise ShapeError(
            f"{name} is {cumulative.dtype} of shape {tuple(cumulative.shape)}; give one row of whole numbers, the cumulative "
            "lengths of the documents in this batch"
        )
    bounds = cumulative.to(device=device, dtype=torch.long).reshape(-1)
    total = batch * length
    ordered = bool((bounds[1:] >= bounds[:-1]).all()) if bounds.numel() > 1 else False
    if bounds.numel() < 2 or int(bounds[0]) != 0 or int(bounds[-1]) != total or not ordered:
        raise ShapeError(
            f"{name} must rise from 0 to the number of tokens ({total}), got {bounds.tolist()[:16]}; "
            "give the cumulative lengths of the documents in this batch"
        )
    starts = _row_starts(batch, length, device).reshape(-1)
    starts[bounds[:-1][bounds[:-1] < total]] = True
    return starts.reshape(batch, length)


def _starts_from_index(seq_idx: Tensor, batch: int, length: int) -> Tensor:
    if seq_idx.shape != (batch, length):
        raise ShapeError(f"seq_idx has shape {tuple(seq_idx.shape)}, expected one number per token, {(batch, length)}")
    if seq_idx.is_floating_point() or bool((seq_idx[:, 1:] < seq_idx[:, :-1]).any()) or bool((seq_idx[:, 0] < 0).any()):
        raise ShapeError(
            "seq_idx must number the documents of each row in order, whole numbers from 0 up; padding belongs into "
            f"attention_mask. Got {seq_idx.dtype}, first row {seq_idx[0].tolist()[:16]}"
        )
    starts = _row_starts(batch, length, seq_idx.device)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return starts


def _starts_from_positions(position_ids: Tensor, batch: int, length: int, real: Tensor | None) -> Tensor | None:
    """Restarts of `position_ids`, or None if they never restart. Steps into or out of padding do not count."""
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ShapeError(f"position_ids has shape {tuple(position_ids.shape)}, expected ({batch}, {length})")
    step = position_ids[:, 1:] - position_ids[:, :-1]
    broken = step != 1
    if real is not None:
        broken = broken & real[:, 1:] & real[:, :-1]
    below = position_ids < 0 if real is None else (position_ids < 0) & real
    if bool(below.any()):
        raise ShapeError(f"position_ids go down to {int(position_ids.min())}; positions count from 0")
    if not bool(broken.any()):
        return None
    astray = broken & (position_ids[:, 1:] != 0)
    if bool(astray.any()):
        row, column = astray.nonzero()[0].tolist()
        raise ShapeError(
            f"position_ids jump from {int(position_ids[row, column])} to {int(position_ids[row, column + 1])} in row {row}; "
            "they must count up by one, or restart at 0 where a packed document begins"
        )
    starts = _row_starts(batch, length, position_ids.device)
    starts[:, 1:] = broken
    return starts


def _packed_mask_info(config, inputs_embeds: Tensor, attention_mask: Tensor | None, starts: Tensor) -> MaskInfo:
    real = None
    if attention_mask is not None and attention_mask.ndim == 2:
        real = attention_mask[:, -inputs_embeds.shape[1] :].bool()
        real = None if bool(real.all()) else real
    layout = PackedDocuments(starts, real)
    if "full_attention" not in config.layer_types:
        return MaskInfo(None, layout)
    if "flash" in (config._attn_implementation or ""):
        return MaskInfo(None, layout, _flash_kwargs(layout, real))
    document = torch.cumsum(starts, dim=1)

    def same_document(batch_idx, head_idx, q_idx, kv_idx):
        return document[batch_idx, q_idx] == document[batch_idx, kv_idx]

    attention = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=None if real is None else real,
        past_key_values=None,
        and_mask_function=same_document,
    )
    return MaskInfo(attention, layout)


def _flash_kwargs(layout: PackedDocuments, real: Tensor | None) -> dict[str, Any]:
    if real is not None:
        raise ShapeError(
            "attention_mask has padding in a packed batch, which flash attention cannot take together; leave padding out "
            "(DataCollatorWithFlattening does) or use the 'sdpa' attention"
        )
    longest = int((layout.cu_seqlens[1:] - layout.cu_seqlens[:-1]).max())
    return {
        "cu_seq_lens_q": layout.cu_seqlens,
        "cu_seq_lens_k": layout.cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }
