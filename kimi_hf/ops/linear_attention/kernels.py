"""Linear attention in Triton: the chunked kernels of KDA without decay and without prediction.

The normaliser is one more value column that always holds 1: the state's last column is then z, the output's f(q) . z.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops.kda.kernels import run_rule
from kimi_hf.ops.kda.kernels_forward import Rule

LINEAR = Rule("elu1", None, None, delta=False, sigmoid_beta=False)


def linear_attention_triton(
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
    values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    state = None if initial_state is None else torch.cat([initial_state[0], initial_state[1].unsqueeze(-1)], dim=-1)
    o, state = run_rule(
        q,
        k,
        values,
        None,
        None,
        None,
        None,
        LINEAR,
        scale=1.0,
        lower_bound=None,
        initial_state=state,
        output_final_state=output_final_state or inplace_state,
        cu_seqlens=cu_seqlens,
        inplace_state=False,
        output_dtype=torch.float32,
    )
    o = (o[..., :-1] / o[..., -1:] if normalize else o[..., :-1]).to(v.dtype)
    if state is None:
        return o, None
    final = state[..., :-1].contiguous(), state[..., -1].contiguous()
    if inplace_state:
        final = tuple(old.copy_(new) for old, new in zip(initial_state, final, strict=True))
    return o, final
