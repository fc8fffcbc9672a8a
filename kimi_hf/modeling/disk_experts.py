"""Routed experts that stay in the checkpoint's files: `from_pretrained(..., expert_storage="disk")`."""

import dataclasses
import re
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ..checkpoint.shards import Checkpoint
from ..checkpoint.stored import as_state_dict
from ..errors import CheckpointError, ConfigError
from ..ops.grouped_experts import fetched_experts
from ..storage import DEFAULT_CACHE_BYTES, ExpertStore
from ..storage.saving import add_experts
from .feed_forward import gated_activation
from .moe import experts_built_by

STORAGES = ("ram", "disk", "mmap")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_UNSUPPORTED = ("distributed_config", "device_mesh", "tp_plan", "tp_size", "gguf_file", "state_dict", "key_mapping")


class KimiDiskExperts(nn.Module):
    """The experts of a layer, read from disk as they are routed to; the same call as `KimiExperts`.

    It holds no parameters: experts are in no state dict, no optimiser and no device map, `.to()` leaves them as they
    are, and copies of the module share files and cache. Gradients flow to the inputs and the routing weights.
    """

    def __init__(self, config, cache_bytes: int = DEFAULT_CACHE_BYTES):
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.routed_expert_hidden_size or config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.act = gated_activation(config)
        self.cache_bytes = cache_bytes
        self.store: ExpertStore | None = None
        self.layer: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(experts, F, Z)."""
        return self.num_experts, self.intermediate_dim, self.hidden_dim

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (N, Z), experts (N, k), weights (N, k) fp32 -> (N, Z). Only experts that were chosen are read.

        Raises:
            CheckpointError: a file that is gone, was changed, or holds an MXFP4 scale that is NaN.
        """
        if self.store is None:
            raise CheckpointError('expert_storage="disk" belongs to from_pretrained; this model was made without files')
        fetch = self.store.fetcher(self.layer, top_k_index.unique().tolist())
        return fetched_experts(
            hidden_states, top_k_index, top_k_weights, fetch, self.num_experts, self.intermediate_dim, self._apply_gate
        )

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """(..., 2F) -> (..., F)."""
        return self.act.glu(gate_up)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts on disk, {self.hidden_dim} -> {self.intermediate_dim}"


def disk_experts(model: nn.Module) -> dict[str, KimiDiskExperts]:
    """The modules of a model whose experts are on disk, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KimiDiskExperts)}


def expert_store(model: nn.Module) -> ExpertStore | None:
    """The files and cache that a model's experts come from; None for a model without experts on disk."""
    return next((module.store for module in disk_experts(model).values()), None)


def refuse_experts_on_disk(model: nn.Module, what: str) -> None:
    """Raise `ConfigError` if experts are on disk, which `what` cannot work with."""
    if disk_experts(model):
        raise ConfigError(f'{what} needs the experts in memory; load the model with expert_storage="ram"')


def pop_expert_storage(kwargs: dict[str, Any]) -> AbstractContextManager:
    """Take `expert_storage` and `expert_cache_bytes` out of `from_pretrained`'s arguments.

    Returns: a context in which models are built with their experts on disk, or one that does nothing.
    Raises: ConfigError for values that do not exist, and arguments that cannot go together.
    """
    storage, cache_bytes = kwargs.pop("expert_storage", "ram"), kwargs.pop("expert_cache_bytes", None)
    if storage not in STORAGES:
        raise ConfigError(f'expert_storage is {storage!r}; expected "ram" or "disk" ("mmap" means the same)')
    if cache_bytes is not None and (type(cache_bytes) is not int or cache_bytes < 0):
        raise ConfigError(f"expert_cache_bytes is {cache_bytes!r}; expected a number of bytes, 0 to keep none")
    if storage == "ram":
        if cache_bytes is not None:
            raise ConfigError('expert_cache_bytes is for expert_storage="disk"; experts in memory need no cache')
        return nullcontext()
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(f'expert_storage="disk" reads safetensors files in one process; leave {name} out')
    limit = DEFAULT_CACHE_BYTES if cache_bytes is None else cache_bytes
    return experts_built_by(partial(KimiDiskExperts, cache_bytes=limit))


def leave_experts_on_disk(model: nn.Module, checkpoint: Checkpoint | None, load_config):
    """Connect the experts of an empty model with their files, and keep transformers from seeing those tensors.

    Returns: what is to be loaded, as a state dict of `StoredTensor`, and the load config without the experts' names.
    Raises: CheckpointError for files that are not safetensors, and experts that are absent or do not fit.
    """
    modules = disk_experts(model)
    if checkpoint is None or any(not file.endswith(".safetensors") for file in checkpoint.headers):
        raise CheckpointError(
            f'{load_config.pretrained_model_name_or_path}: expert_storage="disk" reads safetensors files; convert the '
            "checkpoint first (load it and save_pretrained), or leave the argument out"
        )
    first = next(iter(modules.values()))
    for name, module in modules.items():
        module.layer = int(_LAYER.search(name)[1])
    store = ExpertStore(checkpoint, [module.layer for module in modules.values()], first.sizes, first.cache_bytes)
    for module in modules.values():
        module.store = store
    model._can_compile_fullgraph = False  # reading a file is no part of a graph
    rest = {name: entry for name, entry in checkpoint.entries.items() if ".experts." not in name}
    index = load_config.sharded_metadata
    if index is not None:
        files = {name: file for name, file in index["weight_map"].items() if name in rest}
        load_config = dataclasses.replace(load_config, sharded_metadata={**index, "weight_map": files})
    return as_state_dict(model, checkpoint, rest.values(), load_config), load_config


def save_experts_on_disk(model: nn.Module, folder: Path, max_shard_size: int | str) -> None:
    """Add the experts on disk to `folder`, where everything else of `model` was just saved: their bytes as they are.

    Raises: CheckpointError, see `storage.saving.add_experts`.
    """
    stems = {module.layer: _saved_stem(model, name) for name, module in disk_experts(model).items()}
    add_experts(folder, expert_store(model), stems, _bytes_of(max_shard_size))


def _saved_stem(model: nn.Module, module_name: str) -> str:
    """What stands before the expert's number in saved names: renamed as transformers renames all other tensors."""
    ending = "0.w1.weight"
    (saved,) = revert_weight_conversion(model, {f"{module_name}.{ending}": torch.empty(0)})
    return saved.removesuffix(ending)


def _bytes_of(size: int | str) -> int:
    """`max_shard_size` as transformers takes it, "50GB", as a number."""
    if isinstance(size, int):
        return size
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = size.strip().upper()[:-2], size.strip().upper()[-2:]
    return int(float(number) * units[unit])
