"""The definition of the delta rule with and without a decay: one token at a time, in fp32 (fp64 for fp64 inputs)."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks


def delta_rule_reference(
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
    dtype = checks.compute_dtype(q.dtype)
    decay = torch.ones_like(beta, dtype=dtype) if g is None else g.to(dtype).exp()
    o, state = delta_recurrence(
        q.to(dtype) * scale, k.to(dtype), v.to(dtype), decay[..., None], beta.to(dtype), initial_state, cu_seqlens
    )
    if inplace_state:
        state = initial_state.copy_(state)
    return o.to(v.dtype), state if output_final_state or inplace_state else None


def delta_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S <- decay_t S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = S^T q_t.

    Args: q, k [B, T, H, K], used as they are; v [B, T, H, V]; decay [B, T, H, K or 1], in [0, 1];
        beta [B, T, H]; initial_state [N, H, K, V] or None; cu_seqlens int [N+1] or None.
    Returns: o [B, T, H, V], final state [N, H, K, V].
    """
    if cu_seqlens is not None:
        bounds = checks.sequence_bounds("delta_rule", cu_seqlens, q.shape[1])
        pieces = []
        for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            state = None if initial_state is None else initial_state[n : n + 1]
            row = (x[:, start:end] for x in (q, k, v, decay, beta))
            pieces.append(delta_recurrence(*row, state, None))
        outputs, states = zip(*pieces, strict=True)
        return torch.cat(outputs, 1), torch.cat(states)
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(q.dtype)
    outputs = []
    for t in range(T):
        S = S * decay[:, t, :, :, None]
        predicted = (k[:, t, :, None] @ S).squeeze(2)  # [B, H, V], read after the decay
        write = beta[:, t, :, None] * (v[:, t] - predicted)
        S = S + k[:, t, :, :, None] * write[:, :, None]
        outputs.append((q[:, t, :, None] @ S).squeeze(2))
    return torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape), S
