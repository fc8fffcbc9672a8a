"""flash-linear-attention's KDA kernels behind our signature; its version is checked by the dispatcher.

Loading this module also compares the parameters of both functions with those the calls below name, so that a changed
meaning of the same version number is an error and not a silent keyword.
"""

from __future__ import annotations

import inspect

import torch
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from torch import Tensor

from kimi_hf.errors import BackendError

FEW_TOKENS = 16  # per sequence: up to here without gradients the recurrent kernel
COMMON = (
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "lower_bound", "cu_seqlens",
)  # fmt: skip
NAMED = {chunk_kda: (*COMMON, "safe_gate"), fused_recurrent_kda: (*COMMON, "A_log", "dt_bias")}

for function, names in NAMED.items():
    missing = [name for name in names if name not in inspect.signature(function).parameters]
    if missing:
        raise BackendError(
            f"kda: backend 'fla': {function.__name__} of the installed flash-linear-attention takes no {missing}; "
            "install a version this adapter knows, or choose another backend"
        )


def kda_fla(
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
    options = {
        "A_log": A_log.float(),
        "dt_bias": dt_bias.float(),
        "scale": q.shape[-1] ** -0.5,
        "initial_state": initial_state,
        "output_final_state": output_final_state or inplace_state,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": lower_bound,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    inputs = tuple(x.contiguous() for x in (q, k, v, g, beta.float()))
    tensors = (*inputs, A_log, dt_bias, initial_state)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if q.shape[1] <= FEW_TOKENS and not needs_grad:
        o, state = fused_recurrent_kda(*inputs, **options)
    else:
        o, state = chunk_kda(*inputs, **options, safe_gate=lower_bound is not None)
    if inplace_state:
        state = initial_state.copy_(state.detach())
    return o.to(v.dtype), state
