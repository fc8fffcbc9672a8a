"""Linear attention with the feature map elu(x) + 1 and an optional normaliser."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["linear_attention"]

OPERATION = Operation(
    "linear_attention",
    Backend("reference", "kimi_hf.ops.linear_attention.reference", "linear_attention_reference"),
    Backend("eager", "kimi_hf.ops.linear_attention.eager", "linear_attention_eager"),
    Backend("triton", "kimi_hf.ops.linear_attention.kernels", "linear_attention_triton", kernel_limits.heads),
)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool = True,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    inplace_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """S_t = S_{t-1} + f(k_t) v_t^T;  z_t = z_{t-1} + f(k_t);  o_t = S_t^T f(q_t) / (f(q_t) . z_t);  f(x) = elu(x) + 1.

    Args:
        q, k: [B, T, H, K], raw; the feature map is applied inside. No scale.
        v: [B, T, H, V].
        normalize: divide by f(q).z; off gives S^T f(q).
        initial_state: (S [N, H, K, V], z [N, H, K]), fp32 (fp64 for fp64 q); None for zeros.
        output_final_state: also return (S, z) after the last token.
        cu_seqlens: int [N+1], packed sequences in one row (B = 1). Empty ones pass their state through. N = B without.
        inplace_state: write the final state into `initial_state` (no gradients) and return it.
        backend: None for automatic.
    Returns:
        o [B, T, H, V] in v.dtype; the final (S, z), or None.
    Raises: ShapeError for shapes and dtypes; BackendError when a named backend cannot serve.
    Numerics: all arithmetic in fp32 (fp64), one cast of o. The feature map is positive, so the divisor is too.
    Source: Katharopoulos et al. (arXiv 2006.16236).
    """
    checks.require_rank("linear_attention", "q", q, 4, "(B, T, H, K)")
    B, T, H, K = q.shape
    checks.require_shape("linear_attention", "k", k, (B, T, H, K), "(B, T, H, K)")
    checks.require_shape("linear_attention", "v", v, (B, T, H, *v.shape[3:4]), "(B, T, H, V)")
    checks.require_floating("linear_attention", q=q, k=k, v=v)
    sequences = checks.number_of_sequences("linear_attention", B, cu_seqlens)
    if initial_state is not None:
        S, z = initial_state
        checks.require_state("linear_attention", S, (sequences, H, K, v.shape[3]), q.dtype)
        checks.require_shape("linear_attention", "initial_state[1]", z, (sequences, H, K), "(N, H, K)")
    if inplace_state:
        checks.require_inplace_allowed("linear_attention", *(initial_state or (None,)), q, k, v)
    run = OPERATION.pick(q, backend, head_dim=K, value_dim=v.shape[3], tokens=T)
    with no_autocast(q):
        return run(
            q,
            k,
            v,
            normalize=normalize,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            inplace_state=inplace_state,
        )
