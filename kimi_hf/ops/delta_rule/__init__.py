"""The delta rule: DeltaNet (no decay) and Gated DeltaNet (one decay per head and step)."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["delta_rule"]

OPERATION = Operation(
    "delta_rule",
    Backend("reference", "kimi_hf.ops.delta_rule.reference", "delta_rule_reference"),
    Backend("eager", "kimi_hf.ops.delta_rule.eager", "delta_rule_eager"),
    Backend("triton", "kimi_hf.ops.delta_rule.kernels", "delta_rule_triton", kernel_limits.heads),
)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    inplace_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) S_{t-1};  S_t += beta_t k_t (v_t - k_t^T S_t)^T;  o_t = scale * S_t^T q_t, per head.

    Unlike `kda`, which takes raw projections, this takes FINISHED inputs: the mixer normalises q and k (for DeltaNet
    `l2_normalize(silu(.))`), takes the sigmoid of the write logits and turns its gate into a log decay.

    Args:
        q, k: [B, T, H, K], used as they are; keys should have length <= 1, or the rule is not a contraction.
        v: [B, T, H, V].
        beta: [B, T, H] write strength, in (0, 1) (up to 2 is legal).
        g: None for DeltaNet, [B, T, H] log decay <= 0 for Gated DeltaNet (-exp(A_log) softplus(a + dt_bias)).
        scale: multiplies q. None means what the papers do: 1 without g, K^-1/2 with g.
        initial_state: [N, H, K, V], fp32 (fp64 for fp64 q); None for zeros.
        output_final_state: also return the state after the last token.
        cu_seqlens: int [N+1], packed sequences in one row (B = 1). Empty ones pass their state through. N = B without.
        inplace_state: write the final state into `initial_state` (no gradients) and return it.
        backend: None for automatic.
    Returns:
        o [B, T, H, V] in v.dtype; the final state [N, H, K, V] in fp32 (fp64 for fp64 q), or None.
    Raises: ShapeError for shapes and dtypes; BackendError when a named backend cannot serve.
    Numerics: all arithmetic in fp32 (fp64), one cast of o.
    Source: DeltaNet (arXiv 2406.06484), Gated DeltaNet (arXiv 2412.06464).
    """
    checks.require_rank("delta_rule", "q", q, 4, "(B, T, H, K)")
    B, T, H, K = q.shape
    checks.require_shape("delta_rule", "k", k, (B, T, H, K), "(B, T, H, K)")
    checks.require_shape("delta_rule", "v", v, (B, T, H, *v.shape[3:4]), "(B, T, H, V)")
    checks.require_shape("delta_rule", "beta", beta, (B, T, H), "(B, T, H)")
    checks.require_floating("delta_rule", q=q, k=k, v=v, beta=beta, **({} if g is None else {"g": g}))
    if g is not None:
        checks.require_shape("delta_rule", "g", g, (B, T, H), "(B, T, H)")
    sequences = checks.number_of_sequences("delta_rule", B, cu_seqlens)
    if initial_state is not None:
        checks.require_state("delta_rule", initial_state, (sequences, H, K, v.shape[3]), q.dtype)
    if inplace_state:
        checks.require_inplace_allowed("delta_rule", initial_state, q, k, v, beta, g)
    if scale is None:
        scale = 1.0 if g is None else K**-0.5
    run = OPERATION.pick(q, backend, head_dim=K, value_dim=v.shape[3], tokens=T, gated=g is not None)
    with no_autocast(q):
        return run(
            q,
            k,
            v,
            beta,
            g=g,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            inplace_state=inplace_state,
        )
