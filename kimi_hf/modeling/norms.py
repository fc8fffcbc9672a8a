"""Root-mean-square norms of the text decoder."""

import torch
from torch import Tensor, nn

from ..ops.gated_norm import gated_norm


class KimiRMSNorm(nn.Module):
    """y = round(x / sqrt(mean_D(x^2) + eps)) * weight: statistics in fp32, rounded *before* the weight is applied.

    In bf16 this rounds twice, as the release does.

    Args:
        hidden_size: D.
        eps: added to the mean of squares.
    """

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D) in x.dtype."""
        x32 = x if x.dtype == torch.float64 else x.float()
        y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class KimiGatedRMSNorm(nn.Module):
    """The output stage of delta-rule mixers: norm over each head, times weight, times an activated gate, in fp32.

    Args:
        head_dim: V.
        eps: added to the mean of squares.
        activation: "sigmoid" (KDA) or "silu" (Gated DeltaNet).
    """

    def __init__(self, head_dim: int, eps: float, activation: str = "sigmoid"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.eps = eps
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """(..., V), gate logits (..., V) or None -> (..., V) in x.dtype."""
        return gated_norm(x, self.weight, gate, eps=self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, activation={self.activation}"
