"""The definition of the routed experts: a loop over those that were chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from kimi_hf.ops import checks
from kimi_hf.ops.mxfp4.packed import PackedWeight


def grouped_experts_reference(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor | PackedWeight,
    down_proj: Tensor | PackedWeight,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    """See `kimi_hf.ops.grouped_experts.grouped_experts`."""
    wide = checks.compute_dtype(hidden.dtype)
    out = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
    for expert in torch.unique(indices).tolist():
        if not 0 <= expert < gate_up_proj.shape[0]:
            continue
        token, slot = torch.where(indices == expert)
        inner = act(linear(hidden[token], _matrix(gate_up_proj, expert, hidden.dtype)))
        y = linear(inner, _matrix(down_proj, expert, hidden.dtype))
        out = out.index_add(0, token, y.to(wide) * weights[token, slot, None].to(wide))
    return out.to(hidden.dtype)


def _matrix(stack: Tensor | PackedWeight, expert: int, dtype: torch.dtype) -> Tensor:
    if isinstance(stack, PackedWeight):
        return stack.dense(expert, slice(None), dtype)
    return stack[expert].to(dtype)
