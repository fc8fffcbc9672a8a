"""The definition of attention over depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_hf.ops import checks


def depth_attention_reference(
    bank: Sequence[Tensor] | Tensor, inv_rms: Tensor, prefix: Tensor, weight: Tensor, *, eps: float
) -> Tensor:
    """See `kimi_hf.ops.depth_attention.depth_attention`."""
    dtype = checks.compute_dtype(prefix.dtype)
    v = torch.stack([*bank, prefix]).to(dtype)  # [M+1, B, T, D]
    inverse = torch.cat([inv_rms.to(dtype), inverse_rms_reference(prefix, eps).unsqueeze(0)])
    keys = v * inverse.unsqueeze(-1)
    probabilities = torch.softmax(keys @ weight.to(dtype), dim=0)  # [M+1, B, T]
    return (probabilities.unsqueeze(-1) * v).sum(0).to(prefix.dtype)


def inverse_rms_reference(x: Tensor, eps: float) -> Tensor:
    """See `kimi_hf.ops.depth_attention.inverse_rms`."""
    return torch.rsqrt(x.to(checks.compute_dtype(x.dtype)).square().mean(-1) + eps)
