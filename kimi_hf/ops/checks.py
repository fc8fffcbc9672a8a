"""Shape checks that the public functions of `ops` share. All raise `ShapeError` naming the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.errors import ShapeError


def require_shape(operation: str, name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise unless `tensor` has exactly `shape`; `meaning` spells the shape in letters."""
    if tensor.shape != shape:
        raise ShapeError(
            f"{operation}: {name} has shape {tuple(tensor.shape)}, expected {meaning} = {shape}; "
            "layouts are documented in the function's docstring"
        )


def require_rank(operation: str, name: str, tensor: Tensor, rank: int, meaning: str) -> None:
    """Raise unless `tensor` has `rank` dimensions and at least one token."""
    if tensor.dim() != rank:
        raise ShapeError(f"{operation}: {name} has shape {tuple(tensor.shape)}, expected {rank} dimensions {meaning}")


def require_floating(operation: str, **tensors: Tensor) -> None:
    """Raise unless every tensor is of a floating dtype and on the device of the first."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ShapeError(f"{operation}: {name} is {tensor.dtype}, expected a floating dtype; cast it first")
        if tensor.device != device:
            raise ShapeError(f"{operation}: {name} is on {tensor.device}, the other tensors on {device}; move it")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for all others: the dtype of states and of the arithmetic."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def require_state(operation: str, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A recurrent state [N, H, K, V], keys first, in fp32, or fp64 when the inputs are."""
    require_shape(operation, "initial_state", state, shape, "(N, H, K, V)")
    if state.dtype != compute_dtype(dtype):
        raise ShapeError(
            f"{operation}: initial_state is {state.dtype}, expected {compute_dtype(dtype)} for {dtype} inputs; "
            "states are kept in full precision"
        )


def number_of_sequences(operation: str, batch: int, cu_seqlens: Tensor | None) -> int:
    """N: the batch size, or with `cu_seqlens` (N+1,) the number of packed sequences.

    Raises: ShapeError when cu_seqlens is not a 1-D integer tensor, or the batch is not 1.
    """
    if cu_seqlens is None:
        return batch
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ShapeError(
            f"{operation}: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, expected int (N+1,) "
            "cumulative lengths starting with 0"
        )
    if batch != 1:
        raise ShapeError(f"{operation}: cu_seqlens needs one packed row, got batch {batch}; flatten rows to (1, B*T)")
    return cu_seqlens.numel() - 1


def sequence_bounds(operation: str, cu_seqlens: Tensor, tokens: int) -> list[int]:
    """`cu_seqlens` as a list, checked: starts at 0, never decreases, ends at `tokens`."""
    bounds = cu_seqlens.tolist()
    ordered = all(a <= b for a, b in zip(bounds, bounds[1:], strict=False))
    if bounds[0] != 0 or bounds[-1] != tokens or not ordered:
        raise ShapeError(
            f"{operation}: cu_seqlens {bounds[:8]}{'...' if len(bounds) > 8 else ''} must start at 0, not decrease, "
            f"and end at the number of tokens {tokens}"
        )
    return bounds


def require_inplace_allowed(operation: str, initial_state: Tensor | None, *inputs: Tensor | None) -> None:
    """`inplace_state=True` needs a state to write into, and no gradient through it or what is written to it."""
    if initial_state is None:
        raise ShapeError(f"{operation}: inplace_state=True needs initial_state, the storage to write into")
    if needs_gradient(initial_state, *inputs):
        raise ShapeError(
            f"{operation}: inplace_state=True would overwrite a tensor that takes part in gradients; "
            "call under torch.no_grad() or pass inplace_state=False"
        )


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will want a backward through any of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
