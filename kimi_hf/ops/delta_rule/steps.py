"""The delta rule token by token for decoding: no gradients, the state read once and rewritten once a step."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kimi_hf.ops import checks

# Up to here single steps beat a chunk: measured with 4 to 96 heads of 128 on one CPU thread, they draw at 16 to 24.
STEPS_AT_MOST = 16


def steps_serve(tokens: int, cu_seqlens: Tensor | None, *tensors: Tensor | None) -> bool:
    """Whether a call should be stepped through: few tokens in ordinary rows, and no gradients wanted of `tensors`.

    A compiler would unroll the steps and compile again for every length, so under one only single tokens are.
    """
    most = 1 if torch.compiler.is_compiling() else STEPS_AT_MOST
    return cu_seqlens is None and tokens <= most and not checks.needs_gradient(*tensors)


def delta_steps(
    sides: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor, initial_state: Tensor | None, inplace: bool
) -> tuple[Tensor, Tensor]:
    """S <- decay_t S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  o_t = S^T q_t.

    With a = decay: k^T (a S) = (a k)^T S and q^T S_new = (a q)^T S + (q . k) write, so both products are taken of the
    state as it lies in memory, in one batched product, and one more pass writes the new state.

    Args: sides [B, T, H, 2, K], the finished key and (scaled) query; v [B, T, H, V], any dtype; decay [B, T, H, K or 1]
        or None; beta [B, T, H]; initial_state [B, H, K, V] or None; inplace: overwrite it.
    Returns: o [B, T, H, V] in v.dtype, the final state [B, H, K, V].
    """
    B, T, H, _, K = sides.shape
    fresh = initial_state is None
    S = sides.new_zeros(B, H, K, v.shape[-1]) if fresh else initial_state
    keys = sides[..., 0, :, None]  # [B, T, H, K, 1]
    overlap = (sides[..., 0, :] * sides[..., 1, :]).sum(-1, keepdim=True)  # q . k, [B, T, H, 1]
    decayed = sides if decay is None else sides * decay[..., None, :]
    beta = beta[..., None]
    outputs = []
    for t in range(T):
        predicted, read = read_state(decayed[:, t], S).unbind(2)  # [B, H, V]
        write = (v[:, t] - predicted) * beta[:, t]
        outputs.append(torch.addcmul(read, overlap[:, t], write))
        # The state is copied at most once: by the first step, when the caller keeps the old one.
        owned = inplace or fresh or t > 0
        if decay is not None:
            S = S.mul_(decay[:, t, :, :, None]) if owned else S * decay[:, t, :, :, None]
        elif not owned:
            S = S.clone()
        S.addcmul_(keys[:, t], write[:, :, None])
    o = outputs[0][:, None] if T == 1 else torch.stack(outputs, 1)
    return o.to(v.dtype), S


def read_state(sides: Tensor, S: Tensor) -> Tensor:
    """sides [B, H, 2, K] @ S [B, H, K, V] -> [B, H, 2, V].

    On CPUs a matrix product with two rows packs every state before it multiplies, and runs at half the memory's speed.
    A weighted sum of rows, which is what an embedding bag computes, reads each state once.
    """
    B, H, K, V = S.shape
    if S.device.type != "cpu" or S.dtype != torch.float32 or not S.is_contiguous() or torch.compiler.is_compiling():
        return sides @ S
    rows, bags = _bags(B * H, K)
    read = embedding_bag(rows, S.view(-1, V), bags, mode="sum", per_sample_weights=sides.reshape(-1))
    return read.view(B, H, 2, V)


@lru_cache(maxsize=8)
def _bags(states: int, K: int) -> tuple[Tensor, Tensor]:
    """Row numbers of every state, twice over, and where each of the 2 * states bags begins."""
    rows = torch.arange(states * K, dtype=torch.int32).view(states, 1, K).expand(states, 2, K).reshape(-1)
    return rows, torch.arange(0, 2 * states * K, K, dtype=torch.int32)
