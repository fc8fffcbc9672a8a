"""RMSNorm as the vision tower has it, which is not the text model's."""

import torch
from torch import nn

# The released tower builds torch.nn.RMSNorm without an eps, and torch then takes the machine epsilon of the type it
# computes in: float32's, also for bfloat16 and float16 inputs. (Not 1e-5, not 1e-6, not bfloat16's 2^-7.)
VISION_NORM_EPS = 2.0**-23


class VisionRMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, statistics and product in float32, **one** cast at the end.

    The text model's norm casts before it multiplies by the weight; the difference is one rounding in bfloat16.

    Args:
        size: length of the last dimension.
        eps: added to the mean of squares.
    """

    def __init__(self, size: int, eps: float = VISION_NORM_EPS):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states (..., D), any float dtype -> same shape and dtype."""
        compute = torch.promote_types(hidden_states.dtype, torch.float32)
        x = hidden_states.to(compute)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * self.weight.to(compute)).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
