"""The short convolution in plain PyTorch: W shifted multiply-adds over whole rows instead of a window per token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_hf.ops import checks


def short_conv_eager(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.short_conv.short_conv`."""
    if cu_seqlens is not None:
        return _packed(x, weight, activation, initial_state, output_final_state, cu_seqlens)
    width = weight.shape[1]
    if initial_state is None:
        before = x.new_zeros(x.shape[0], width, x.shape[2])
    else:
        before = initial_state.transpose(1, 2).to(x.dtype)
    history = torch.cat([before, x], dim=1)  # [B, W + T, C]
    y = _convolve(history[:, 1:], weight, activation).to(x.dtype)
    return y, history[:, -width:].transpose(1, 2) if output_final_state else None


def _convolve(history: Tensor, weight: Tensor, activation: str | None) -> Tensor:
    """history [B, W-1 + T, C] -> [B, T, C] in the compute dtype."""
    dtype = checks.compute_dtype(history.dtype)
    width = weight.shape[1]
    tokens = history.shape[1] - width + 1
    taps = weight.to(dtype).unbind(1)  # W times [C]
    y = history[:, :tokens].to(dtype) * taps[0]
    for j in range(1, width):
        y = torch.addcmul(y, history[:, j : j + tokens].to(dtype), taps[j])
    return silu(y) if activation == "silu" else y


def _packed(
    x: Tensor,
    weight: Tensor,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Sequences of one row, spread out with W window slots before each, convolved at once and closed up again."""
    bounds = checks.sequence_bounds("short_conv", cu_seqlens, x.shape[1])
    width, channels, sequences = weight.shape[1], x.shape[2], len(bounds) - 1
    lengths = torch.tensor([b - a for a, b in zip(bounds, bounds[1:], strict=False)], device=x.device)
    owner = torch.repeat_interleave(torch.arange(sequences, device=x.device), lengths)
    slots = torch.arange(x.shape[1], device=x.device) + (owner + 1) * width  # where each token lies when spread out
    starts = torch.as_tensor(bounds[:-1], device=x.device) + torch.arange(sequences, device=x.device) * width
    window = starts[:, None] + torch.arange(width, device=x.device)  # [N, W]
    history = x.new_zeros(x.shape[1] + sequences * width, channels).index_copy(0, slots, x[0])
    if initial_state is not None:
        before = initial_state.transpose(1, 2).to(x.dtype).reshape(-1, channels)
        history = history.index_copy(0, window.reshape(-1), before)
    y = _convolve(history[None], weight, activation)[0].index_select(0, slots - width + 1).to(x.dtype)[None]
    if not output_final_state:
        return y, None
    last = (window + lengths[:, None]).reshape(-1)  # the last W slots of each sequence reach back into its window
    return y, history.index_select(0, last).view(sequences, width, channels).transpose(1, 2)
