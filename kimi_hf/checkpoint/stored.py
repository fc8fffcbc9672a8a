"""A checkpoint as the state dict that transformers loads from: tensors that are read when they are asked for, or never."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.accelerate import get_device

from .offload import uses_disk
from .shards import Checkpoint, TensorEntry


class StoredTensor:
    """A tensor of an open checkpoint, with as much of the interface of a safetensors slice as transformers uses."""

    def __init__(self, checkpoint: Checkpoint, entry: TensorEntry):
        self.checkpoint, self.entry = checkpoint, entry

    def __getitem__(self, index) -> Tensor:
        tensor = self.checkpoint.read(self.entry.name)
        return tensor if index is Ellipsis else tensor[index]

    def get_dtype(self) -> str:
        return self.entry.dtype

    def get_shape(self) -> list[int]:
        return list(self.entry.shape)


class UnreadTensor(StoredTensor):
    """One that stays in its file: transformers would read it, cast it, and drop it for a note of where it lies."""

    def __getitem__(self, index) -> UnreadTensor:
        return self

    def to(self, *args, **kwargs) -> UnreadTensor:
        return self


def as_state_dict(
    model: nn.Module, checkpoint: Checkpoint, entries: Iterable[TensorEntry], load_config
) -> dict[str, StoredTensor]:
    """`entries` by name, for an empty model and transformers' `LoadStateDictConfig`.

    Layers that are offloaded to disk need no reading, unless a rule changes their tensors.
    """
    rules = load_config.weight_mapping or []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    offloading = uses_disk(load_config)
    parameters = dict(model.named_parameters()) if offloading else {}
    empty = model.state_dict() if offloading else {}

    def stays(name: str) -> bool:
        target, changed = rename_source_key(name, renamings, converters, model.base_model_prefix, empty)
        return changed is None and target in parameters and get_device(load_config.device_map, target) == "disk"

    return {
        entry.name: (UnreadTensor if offloading and stays(entry.name) else StoredTensor)(checkpoint, entry)
        for entry in entries
    }
