"""The definition of Kimi Delta Attention: one token at a time, everything in fp32 (fp64 for fp64 inputs)."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.delta_rule.reference import delta_recurrence
from kimi_hf.ops.kda.gate import kda_log_decay, l2_normalize


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.kda.kda`."""
    dtype = checks.compute_dtype(q.dtype)
    queries = l2_normalize(q.to(dtype)) * q.shape[-1] ** -0.5
    keys = l2_normalize(k.to(dtype))
    decay = kda_log_decay(g.to(dtype), A_log, dt_bias, lower_bound).exp()
    o, state = delta_recurrence(
        queries, keys, v.to(dtype), decay, torch.sigmoid(beta.to(dtype)), initial_state, cu_seqlens
    )
    if inplace_state:
        state = initial_state.copy_(state)
    return o.to(v.dtype), state if output_final_state or inplace_state else None
