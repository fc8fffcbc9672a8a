"""The definition of the short convolution: each sequence on its own, one sum over the window."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_hf.ops import checks


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.short_conv.short_conv`."""
    dtype = checks.compute_dtype(x.dtype)
    if cu_seqlens is None:
        rows = list(x)
    else:
        bounds = checks.sequence_bounds("short_conv", cu_seqlens, x.shape[1])
        rows = [x[0, start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    width = weight.shape[1]
    outputs, windows = [], []
    for n, row in enumerate(rows):
        before = row.new_zeros(width, row.shape[1]) if initial_state is None else initial_state[n].T.to(x.dtype)
        history = torch.cat([before, row])  # [W + T, C]
        taps = history.unfold(0, width, 1)[1:].to(dtype)  # [T, C, W]: the window that ends at each token
        y = (taps * weight.to(dtype)).sum(-1)
        outputs.append((silu(y) if activation == "silu" else y).to(x.dtype))
        windows.append(history[-width:].T)
    y = torch.stack(outputs) if cu_seqlens is None else torch.cat(outputs)[None]
    return y, torch.stack(windows) if output_final_state else None
