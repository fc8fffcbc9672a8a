"""Dense feed-forwards: the GELU MLP of GPT-2, SiLU-GLU of Kimi-Linear and SiTU-GLU of Kimi K3."""

from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..ops.situ import situ, situ_glu


class SituGate:
    """(gate, up) -> SiTU, both (..., F); fp32 inside, one cast. Source: kimi_k3.md 5.1."""

    def __init__(self, beta: float, linear_beta: float | None):
        self.beta, self.linear_beta = beta, linear_beta

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return situ(gate, up, beta=self.beta, linear_beta=self.linear_beta)

    def glu(self, gate_up: Tensor) -> Tensor:
        """The same of the halves of one projection, (..., 2F) -> (..., F)."""
        return situ_glu(gate_up, beta=self.beta, linear_beta=self.linear_beta)


class ProductGate:
    """(gate, up) -> activation(gate) * up in the halves' own dtype, both (..., F)."""

    def __init__(self, activation: str):
        self.activation = ACT2FN[activation]

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up

    def glu(self, gate_up: Tensor) -> Tensor:
        """The same of the halves of one projection, (..., 2F) -> (..., F)."""
        return self(*gate_up.chunk(2, dim=-1))


def gated_activation(config) -> SituGate | ProductGate:
    """The gate that `config.hidden_act` names."""
    if config.hidden_act == "situ":
        return SituGate(config.situ_beta, config.activation_situ_linear_beta)
    return ProductGate(config.hidden_act)


class KimiMLP(nn.Module):
    """y = down(act(gate(x), up(x))): the dense feed-forward and the shared experts.

    Args:
        config: names the activation.
        hidden_size: D. intermediate_size: F.
    """

    def __init__(self, config, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = gated_activation(config)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))


class GeluMLP(nn.Module):
    """y = down(gelu(up(x))). Source: GPT-2 (its gelu is the tanh form).

    Args:
        hidden_size: D. intermediate_size: F.
        activation: "gelu_new" (tanh) or "gelu" (exact).
        bias: of both projections.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str, bias: bool):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act = nn.GELU(approximate="tanh" if activation == "gelu_new" else "none")

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.down_proj(self.act(self.up_proj(x)))
