"""The definition of the gated norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_hf.ops import checks


def gated_norm_reference(x: Tensor, weight: Tensor, gate: Tensor | None, *, eps: float, activation: str) -> Tensor:
    """See `kimi_hf.ops.gated_norm.gated_norm`."""
    dtype = checks.compute_dtype(x.dtype)
    wide = x.to(dtype)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
    if gate is not None:
        y = y * (torch.sigmoid if activation == "sigmoid" else silu)(gate.to(dtype))
    return y.to(x.dtype)
