"""RMS norm over the head dimension, times a weight, times an activated gate: the output stage of delta-rule mixers."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["gated_norm"]

ACTIVATIONS = ("sigmoid", "silu")
OPERATION = Operation(
    "gated_norm",
    Backend("reference", "kimi_hf.ops.gated_norm.reference", "gated_norm_reference"),
    Backend("eager", "kimi_hf.ops.gated_norm.eager", "gated_norm_eager"),
    Backend("triton", "kimi_hf.ops.gated_norm.kernels", "gated_norm_triton", kernel_limits.row),
)


def gated_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    *,
    eps: float,
    activation: str = "sigmoid",
    backend: str | None = None,
) -> Tensor:
    """y = x / sqrt(mean_V(x^2) + eps) * weight * act(gate), all in fp32, one cast.

    Args:
        x: [..., V], any floating dtype.
        weight: [V], shared by all heads.
        gate: logits of x's shape, or None for the plain norm.
        eps: added to the mean of squares, inside the root.
        activation: "sigmoid" (KDA) or "silu" (Gated DeltaNet).
        backend: None for automatic.
    Returns: [..., V] in x.dtype.
    Raises: ShapeError for shapes, dtypes or an unknown activation; BackendError when a named backend cannot serve.
    Source: kimi_k3.md 3.5.
    """
    checks.require_shape("gated_norm", "weight", weight, x.shape[-1:], "(V,)")
    if gate is not None:
        checks.require_shape("gated_norm", "gate", gate, x.shape, "the shape of x")
    if activation not in ACTIVATIONS:
        raise ShapeError(f"gated_norm: activation is {activation!r}, expected one of {ACTIVATIONS}")
    checks.require_floating("gated_norm", x=x, weight=weight, **({} if gate is None else {"gate": gate}))
    return OPERATION.pick(x, backend)(x, weight, gate, eps=eps, activation=activation)
