"""The routed experts of a mixture: every token through its k chosen gated feed-forwards, weighted and summed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.autocast import autocast_dtype, no_autocast
from kimi_hf.ops.dispatch import Backend, Operation
from kimi_hf.ops.grouped_experts.eager import fetched_experts_eager
from kimi_hf.ops.grouped_experts.stack import FetchedStack
from kimi_hf.ops.mxfp4.packed import PackedWeight

__all__ = ["fetched_experts", "grouped_experts"]

OPERATION = Operation(
    "grouped_experts",
    Backend("reference", "kimi_hf.ops.grouped_experts.reference", "grouped_experts_reference"),
    Backend("eager", "kimi_hf.ops.grouped_experts.eager", "grouped_experts_eager"),
    Backend("triton", "kimi_hf.ops.grouped_experts.kernels", "grouped_experts_triton", kernel_limits.packed),
)


def grouped_experts(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor | PackedWeight,
    down_proj: Tensor | PackedWeight,
    act: Callable[[Tensor], Tensor],
    *,
    backend: str | None = None,
) -> Tensor:
    """y_n = sum_j weights[n, j] * down[e] act(gate_up[e] hidden_n), e = indices[n, j]; a token costs k experts.

    Expert outputs are in the activation dtype, weighted and summed in fp32 (fp64 for fp64), one cast.

    Args:
        hidden: [N, D]. indices: [N, k] int64; entries outside 0 .. E - 1 contribute nothing (expert parallelism).
        weights: [N, k], fp32.
        gate_up_proj: [E, 2F, D], rows [gate | up] of each expert; down_proj: [E, D, F]. Parameters, taken in the
            activation dtype, or `PackedWeight` (MXFP4, constant).
        act: [rows, 2F] -> [rows, F], row by row and without parameters of its own; it is called once or several times,
            and again in the backward.
        backend: None for automatic.
    Returns: [N, D] in hidden.dtype (under autocast in autocast's). Differentiable in hidden, weights and both
        parameters.
    Raises: ShapeError for shapes or dtypes; BackendError when a named backend cannot serve.
    Source: kimi_k3.md 5.4.
    """
    checks.require_rank("grouped_experts", "hidden", hidden, 2, "[N, D]")
    checks.require_rank("grouped_experts", "indices", indices, 2, "[N, k]")
    tokens, width = hidden.shape
    experts, twice_inner = gate_up_proj.shape[0], gate_up_proj.shape[1] if len(gate_up_proj.shape) == 3 else 0
    checks.require_shape("grouped_experts", "indices", indices, (tokens, indices.shape[1]), "[N, k]")
    checks.require_shape("grouped_experts", "weights", weights, tuple(indices.shape), "[N, k], the shape of indices")
    expected = (experts, twice_inner, width), (experts, width, twice_inner // 2)
    named = {"gate_up_proj": (gate_up_proj, "[E, 2F, D]"), "down_proj": (down_proj, "[E, D, F]")}
    for (name, (parameter, meaning)), shape in zip(named.items(), expected, strict=True):
        checks.require_shape("grouped_experts", name, parameter, shape, meaning)
    checks.require_floating("grouped_experts", hidden=hidden, weights=weights)
    if indices.is_floating_point():
        raise ShapeError(f"grouped_experts: indices is {indices.dtype}, expected int64 expert numbers")
    hidden = hidden.to(autocast_dtype(hidden))
    is_packed = isinstance(gate_up_proj, PackedWeight) and isinstance(down_proj, PackedWeight)
    with no_autocast(hidden):
        return OPERATION.pick(hidden, backend, is_packed=is_packed)(
            hidden, indices, weights, gate_up_proj, down_proj, act
        )


def fetched_experts(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    fetch: Callable[[int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]],
    experts: int,
    inner: int,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    """`grouped_experts` with experts that are not in memory: each chosen one is fetched, used, and let go.

    Experts are taken in rising order, each once a forward (and once more a backward), so no more than one need be held.
    The same products in the same order as with packed experts in memory.

    Args:
        hidden: [N, D]. indices: [N, k] int64; entries outside 0 .. E - 1 contribute nothing. weights: [N, k], fp32.
        fetch: expert number -> (gate_up, down): gate_up [2F, D] and down [D, F], each as (dense,) or as MXFP4 (packed,
            scale), on any device. Asked twice in a row for the same expert.
        experts: E. inner: F.
        act: [rows, 2F] -> [rows, F], row by row and without parameters of its own.
    Returns: [N, D] in hidden.dtype (under autocast in autocast's). Differentiable in hidden and weights.
    Raises: ShapeError for shapes or dtypes; whatever `fetch` raises.
    """
    checks.require_rank("fetched_experts", "hidden", hidden, 2, "[N, D]")
    checks.require_shape("fetched_experts", "weights", weights, tuple(indices.shape), "[N, k], the shape of indices")
    checks.require_floating("fetched_experts", hidden=hidden, weights=weights)
    if indices.dim() != 2 or len(indices) != len(hidden) or indices.is_floating_point():
        raise ShapeError(f"fetched_experts: indices is {indices.dtype} {tuple(indices.shape)}, expected int64 [N, k]")
    hidden = hidden.to(autocast_dtype(hidden))
    width = hidden.shape[1]
    gate_up = FetchedStack((), lambda expert: fetch(expert)[0], (experts, 2 * inner, width), hidden.device)
    down = FetchedStack((), lambda expert: fetch(expert)[1], (experts, width, inner), hidden.device)
    with no_autocast(hidden):
        return fetched_experts_eager(hidden, indices, weights, gate_up, down, act)
