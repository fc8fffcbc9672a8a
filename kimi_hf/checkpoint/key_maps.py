"""How the released tensor names become the model's parameters on loading, and the released names again on saving.

Module paths are the released ones, so there is little to say: the experts' w1, w3, w2 are stacked, and the decay
parameter is narrowed to one entry per head. transformers applies the rules in `from_pretrained` and reverses them in
`save_pretrained`; `state_dicts.py` does the same for `load_state_dict`, which knows no rules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightTransform,
)

from ..errors import CheckpointError


class NarrowDecay(ConversionOps):
    """Stored `A_log` -> (H,). K3 stores head_dim entries, zero beyond the heads; Kimi-Linear stores (1, 1, H, 1).

    The stored shape is remembered on the model, so that saving gives it back.
    """

    @torch.no_grad
    def convert(self, input_dict: dict[str, Any], source_patterns, target_patterns, **kwargs) -> dict[str, Tensor]:
        (stored,) = input_dict.values()
        stored = stored[0] if isinstance(stored, list) else stored
        name = kwargs.get("full_layer_name") or target_patterns[0]
        model = kwargs.get("model")
        heads = _text_config(kwargs.get("config")).linear_attn_config["num_heads"]
        parameter = None if model is None else model.get_parameter_or_buffer(name)
        sharded = isinstance(parameter, DTensor)
        if sharded:
            stored = _whole(stored, parameter)
        if model is not None:
            model.__dict__["_stored_decay_shape"] = tuple(stored.shape)
        decay = narrow_decay(stored, heads, name)
        if sharded:
            mesh, placements = parameter.device_mesh, parameter.placements
            decay = distribute_tensor(decay, mesh, placements, src_data_rank=None).to_local()
        return {target_patterns[0]: decay}

    @property
    def reverse_op(self) -> ConversionOps:
        return WidenDecay()


class WidenDecay(ConversionOps):
    """(H,) -> the shape that was loaded, or the released one of this kind of model."""

    @torch.no_grad
    def convert(self, input_dict: dict[str, Any], source_patterns, target_patterns, **kwargs) -> dict[str, Tensor]:
        (decay,) = input_dict.values()
        decay = decay[0] if isinstance(decay, list) else decay
        shape = getattr(kwargs.get("model"), "_stored_decay_shape", None)
        shape = shape or released_decay_shape(_text_config(kwargs.get("config")))
        return {target_patterns[0]: widen_decay(decay, shape)}

    @property
    def reverse_op(self) -> ConversionOps:
        return NarrowDecay()


def _whole(piece: Tensor, parameter: DTensor) -> Tensor:
    """All of a stored parameter of which every process has read its own slice (transformers shards while it reads).

    The slice of the stored, padded shape says nothing about the slice of the heads, so the pieces are put together
    first; they are a few numbers.
    """
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            group = parameter.device_mesh.get_group(dim)
            pieces: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(pieces, piece.cpu(), group=group)
            piece = torch.cat(pieces).to(piece.device)
    return piece


def narrow_decay(stored: Tensor, heads: int, name: str) -> Tensor:
    """The entries of the heads, copied out of `stored` (H,), (head_dim,) or (1, 1, H, 1).

    Raises:
        CheckpointError: fewer entries than heads, or a tail that is not zero.
    """
    flat = stored.reshape(-1)
    if flat.shape[0] < heads:
        raise CheckpointError(f"{name} has shape {tuple(stored.shape)}, but the model has {heads} heads")
    tail = flat[heads:]
    if tail.numel() and not tail.is_meta and bool((tail != 0).any()):
        raise CheckpointError(
            f"{name} has {flat.shape[0]} entries for {heads} heads, and those beyond the heads are not zero; the padding of "
            "the released layout is. The file is damaged, or linear_attn_config.num_heads is wrong"
        )
    return flat[:heads].clone()


def widen_decay(decay: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The stored form of (H,): reshaped, or padded with zeros to `shape`."""
    entries = 1
    for size in shape:
        entries *= size
    padded = decay.new_zeros(entries)
    padded[: decay.shape[0]] = decay
    return padded.view(shape)


def released_decay_shape(config) -> tuple[int, ...]:
    """K3 (bounded gate): zero-padded to head_dim; Kimi-Linear: (1, 1, H, 1)."""
    linear = config.linear_attn_config
    heads = linear["num_heads"]
    if linear.get("gate_lower_bound") is None:
        return (1, 1, heads, 1)
    return (max(heads, linear["head_dim"]),)


def _text_config(config):
    return config.get_text_config()


def expert_rules() -> list[WeightTransform]:
    """The rules that stack experts, fresh for every registration (transformers writes into them)."""
    return [
        WeightConverter(
            ["block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"],
            "block_sparse_moe.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            "block_sparse_moe.experts.*.w2.weight", "block_sparse_moe.experts.down_proj", [MergeModulelist(dim=0)]
        ),
    ]


def text_rules() -> list[WeightTransform]:
    """The rules of the text decoder.

    The prefix rule lets a text class load out of a composite repository; it does nothing elsewhere.
    """
    return [
        PrefixChange(prefix_to_remove="language_model"),
        *expert_rules(),
        WeightConverter("self_attn.A_log", "self_attn.A_log", [NarrowDecay()]),
    ]


_TEXT, _LADDER = "kimi_linear", "kimi_ladder"
_native: list[WeightTransform] | None = None


def register_key_maps(take_over_kimi_linear: bool = True) -> None:
    """Enter the rules of `kimi_ladder` and `kimi_linear` into transformers, or put the native ones of the latter back.

    transformers looks rules up by model type, which its native class shares with ours, so only one set can stand
    there; `own_key_maps` lends ours to a single call where the native class keeps its place.
    """
    global _native
    conversion_mapping.register_checkpoint_conversion_mapping(_LADDER, expert_rules(), overwrite=True)
    if _native is None and _TEXT not in conversion_mapping.USER_REGISTERED_MAPPINGS:
        _native = conversion_mapping.get_checkpoint_conversion_mapping(_TEXT)
    if take_over_kimi_linear:
        conversion_mapping.register_checkpoint_conversion_mapping(_TEXT, text_rules(), overwrite=True)
    elif _native is not None and _TEXT in conversion_mapping.USER_REGISTERED_MAPPINGS:
        conversion_mapping.register_checkpoint_conversion_mapping(_TEXT, _native, overwrite=True)
        conversion_mapping.USER_REGISTERED_MAPPINGS.discard(_TEXT)


@contextmanager
def own_key_maps() -> Iterator[None]:
    """Our rules for the time of one load or save, whichever class owns `kimi_linear` in this process."""
    if _TEXT in conversion_mapping.USER_REGISTERED_MAPPINGS:
        yield
        return
    register_key_maps(True)
    try:
        yield
    finally:
        register_key_maps(False)
