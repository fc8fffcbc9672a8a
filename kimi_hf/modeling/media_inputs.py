"""`generate` with images: which images a step still needs, and how they multiply with the rows.

While generating, ids and cache must agree in length, so placeholders are expanded before the first step and the
original prompt is put back in front of what was generated.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import MediaError, ShapeError
from .vision import expand_placeholders


def images_per_row(ids: Tensor, counts: list[int], placeholder_id: int) -> list[int]:
    """How many images each row holds, of ids (B, T) with one placeholder per feature.

    Raises:
        MediaError: a row whose placeholders are not a whole number of images.
    """
    slots = (ids == placeholder_id).sum(dim=1).tolist()
    images, result = iter(counts), []
    for row, left in enumerate(slots):
        held = 0
        while left > 0:
            left -= next(images, left + 1)
            held += 1
        if left < 0:
            raise MediaError(
                f"row {row} has {slots[row]} placeholders, which is not a whole number of its images' features"
            )
        result.append(held)
    return result


def refuse_orphans(ids: Tensor, placeholder_id: int | None, cache) -> None:
    """Raise if ids (B, T) that come without images hold placeholders: they would be read as if they were words.

    A step of one token after a cache is let through: that is what a model wrote, and asking costs a wait on a GPU.
    """
    if placeholder_id is None or torch.compiler.is_compiling() or ids.device.type == "meta":
        return
    if ids.shape[1] == 1 and cache is not None and cache.get_seq_length() > 0:
        return
    slots = ids == placeholder_id
    found = int(slots.sum())
    if found:
        row, position = slots.nonzero()[0].tolist()
        raise MediaError(
            f"input_ids hold {found} placeholders of images (id {placeholder_id}; the first in row {row} at position "
            f"{position}), but no pixel_values came with them; pass pixel_values and grid_thws of the image processor"
        )


def remember_images(cache, grid_thws: Tensor | None, merge_kernel_size: list[int] | tuple[int, int], rows: int) -> None:
    """Note in the cache that images of these grids (M, 3) have been read into it, over `rows` rows."""
    if cache is None or grid_thws is None:
        return
    patches = sum(h * w for _, h, w in torch.as_tensor(grid_thws).tolist())
    area = merge_kernel_size[0] * merge_kernel_size[1]
    cache.image_tokens = getattr(cache, "image_tokens", 0.0) + patches / area / rows


class MediaGenerationMixin:
    """Adds images to `generate`."""

    def _feature_counts(self, grid_thws: Tensor) -> list[int]:
        layout = self.vision_tower.read_layout(grid_thws)
        return layout.tokens_per_image(self.config.vision_config.merge_kernel_size)

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        """transformers' `generate`; with `grid_thws` the prompt may hold one placeholder per image or per feature.

        What comes back begins with the prompt exactly as it was given.
        """
        grids = kwargs.get("grid_thws")
        if (grids is None) != (kwargs.get("pixel_values") is None):
            raise ShapeError("give pixel_values and grid_thws together; the image processor returns both")
        if grids is not None and not isinstance(grids, Tensor):
            grids = kwargs["grid_thws"] = torch.as_tensor(grids, device=kwargs["pixel_values"].device).reshape(-1, 3)
        ids = kwargs.get("input_ids", inputs)
        if ids is not None and grids is None:
            self._check_remembered_images(ids, kwargs.get("past_key_values"), kwargs.get("attention_mask"))
        if grids is None or ids is None:
            return super().generate(inputs, *args, **kwargs)
        pad = self.config.pad_token_id
        placeholder = self.config.media_placeholder_token_id
        counts = self._feature_counts(grids)
        mask = kwargs.get("attention_mask")
        expanded = expand_placeholders(ids, counts, placeholder, pad, attention_mask=mask)
        kwargs.update(input_ids=expanded.input_ids, attention_mask=expanded.attention_mask)
        out = super().generate(None, *args, **kwargs)
        grown = expanded.input_ids.shape[1]
        sequences = out if isinstance(out, Tensor) else out.sequences
        prompt = ids.repeat_interleave(sequences.shape[0] // ids.shape[0], dim=0).to(sequences.device)
        sequences = torch.cat([prompt, sequences[:, grown:]], dim=1)
        if isinstance(out, Tensor):
            return sequences
        out.sequences = sequences
        return out

    def _check_remembered_images(self, ids: Tensor, cache, attention_mask: Tensor | None) -> None:
        """Refuse a prompt whose placeholders cannot be what the cache holds: its length would be miscounted."""
        if cache is None or cache.get_seq_length() == 0:
            return  # the first forward looks at it
        held = getattr(cache, "image_tokens", 0.0)
        if attention_mask is not None and attention_mask.shape[1] > ids.shape[1]:
            held = 0.0  # only what is new was passed
        given = int((ids == self.config.media_placeholder_token_id).sum()) / ids.shape[0]
        if abs(held - given) > 1e-6:
            raise MediaError(
                f"the cache holds {held:g} image tokens a row, but input_ids have {given:g} placeholders: pass pixel_values "
                "and grid_thws of all images again (what is cached is not encoded twice), or one placeholder per image "
                "feature"
            )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values=None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs,
    ) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        inputs["check_placeholders"] = bool(is_first_iteration)  # later ones are what the model itself wrote
        if pixel_values is None or not (is_first_iteration or past_key_values is None):
            return inputs
        step_ids = inputs.get("input_ids")
        if step_ids is None:
            inputs.update(pixel_values=pixel_values, grid_thws=grid_thws)
            return inputs
        keep = self._images_in_step(input_ids, step_ids, grid_thws)
        if any(keep):
            sizes = grid_thws.prod(dim=1).tolist()
            patches = pixel_values.split(sizes)
            inputs["pixel_values"] = torch.cat([p for p, kept in zip(patches, keep, strict=True) if kept])
            inputs["grid_thws"] = grid_thws[torch.tensor(keep, device=grid_thws.device)]
        return inputs

    def _images_in_step(self, ids: Tensor, step_ids: Tensor | None, grids: Tensor) -> list[bool]:
        """Which images have their placeholders in this step; the others are in the cache already."""
        if step_ids is None or step_ids.shape[1] == ids.shape[1]:
            return [True] * len(grids)
        placeholder = self.config.media_placeholder_token_id
        counts = self._feature_counts(grids)
        keep, first = [], 0
        for row, held in enumerate(images_per_row(ids, counts, placeholder)):
            of_row = counts[first : first + held]
            left = int((step_ids[row] == placeholder).sum())
            flags = []
            for count in reversed(of_row):
                flags.append(left > 0)
                left -= count if left > 0 else 0
            if left:
                raise MediaError(f"row {row}: the cache ends inside an image; cut the prefix before or after it")
            keep += reversed(flags)
            first += held
        return keep

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **kwargs
    ):
        pixels, grids = kwargs.pop("pixel_values", None), kwargs.pop("grid_thws", None)
        if pixels is not None and expand_size > 1:
            embeds = kwargs.get("inputs_embeds")
            ids = input_ids if embeds is None else self.placeholders_in(embeds)
            held = images_per_row(ids, self._feature_counts(grids), self.config.media_placeholder_token_id)
            patches = pixels.split(grids.prod(dim=1).tolist())
            order, first = [], 0
            for count in held:
                order += list(range(first, first + count)) * expand_size
                first += count
            pixels = torch.cat([patches[i] for i in order]) if order else pixels
            grids = grids[torch.tensor(order, dtype=torch.long, device=grids.device)]
        input_ids, kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
        )
        if pixels is not None:
            kwargs.update(pixel_values=pixels, grid_thws=grids)
        return input_ids, kwargs
