"""How weights start, one function per kind of module.

| tensor | distribution |
|---|---|
| Linear, embedding, experts | normal(0, initializer_range) |
| router weight | uniform(+-1/sqrt(D)), i.e. kaiming-uniform with a = sqrt(5) |
| A_log | log of uniform(1, 16), per head |
| dt_bias | so that the initial decay rate of a step is log-uniform in [0.001, 0.1], for either gate |
| short convolution | uniform(+-1/sqrt(W)) |
| depth queries | 0: uniform weights over depth |
| norms, correction bias | 1, 0 |

Source: Kimi K3 release (init of the reference); Mamba (arXiv 2312.00752) for the spread of time scales.
"""

import math

import torch
from torch import Tensor
from transformers import initialization as init

SLOWEST_DECAY, FASTEST_DECAY = 1e-3, 1e-1


def init_router(weight: Tensor, bias: Tensor) -> None:
    bound = weight.shape[-1] ** -0.5
    init.uniform_(weight, a=-bound, b=bound)
    init.zeros_(bias)


def init_short_convolution(weight: Tensor) -> None:
    bound = weight.shape[-1] ** -0.5
    init.uniform_(weight, a=-bound, b=bound)


def init_decay(A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> None:
    """Start with decays from short to long ranges, so that some channels remember and some forget.

    With g = -A softplus(y) a rate r needs y = inverse softplus of r / A; with g = c sigmoid(A y) it needs
    y = logit(-r / c) / A. Decay logits start near zero, so y is dt_bias.

    Args:
        A_log: (H,). dt_bias: (H K,), channels of a head together. lower_bound: c, or None.
    """
    init.copy_(A_log, torch.empty_like(A_log, dtype=torch.float32).uniform_(1.0, 16.0).log().to(A_log.dtype))
    low, high = math.log(SLOWEST_DECAY), math.log(FASTEST_DECAY)
    rate = torch.empty(dt_bias.shape, dtype=torch.float32, device=dt_bias.device).uniform_(low, high).exp()
    A = A_log.float().exp().repeat_interleave(dt_bias.shape[0] // A_log.shape[0])
    if lower_bound is None:
        share = rate / A
        y = share + torch.log(-torch.expm1(-share))
    else:
        y = torch.logit(rate / -lower_bound) / A
    init.copy_(dt_bias, y.to(dt_bias.dtype))
