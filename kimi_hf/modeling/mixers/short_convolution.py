"""The short convolution in front of delta-rule mixers, as a module that holds its weight."""

import torch
from torch import Tensor, nn

from ...ops.short_conv import short_conv


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
