"""Kimi Delta Attention: the delta rule with a decay per channel. The derivation is in README.md."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.dispatch import Backend, Operation
from kimi_hf.ops.kda.gate import kda_log_decay, l2_normalize

__all__ = ["kda", "kda_log_decay", "l2_normalize"]

OPERATION = Operation(
    "kda",
    Backend("reference", "kimi_hf.ops.kda.reference", "kda_reference"),
    Backend("eager", "kimi_hf.ops.kda.eager", "kda_eager"),
    Backend("triton", "kimi_hf.ops.kda.kernels", "kda_triton", kernel_limits.heads),
    Backend("fla", "kimi_hf.ops.kda.fla", "kda_fla", kernel_limits.fla_kda),
)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    inplace_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = (I - b k k^T) diag(exp(a)) S_{t-1} + b k v^T,  o_t = S_t^T q, per head, from raw projections.

    Here k is the key scaled to unit length, q the query scaled to length K^-1/2, b = sigmoid(beta) and
    a = kda_log_decay(g, A_log, dt_bias, lower_bound) <= 0.

    Args:
        q, k: [B, T, H, K], not normalised; any floating dtype, any K, T >= 1 (packed rows may be empty).
        v: [B, T, H, V].
        g: [B, T, H, K] decay logits, before dt_bias.
        beta: [B, T, H] write logits, before the sigmoid.
        A_log: [H]. dt_bias: [H*K]. Used in fp32.
        lower_bound: None for the softplus gate, negative for the bounded gate (K3: -5).
        initial_state: [N, H, K, V], fp32 (fp64 for fp64 q); None for zeros.
        output_final_state: also return the state after the last token.
        cu_seqlens: int [N+1], packed sequences in one row (B = 1). Empty ones pass their state through. N = B without.
        inplace_state: write the final state into `initial_state` (no gradients) and return it.
        backend: None for automatic.
    Returns:
        o [B, T, H, V] in v.dtype; the final state [N, H, K, V] in fp32 (fp64 for fp64 q), or None.
    Raises: ShapeError for shapes, dtypes, bound; BackendError when a named backend cannot serve.
    Numerics: all arithmetic in fp32 (fp64), one cast of o.
    Source: Kimi Linear (arXiv 2510.26692); kimi_k3.md 3.3 and 3.4.
    """
    checks.require_rank("kda", "q", q, 4, "(B, T, H, K)")
    B, T, H, K = q.shape
    checks.require_shape("kda", "k", k, (B, T, H, K), "(B, T, H, K)")
    checks.require_shape("kda", "v", v, (B, T, H, *v.shape[3:4]), "(B, T, H, V)")
    checks.require_shape("kda", "g", g, (B, T, H, K), "(B, T, H, K)")
    checks.require_shape("kda", "beta", beta, (B, T, H), "(B, T, H)")
    checks.require_shape("kda", "A_log", A_log, (H,), "(H,)")
    checks.require_shape("kda", "dt_bias", dt_bias, (H * K,), "(H*K,)")
    checks.require_floating("kda", q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
    if lower_bound is not None and not lower_bound < 0:
        raise ShapeError(f"kda: lower_bound is {lower_bound}, expected None (softplus gate) or a negative number")
    sequences = checks.number_of_sequences("kda", B, cu_seqlens)
    if initial_state is not None:
        checks.require_state("kda", initial_state, (sequences, H, K, v.shape[3]), q.dtype)
    if inplace_state:
        checks.require_inplace_allowed("kda", initial_state, q, k, v, g, beta, A_log, dt_bias)
    run = OPERATION.pick(q, backend, head_dim=K, value_dim=v.shape[3], tokens=T, lower_bound=lower_bound)
    with no_autocast(q):
        return run(
            q,
            k,
            v,
            g,
            beta,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            inplace_state=inplace_state,
        )
