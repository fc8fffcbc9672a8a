"""The kernel for halves of one projection: it reads and writes rows of any stride, so the halves are views."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.ops.situ.kernels import situ_triton


def situ_glu_triton(gate_up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """See `kimi_hf.ops.situ.situ_glu`."""
    return situ_triton(*gate_up.chunk(2, dim=-1), beta=beta, linear_beta=linear_beta)
