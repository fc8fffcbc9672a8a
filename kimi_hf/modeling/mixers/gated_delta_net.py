"""Gated DeltaNet: the delta rule with forgetting, one decay a head and step.

Source: Gated Delta Networks (arXiv 2412.06464).
"""

import torch
from torch import Tensor, nn

from ...ops.kda import kda_log_decay
from .delta_net import DeltaNet


class GatedDeltaNet(DeltaNet):
    """S_t = a_t S_{t-1}, then DeltaNet's write; a_t = exp(-exp(A_log) softplus(a_proj(x_t) + dt_bias)) per head.

    By default with short convolutions, output norm and output gate, and q scaled by K^-1/2.

    Args:
        config: a `LadderConfig`.
        layer_idx: 0-based, the cache layer this mixer owns.
    """

    name = "gated_delta_net"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.a_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return *super().project(hidden_states), self.a_proj(hidden_states)

    def log_decay(self, logits: tuple[Tensor, ...]) -> Tensor:
        """-exp(A_log) softplus(a + dt_bias), in fp32."""
        (a,) = logits
        return kda_log_decay(a[..., None], self.A_log, self.dt_bias)[..., 0]
