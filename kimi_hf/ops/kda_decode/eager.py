"""The KDA step in plain PyTorch: one convolution for q, k and v over the window in place, no autograd in between."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_hf.ops import checks
from kimi_hf.ops.gated_norm.reference import gated_norm_reference
from kimi_hf.ops.kda import kda
from kimi_hf.ops.kda_decode.reference import with_padding


def kda_decode_eager(*inputs: Tensor, real: Tensor | None, **options) -> Tensor:
    """See `kimi_hf.ops.kda_decode.kda_decode`."""
    return with_padding(_step, inputs, real, options)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Tensor,
    window: Tensor,
    state: Tensor,
    *,
    conv_weights: tuple[Tensor, Tensor, Tensor],
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    _, H, K, V = state.shape
    dtype = checks.compute_dtype(q.dtype)
    tokens = torch.cat([q, k, v], 1).to(window.dtype)
    shifted = torch.cat([window[:, :, 1:], tokens[..., None]], 2)
    taps = torch.cat([weight.reshape(-1, window.shape[2]) for weight in conv_weights])
    mixed = silu((shifted.to(dtype) * taps.to(dtype)).sum(-1)).to(q.dtype)[:, None]
    window.copy_(shifted)
    q, k, v = (x.unflatten(-1, (H, -1)) for x in mixed.split([H * K, H * K, H * V], dim=-1))
    o, _ = kda(
        q,
        k,
        v,
        g[:, None].unflatten(-1, (H, K)),
        beta[:, None],
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        initial_state=state,
        inplace_state=True,
        backend="eager",
    )
    gates = gate[:, None].unflatten(-1, (H, V))
    return gated_norm_reference(o, norm_weight, gates, eps=eps, activation="sigmoid").flatten(1).to(gate.dtype)
