"""Layers that stay on disk (`device_map` with "disk"): their files must give the model's dtypes, and stay the model's own."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import CheckpointError

# Every model with layers on disk that is still there.
_offloaded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
# Folder -> the model whose weights lie there, and what it was loaded from.
_claimed: dict[str, tuple[weakref.ref, tuple]] = {}


def uses_disk(load_config) -> bool:
    """Whether a load (transformers' `LoadStateDictConfig`) leaves some modules on disk."""
    return "disk" in (load_config.device_map or {}).values()


def prepare_disk_offload(model: torch.nn.Module, load_config) -> None:
    """Give the empty model the dtypes it will be loaded with, and see that no other model's weights are overwritten.

    transformers notes for each tensor on disk the dtype that the *empty* model has, and casts to it whenever the tensor is
    fetched. That is the dtype asked for, also for the tensors that are kept in fp32 when they are loaded into memory.

    Raises:
        CheckpointError: `offload_folder` holds the weights of another model that is still there.
    """
    if not uses_disk(load_config):
        return
    _offloaded.add(model)
    _apply_dtype_plan(model, load_config.dtype_plan or {})
    if load_config.disk_offload_folder is not None:
        _claim(model, load_config)


def _apply_dtype_plan(model: torch.nn.Module, plan: Mapping[str, torch.dtype]) -> None:
    """Cast the empty tensors whose names match a pattern of `plan` (searched anywhere, as transformers does)."""
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            dtype = next((dtype for pattern, dtype in plan.items() if re.search(pattern, prefix + name)), None)
            if dtype is not None and tensor.is_meta and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def _claim(model: torch.nn.Module, load_config) -> None:
    """Note that `offload_folder` is this model's; its tensors are fetched from there by name for as long as it lives."""
    folder = os.path.realpath(load_config.disk_offload_folder)
    content = (str(load_config.pretrained_model_name_or_path), type(model).__name__, str(load_config.dtype))
    owner, holds = _claimed.get(folder, (lambda: None, content))
    if holds != content and owner() is not None:
        del owner
        gc.collect()  # the hooks of an offloaded model refer to it in a circle
        if _claimed[folder][0]() is not None:
            raise CheckpointError(
                f"offload_folder {load_config.disk_offload_folder} holds the weights of another model that is still in use "
                f"({holds[1]} from {holds[0]} in {holds[2]}); give each model its own folder, or delete the other first"
            )
    _claimed[folder] = weakref.ref(model), content


def refuse_files_in_use(target: Path) -> None:
    """Raise if a model that is still there reads offloaded layers from files in `target`, which a save would replace."""
    for collect_first in (True, False):
        used = next((found for model in _offloaded if (found := _read_from(model, os.path.realpath(target)))), None)
        if used is None:
            return
        if collect_first:
            gc.collect()
    name, file = used
    raise CheckpointError(
        f"{name} of a model that is in use is offloaded and read from {file}, which saving to {target} would replace; save "
        "to another folder"
    )


def _read_from(model: torch.nn.Module, folder: str) -> tuple[str, str] | None:
    """A tensor and its file, if hooks of `model` fetch one from `folder`."""
    indices = {}
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        index = getattr(getattr(weights, "dataset", weights), "index", None) or {}
        indices[id(index)] = index  # all hooks share one
    files = {entry.get("safetensors_file"): name for index in indices.values() for name, entry in index.items()}
    in_folder = (file for file in files if file and os.path.realpath(os.path.dirname(file)) == folder)
    return next(((files[file], file) for file in in_folder), None)
