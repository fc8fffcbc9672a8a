"""The delta rule token by token for decoding: no gradients, the state read once and rewritten once a step."""

from __future__ import annotations

import torch
from torch import Tensor

# Up to here single steps beat a chunk (README.md of kda says how that was measured).
STEPS_AT_MOST = 4


def delta_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """S <- decay_t S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = S^T q_t.

    With a = decay: k^T (a S) = (a k)^T S and q^T S_new = (a q)^T S + (q . k) write, so both products are taken of the
    state as it lies in memory, in one batched product, and one more pass writes the new state.

    Args: q (scaled), k [B, T, H, K]; v [B, T, H, V], any dtype; decay [B, T, H, K or 1] or None; beta [B, T, H];
        initial_state [B, H, K, V] or None; inplace: overwrite it.
    Returns: o [B, T, H, V] in v.dtype, the final state [B, H, K, V].
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    fresh = initial_state is None
    S = q.new_zeros(B, H, K, V) if fresh else initial_state
    overlap = (q * k).sum(-1, keepdim=True)  # [B, T, H, 1]
    outputs = []
    for t in range(T):
        key, query = k[:, t], q[:, t]
        sides = torch.stack([key, query], 2)  # [B, H, 2, K]
        if decay is not None:
            sides = sides * decay[:, t, :, None]
        predicted, read = (sides @ S).unbind(2)  # [B, H, V]
        write = (v[:, t] - predicted) * beta[:, t, :, None]
        outputs.append(torch.addcmul(read, overlap[:, t], write))
        # The state is copied at most once: by the first step, when the caller keeps the old one.
        owned = inplace or fresh or t > 0
        if decay is not None:
            S = S.mul_(decay[:, t, :, :, None]) if owned else S * decay[:, t, :, :, None]
        elif not owned:
            S = S.clone()
        S.addcmul_(key[..., None], write[:, :, None])
    return torch.stack(outputs, 1).to(v.dtype), S
