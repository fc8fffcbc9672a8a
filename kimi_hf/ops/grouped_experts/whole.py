"""All experts in two grouped products whose shapes do not depend on the routing: for GPUs and compiled graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.grouped_experts.library import grouped_linear, grouped_linear_packed
from kimi_hf.ops.mxfp4.packed import PackedWeight


def grouped_experts_whole(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor | PackedWeight,
    down_proj: Tensor | PackedWeight,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    """See `kimi_hf.ops.grouped_experts.grouped_experts`."""
    wide = checks.compute_dtype(hidden.dtype)
    tokens, k = indices.shape
    experts = gate_up_proj.shape[0]
    flat = indices.reshape(-1)
    absent = (flat < 0) | (flat >= experts)
    # pairs of no expert ride with the last one and are weighed by zero
    ordered, pair = flat.masked_fill(absent, experts - 1).sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(1, experts + 1, device=flat.device)).to(torch.int32)
    gate_up = _grouped(hidden.index_select(0, pair // k), gate_up_proj, ends)
    y = _grouped(act(gate_up), down_proj, ends)
    scale = weights.reshape(-1).to(wide).masked_fill(absent, 0.0).index_select(0, pair)
    y = y.to(wide) * scale[:, None]
    back = torch.empty_like(pair).scatter(0, pair, torch.arange(len(pair), device=pair.device))
    return y.index_select(0, back).view(tokens, k, -1).sum(1).to(hidden.dtype)


def torch_can_group(x: Tensor, stack: Tensor | PackedWeight) -> bool:
    """Whether torch's own grouped product takes these: dense bf16 on a GPU from SM80 on, rows of whole 16 bytes.

    On a CPU it is the same loop over slices, traced for bf16 only and without a backward.
    """
    return (
        not isinstance(stack, PackedWeight)
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and hasattr(torch.nn.functional, "grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and all(width * x.element_size() % 16 == 0 for width in stack.shape[1:])
    )


def _grouped(x: Tensor, stack: Tensor | PackedWeight, ends: Tensor) -> Tensor:
    if isinstance(stack, PackedWeight):
        return grouped_linear_packed(x, stack.packed, stack.scale, ends, False)
    if torch_can_group(x, stack):
        return torch.nn.functional.grouped_mm(x, stack.to(x.dtype).mT, offs=ends)
    return grouped_linear(x, stack.to(x.dtype), ends)
