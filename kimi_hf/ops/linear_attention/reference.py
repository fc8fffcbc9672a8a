"""The definition of linear attention: one token at a time, in fp32 (fp64 for fp64 inputs)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import elu

from kimi_hf.ops import checks


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool,
    initial_state: tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """See `kimi_hf.ops.linear_attention.linear_attention`."""
    dtype = checks.compute_dtype(q.dtype)
    queries, keys, values = elu(q.to(dtype)) + 1, elu(k.to(dtype)) + 1, v.to(dtype)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is None:
        S, z = values.new_zeros(N, *q.shape[2:], v.shape[3]), values.new_zeros(N, *q.shape[2:])
    else:
        S, z = (x.to(dtype) for x in initial_state)
    if cu_seqlens is None:
        o, S, z = _recurrence(queries, keys, values, S, z, normalize)
    else:
        bounds = checks.sequence_bounds("linear_attention", cu_seqlens, q.shape[1])
        spans = list(zip(bounds, bounds[1:], strict=False))
        pieces = [
            _recurrence(queries[:, a:b], keys[:, a:b], values[:, a:b], S[n : n + 1], z[n : n + 1], normalize)
            for n, (a, b) in enumerate(spans)
        ]
        outputs, states, normalizers = zip(*pieces, strict=True)
        o, S, z = torch.cat(outputs, 1), torch.cat(states), torch.cat(normalizers)
    final = (S, z)
    if inplace_state:
        final = tuple(old.copy_(new) for old, new in zip(initial_state, final, strict=True))
    return o.to(v.dtype), final if output_final_state or inplace_state else None


def _recurrence(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, normalize: bool):
    outputs = []
    for t in range(q.shape[1]):
        S = S + k[:, t, :, :, None] * v[:, t, :, None]
        z = z + k[:, t]
        o = (q[:, t, :, None] @ S).squeeze(2)  # [B, H, V]
        outputs.append(o / (q[:, t] * z).sum(-1, keepdim=True) if normalize else o)
    return torch.stack(outputs, 1) if outputs else v, S, z
