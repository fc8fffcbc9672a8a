"""The definition of SiTU."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks


def situ_reference(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `kimi_hf.ops.situ.situ`."""
    dtype = checks.compute_dtype(gate.dtype)
    g, u = gate.to(dtype), up.to(dtype)
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)


def situ_glu_reference(gate_up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `kimi_hf.ops.situ.situ_glu`."""
    return situ_reference(*gate_up.chunk(2, dim=-1), beta=beta, linear_beta=linear_beta)
