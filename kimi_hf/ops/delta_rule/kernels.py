"""DeltaNet and Gated DeltaNet in Triton: the chunked kernels of KDA with one decay a head, or none."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.ops.kda.kernels import run_rule
from kimi_hf.ops.kda.kernels_forward import Rule

DELTA = Rule("scale", None, None, delta=True, sigmoid_beta=False)
GATED = Rule("scale", "head", None, delta=True, sigmoid_beta=False)


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.delta_rule.delta_rule`."""
    return run_rule(
        q,
        k,
        v,
        g,
        beta,
        None,
        None,
        DELTA if g is None else GATED,
        scale=scale,
        lower_bound=None,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        inplace_state=inplace_state,
    )
