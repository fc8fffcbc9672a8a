"""The short convolution in front of delta-rule mixers, as a module that holds its weight."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...ops.short_conv import short_conv
from ..sequence import PaddedRows, SequenceLayout


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over time, then SiLU; `weight` (C, 1, W), no bias.

    Args:
        channels: C.
        width: W, how many tokens an output sees.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(
        self, x: Tensor, window: Tensor | None, cu_seqlens: Tensor | None, keep_window: bool
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, T, C), window (N, C, W) of earlier inputs or None -> y (B, T, C), the new window if asked for."""
        return short_conv(x, self.weight, initial_state=window, output_final_state=keep_window, cu_seqlens=cu_seqlens)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.weight.shape[2]}"


def convolve(
    convs: Sequence[ShortConvolution],
    inputs: Sequence[Tensor],
    window: Tensor | None,
    layout: SequenceLayout | None,
    keep: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Several convolutions side by side, with one window for all of them.

    Args:
        inputs: one (B, T, C_i) a convolution, as `layout` packed it.
        window: (N, sum C_i, W) earlier inputs, or None.
        keep: also return the window after the last real token.
    Returns:
        outputs (B, T, C_i); the new window (N, sum C_i, W), or None.
    """
    ragged = isinstance(layout, PaddedRows)
    cu_seqlens = None if layout is None else layout.cu_seqlens
    widths = [conv.weight.shape[0] for conv in convs]
    windows = [None] * len(convs) if window is None else window.split(widths, dim=1)
    outputs, kept = [], []
    for conv, x, before in zip(convs, inputs, windows, strict=True):
        y, after = conv(x, before, cu_seqlens, keep and not ragged)
        outputs.append(y)
        kept.append(layout.last_inputs(before, x, conv.weight.shape[-1]) if keep and ragged else after)
    return outputs, torch.cat(kept, dim=1) if keep else None
