"""The definition of the KDA step: its three operations one after the other, by their definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kimi_hf.ops.gated_norm import gated_norm
from kimi_hf.ops.kda import kda
from kimi_hf.ops.short_conv import short_conv


def kda_decode_reference(*inputs: Tensor, real: Tensor | None, **options) -> Tensor:
    """See `kimi_hf.ops.kda_decode.kda_decode`."""
    return with_padding(three_operations, inputs, real, options | {"backend": "reference"})


def with_padding(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], real: Tensor | None, options: dict) -> Tensor:
    """run(*inputs, **options) whose window and state, the last two inputs, stay as they were in rows that are not real."""
    if real is None:
        return run(*inputs, **options)
    memory = inputs[-2:]
    before = [x.clone() for x in memory]
    y = run(*inputs, **options)
    for x, old in zip(memory, before, strict=True):
        x.copy_(torch.where(real.view(-1, *(1,) * (x.dim() - 1)), x, old))
    return y.masked_fill(~real[:, None], 0)


def three_operations(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Tensor,
    window: Tensor,
    state: Tensor,
    *,
    conv_weights: tuple[Tensor, Tensor, Tensor],
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    norm_weight: Tensor,
    eps: float,
    backend: str,
) -> Tensor:
    """`kda_decode` through the named backend of each of its operations."""
    _, H, K, V = state.shape
    mixed = []
    for x, weight, part in zip((q, k, v), conv_weights, window.split([H * K, H * K, H * V], dim=1), strict=True):
        y, _ = short_conv(x[:, None], weight, initial_state=part, inplace_state=True, backend=backend)
        mixed.append(y.unflatten(-1, (H, -1)))
    g, beta = g[:, None].unflatten(-1, (H, K)), beta[:, None]
    gates = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    o, _ = kda(*mixed, g, beta, **gates, initial_state=state, inplace_state=True, backend=backend)
    y = gated_norm(o, norm_weight, gate[:, None].unflatten(-1, (H, V)), eps=eps, backend=backend)
    return y.flatten(1).to(gate.dtype)
