"""Image features into the text sequence, for both ways of writing an image in `input_ids`.

A released prompt holds **one** placeholder token per image and the model expands it:

    ids      a  b  @  c  .          @ is the placeholder, . padding; the image has 3 feature rows
    merged   a  b  f1 f2 f3 c  .

A processor may have expanded it already (`a b @ @ @ c .`): then nothing moves and the rows are put in place. Both
give the same sequence. Source: K3 specification 6.5, whose right-padded case the released code gets wrong (features
slide into the filler when rows expand to different lengths); here features always replace their own placeholders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...errors import MediaError, ShapeError


class MergedInputs(NamedTuple):
    """What the decoder gets: embeddings (B, L, D), mask (B, past + L), positions (B, L), labels (B, L) or None."""

    inputs_embeds: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor | None


class ExpandedInputs(NamedTuple):
    """Token-level expansion: ids (B, L) with one placeholder per feature row, mask (B, past + L), labels or None."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    """Where everything goes in the B * L merged positions; index tensors lie on the device of the inputs."""

    length: int
    text: torch.Tensor  # [B*T] bool, tokens that are not placeholders
    text_to: torch.Tensor  # [text tokens] merged position of each
    media_to: torch.Tensor  # [feature rows] merged position of each


def merge_media(
    input_ids: torch.Tensor,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    labels: torch.Tensor | None,
    features: Sequence[torch.Tensor],
    placeholder_id: int,
    pad_id: int | None,
    *,
    ignore_index: int = -100,
) -> MergedInputs:
    """Replace placeholders by feature rows; differentiable in `inputs_embeds` and `features`.

    Args:
        input_ids: (B, T) integers; images occur in reading order, row by row.
        inputs_embeds: (B, T, D), the embeddings of `input_ids`; cast to the dtype of the features.
        attention_mask: (B, T) of 0 and 1 or bool, or (B, past + T) in a continued forward, whose first columns
            belong to the cache; None means all ones.
        labels: (B, T) or None. Feature and filler positions become `ignore_index`.
        features: one (n_i, D) tensor per image. Empty: nothing is merged.
        placeholder_id: `media_placeholder_token_id`.
        pad_id: embeddings of this id become 0, as in the release; None for no such id.

    Returns:
        `MergedInputs`. Rows are filled up to the longest one on the side where the batch is padded: where the mask
        ends (or begins) with zeros; if it has none, on the right if any row ends with `pad_id`, else on the left.
        Positions count the visible tokens, 1 where hidden (Kimi's layers read no positions).

    Raises:
        MediaError: placeholders that fit neither form; the message says which image.
        ShapeError: tensors that do not belong together.
    """
    _check_shapes(input_ids, inputs_embeds, attention_mask, labels, features)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    counts = [feature.shape[0] for feature in features]
    ids = input_ids.detach().cpu()
    slot_rows = _rows_per_slot(ids == placeholder_id, counts, placeholder_id)
    if not features:
        return MergedInputs(inputs_embeds, attention_mask, _positions(attention_mask, ids.shape[1]), labels)
    plan = _plan(ids, attention_mask, slot_rows, placeholder_id, pad_id)

    rows = torch.cat(list(features)).to(inputs_embeds.device)
    batch, tokens, size = inputs_embeds.shape
    text = inputs_embeds.to(rows.dtype).reshape(batch * tokens, size)[plan.text]
    if pad_id is not None:
        text = text.masked_fill((input_ids.reshape(-1)[plan.text] == pad_id)[:, None], 0)
    merged = rows.new_zeros(batch * plan.length, size)
    merged = merged.index_copy(0, plan.text_to, text).index_copy(0, plan.media_to, rows)
    mask = _move_mask(attention_mask, plan, batch, tokens)
    return MergedInputs(
        merged.unflatten(0, (batch, plan.length)),
        mask,
        _positions(mask, plan.length),
        None if labels is None else _move_text(labels, plan, ignore_index),
    )


def expand_placeholders(
    input_ids: torch.Tensor,
    counts: Sequence[int],
    placeholder_id: int,
    pad_id: int | None,
    *,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> ExpandedInputs:
    """The same expansion on tokens: placeholder i is written `counts[i]` times; already expanded ids stay as they are.

    `merge_media` of the result equals `merge_media` of the original. Useful before `generate()`, where lengths must
    agree with the cache from the first step on. Filler ids are `pad_id` (0 if None). Arguments and errors as there.
    """
    _check_shapes(input_ids, None, attention_mask, labels, ())
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    ids = input_ids.detach().cpu()
    slot_rows = _rows_per_slot(ids == placeholder_id, list(counts), placeholder_id)
    if not counts:
        return ExpandedInputs(input_ids, attention_mask, labels)
    plan = _plan(ids, attention_mask, slot_rows, placeholder_id, pad_id)
    expanded = _move_text(input_ids, plan, 0 if pad_id is None else pad_id)
    expanded.view(-1)[plan.media_to] = placeholder_id
    return ExpandedInputs(
        expanded,
        _move_mask(attention_mask, plan, *input_ids.shape),
        None if labels is None else _move_text(labels, plan, ignore_index),
    )


def _plan(ids: torch.Tensor, attention_mask: torch.Tensor, slot_rows: list[int], placeholder_id: int, pad_id) -> _Plan:
    """Positions of everything; worked out on the CPU, because lengths are needed there anyway."""
    slots = ids == placeholder_id
    width = torch.ones_like(ids, dtype=torch.long)
    width[slots] = torch.tensor(slot_rows, dtype=torch.long)
    row_length = width.sum(1, keepdim=True)
    length = int(row_length.max())
    start = width.cumsum(1) - width
    if _is_padded_left(ids, attention_mask.detach().cpu()[:, -ids.shape[1] :], pad_id):
        start = start + length - row_length
    start = start + torch.arange(ids.shape[0])[:, None] * length
    repeats = width[slots]
    first = torch.repeat_interleave(start[slots] - (repeats.cumsum(0) - repeats), repeats)
    device = attention_mask.device
    return _Plan(
        length=length,
        text=(~slots).reshape(-1).to(device),
        text_to=start[~slots].to(device),
        media_to=(first + torch.arange(int(repeats.sum()))).to(device),
    )


def _is_padded_left(ids: torch.Tensor, mask: torch.Tensor, pad_id: int | None) -> bool:
    """Which side gets the filler. The mask knows best; only a mask without zeros leaves it to the token ids."""
    hidden = mask == 0
    if hidden[:, -1].any():
        return False
    if hidden[:, 0].any() or pad_id is None:
        return True
    return not bool((ids[:, -1] == pad_id).any())


def _move_text(values: torch.Tensor, plan: _Plan, fill: int) -> torch.Tensor:
    """Per-token values (B, T) to their merged places (B, L); everything else is `fill`."""
    batch = values.shape[0]
    moved = values.new_full((batch * plan.length,), fill)
    moved[plan.text_to] = values.reshape(-1)[plan.text]
    return moved.view(batch, plan.length)


def _move_mask(attention_mask: torch.Tensor, plan: _Plan, batch: int, tokens: int) -> torch.Tensor:
    past = attention_mask.shape[1] - tokens
    mask = _move_text(attention_mask[:, past:], plan, 0)
    mask.view(-1)[plan.media_to] = 1
    return torch.cat((attention_mask[:, :past], mask), 1) if past else mask


def _positions(attention_mask: torch.Tensor, length: int) -> torch.Tensor:
    positions = attention_mask.long().cumsum(1) - 1
    return positions.masked_fill(attention_mask == 0, 1)[:, -length:]


def _rows_per_slot(slots: torch.Tensor, counts: list[int], placeholder_id: int) -> list[int]:
    """How many feature rows each placeholder takes: counts[i] each, or one each; anything else is an error."""
    found, rows = int(slots.sum()), sum(counts)
    if found == len(counts):
        return counts
    runs = _runs(slots)
    if found == rows:
        wrong = [i for i, (run, n) in enumerate(zip(runs, counts, strict=False)) if run[2] != n]
        if len(runs) == len(counts) and wrong:
            raise MediaError(_wrong_run(wrong[0], runs, counts) + "; give the images in the order of the text")
        return [1] * rows
    raise MediaError(
        f"input_ids holds {found} placeholders (id {placeholder_id}), but there are {len(counts)} images with "
        f"{rows} feature rows; write one placeholder per image ({len(counts)}) or one per row ({rows}). "
        + _what_is_wrong(runs, counts, found)
    )


def _runs(slots: torch.Tensor) -> list[tuple[int, int, int]]:
    """Unbroken stretches of placeholders, as (row, first position, length)."""
    runs: list[tuple[int, int, int]] = []
    for row, position in slots.nonzero().tolist():
        if runs and runs[-1][0] == row and runs[-1][1] + runs[-1][2] == position:
            runs[-1] = (row, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((row, position, 1))
    return runs


def _wrong_run(index: int, runs: list[tuple[int, int, int]], counts: list[int]) -> str:
    row, position, length = runs[index]
    return (
        f"image {index + 1} of {len(counts)} has {counts[index]} feature rows, but its placeholders (row {row} of the "
        f"batch, from position {position}) are {length}"
    )


def _what_is_wrong(runs: list[tuple[int, int, int]], counts: list[int], found: int) -> str:
    if not counts:
        row, position, _ = runs[0]
        return f"The first one, in row {row} at position {position}, has no image: pass pixel_values and grid_thws"
    if found < len(counts):
        return f"Image {found + 1} of {len(counts)} has no placeholder"
    singles = all(length == 1 for _, _, length in runs)
    if singles and len(runs) > len(counts):
        row, position, _ = runs[len(counts)]
        return f"Placeholder {len(counts) + 1}, in row {row} at position {position}, has no image"
    for index, (run, n) in enumerate(zip(runs, counts, strict=False)):
        if run[2] != n:
            return _wrong_run(index, runs, counts).capitalize()
    if len(runs) < len(counts):
        return f"Image {len(runs) + 1} of {len(counts)} has no placeholder"
    row, position, _ = runs[len(counts)]
    return f"The placeholders in row {row} from position {position} have no image"


def _check_shapes(input_ids, inputs_embeds, attention_mask, labels, features) -> None:
    if input_ids.dim() != 2:
        raise ShapeError(f"input_ids must have shape (rows, tokens), got {tuple(input_ids.shape)}")
    rows, tokens = input_ids.shape
    if inputs_embeds is not None and (inputs_embeds.dim() != 3 or inputs_embeds.shape[:2] != input_ids.shape):
        raise ShapeError(
            f"inputs_embeds must have shape ({rows}, {tokens}, size) like input_ids, got {tuple(inputs_embeds.shape)}"
        )
    if attention_mask is not None and (
        attention_mask.dim() != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < tokens
    ):
        raise ShapeError(
            f"attention_mask must have shape ({rows}, {tokens}), or more columns when a cache goes before, got "
            f"{tuple(attention_mask.shape)}; images are merged under a 2-D mask of 0 and 1 only"
        )
    if labels is not None and labels.shape != input_ids.shape:
        raise ShapeError(f"labels must have the shape of input_ids {(rows, tokens)}, got {tuple(labels.shape)}")
    for index, feature in enumerate(features):
        if feature.dim() != 2 or feature.shape[1] != inputs_embeds.shape[2]:
            raise ShapeError(
                f"image {index + 1} of {len(features)}: features must have shape (rows, {inputs_embeds.shape[2]}) to "
                f"stand beside the text embeddings, got {tuple(feature.shape)}"
            )
