"""The named per-token maps in front of the KDA recurrence: decay logits to log decay, keys to unit length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kimi_hf.ops import checks

EPS = 1e-6  # added to the sum of squares of q and k


def kda_log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Log decay per channel and step, <= 0.

    With y = g + dt_bias and A = exp(A_log): `-A softplus(y)` without a bound (Kimi Linear), and
    `lower_bound * sigmoid(A y)` with one (Kimi K3), which lies in (lower_bound, 0).

    Args:
        g: decay logits [..., H, K].
        A_log: [H]. dt_bias: [H*K], channel = head * K + dim.
        lower_bound: None, or a negative number (K3: -5).
    Returns: [..., H, K], fp32 (fp64 for fp64 g).
    Source: kimi_k3.md 3.3.
    """
    heads, dim = g.shape[-2:]
    dtype = checks.compute_dtype(g.dtype)
    y = g.to(dtype) + dt_bias.to(dtype).view(heads, dim)
    A = A_log.to(dtype).exp().view(heads, 1)
    if lower_bound is None:
        return -A * softplus(y)
    return lower_bound * torch.sigmoid(A * y)


def l2_normalize(x: Tensor, eps: float = EPS) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in fp32 (fp64 for fp64 x). Finite gradient at x = 0.

    Source: kimi_k3.md 3.3 (the eps is added to the sum, inside the root).
    """
    wide = x.to(checks.compute_dtype(x.dtype))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
