"""SiTU, the saturating gated unit of Kimi K3's feed-forwards."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["situ", "situ_glu"]

OPERATION = Operation(
    "situ",
    Backend("reference", "kimi_hf.ops.situ.reference", "situ_reference"),
    Backend("eager", "kimi_hf.ops.situ.eager", "situ_eager"),
    Backend("triton", "kimi_hf.ops.situ.kernels", "situ_triton", kernel_limits.dtype),
    Backend("triton", "kimi_hf.ops.situ.kernels", "situ_triton", kernel_limits.dtype),
)
# The same choice by name; a door of its own because one gradient for both halves spares a copy.
GLU = Operation(
    "situ",
    Backend("reference", "kimi_hf.ops.situ.reference", "situ_glu_reference"),
    Backend("eager", "kimi_hf.ops.situ.eager", "situ_glu_eager"),
    Backend("triton", "kimi_hf.ops.situ.kernels", "situ_glu_triton", kernel_limits.dtype),
    Backend("triton", "kimi_hf.ops.situ.glu", "situ_glu_triton", kernel_limits.dtype),
)


def situ(
    gate: Tensor, up: Tensor, *, beta: float | None = 1.0, linear_beta: float | None = None, backend: str | None = None
) -> Tensor:
    """y = beta tanh(G / beta) sigmoid(G) * lambda tanh(U / lambda), all in fp32 (fp64 for fp64), one cast.

    Args:
        gate: G [..., F], any floating dtype, any strides.
        up: U [..., F], of gate's shape and dtype.
        beta: bound of the gate half; None or 0 mean 1.0, as in the released configuration.
        linear_beta: lambda, bound of the up half; None leaves U as it is.
        backend: None for automatic.
    Returns: [..., F] in gate.dtype.
    Raises: ShapeError for shapes, dtypes or bounds; BackendError when a named backend cannot serve.
    Source: kimi_k3.md 5.1; (G, U) = (3, 40) with beta 4, lambda 25 gives 55.763386.
    """
    checks.require_floating("situ", gate=gate, up=up)
    checks.require_shape("situ", "up", up, gate.shape, "the shape of gate")
    if up.dtype != gate.dtype:
        raise ShapeError(f"situ: up is {up.dtype}, gate is {gate.dtype}, expected one dtype; cast one of them")
    return OPERATION.pick(gate, backend)(gate, up, **_bounds(beta, linear_beta))


def situ_glu(
    gate_up: Tensor, *, beta: float | None = 1.0, linear_beta: float | None = None, backend: str | None = None
) -> Tensor:
    """`situ` of the two halves of one projection: gate_up [..., 2F] = [gate | up] -> [..., F]; same errors."""
    checks.require_floating("situ_glu", gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ShapeError(
            f"situ_glu: gate_up has shape {tuple(gate_up.shape)}, expected an even last dimension [gate | up]"
        )
    return GLU.pick(gate_up, backend)(gate_up, **_bounds(beta, linear_beta))


def _bounds(beta: float | None, linear_beta: float | None) -> dict[str, float | None]:
    beta = beta or 1.0
    for name, bound in (("beta", beta), ("linear_beta", linear_beta)):
        if bound is not None and not bound > 0:
            raise ShapeError(f"situ: {name} is {bound}, expected a positive bound or None")
    return {"beta": beta, "linear_beta": linear_beta}
