"""Operations that are defined in fp32 must not be narrowed by an ambient `torch.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def no_autocast(tensor: Tensor) -> AbstractContextManager:
    """A context in which autocast is off for `tensor`'s device; free of charge where it is off already."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if _active(device) else nullcontext()


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which an ambient autocast wants a product with `tensor`; its own dtype without autocast."""
    device = tensor.device.type
    if _active(device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def _active(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)
