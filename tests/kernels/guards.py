"""Traps for kernels: NaN around inputs, NaN in fresh outputs, and a check that nothing outside them was written."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch

MARGIN = 256  # elements on either side; a multiple of 16 bytes for every dtype


def guarded(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same values in the middle of a larger buffer whose margins are NaN (the extreme value for integers)."""
    if tensor is None:
        return None
    buffer = torch.empty(tensor.numel() + 2 * MARGIN, dtype=tensor.dtype).fill_(_poison(tensor.dtype))
    view = buffer[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _poison(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


@contextmanager
def poisoned_outputs():
    """Inside, `torch.empty` and its kin hand out NaN between margins; on leaving, the margins must be untouched."""
    buffers: list[torch.Tensor] = []
    empty = torch.empty

    def poisoned(*size, dtype=None, device=None, **_):
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        dtype = dtype or torch.get_default_dtype()
        buffer = empty(shape.numel() + 2 * MARGIN, dtype=dtype).fill_(_poison(dtype))
        buffers.append(buffer)
        return buffer[MARGIN : MARGIN + shape.numel()].view(shape)

    def like(tensor, *, dtype=None, **_):
        return poisoned(tensor.shape, dtype=dtype or tensor.dtype)

    def new(tensor, *size, dtype=None, **_):
        return poisoned(*size, dtype=dtype or tensor.dtype)

    with (
        mock.patch("torch.empty", poisoned),
        mock.patch("torch.empty_like", like),
        mock.patch("torch.Tensor.new_empty", new),
    ):
        yield
    for buffer in buffers:
        margins = torch.cat([buffer[:MARGIN], buffer[-MARGIN:]])
        intact = margins.isnan() if margins.is_floating_point() else margins == _poison(margins.dtype)
        assert intact.all(), f"a kernel wrote outside a {buffer.dtype} output of {buffer.numel() - 2 * MARGIN} elements"


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Largest difference relative to the largest expected entry; NaN fails."""
    error = (actual.detach().double() - expected.detach().double()).abs()
    scale = expected.detach().double().abs().max().clamp(min=1e-30) if expected.numel() else 1.0
    worst = float(error.max() / scale) if error.numel() else 0.0
    assert worst <= tolerance, f"{what}: off by {worst:.2e} of the largest entry, allowed {tolerance:.0e}"


def run_with_gradients(call, tensors: dict[str, torch.Tensor | None], dtype: torch.dtype | None = None):
    """Outputs of `call(**tensors)` and gradients of a fixed random functional of them for every float tensor.

    Returns: (list of outputs, {name: gradient}); with `dtype` float tensors are cast first.
    """
    leaves = {}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_floating_point():
            tensor = tensor.detach().to(dtype or tensor.dtype).requires_grad_(True)
        leaves[name] = tensor
    if dtype is None:
        leaves = {name: guarded(tensor) for name, tensor in leaves.items()}
    outputs = call(**leaves)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None]
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    names = [name for name, t in leaves.items() if t is not None and t.requires_grad]
    pairs = zip(outputs, cotangents, strict=True)
    if dtype is None:
        cotangents = [guarded(c) for c in cotangents]
        pairs = zip(outputs, cotangents, strict=True)
    used = [(o, c) for o, c in pairs if o.requires_grad]
    grads = torch.autograd.grad(
        [o for o, _ in used], [leaves[n] for n in names], [c for _, c in used], allow_unused=True
    )
    return outputs, dict(zip(names, grads, strict=True))


def agree(call_kernel, call_reference, tensors, *, values: float, gradients: float) -> None:
    """The kernel on poisoned memory against the definition in float64, in values and in gradients."""
    with poisoned_outputs():
        outputs, grads = run_with_gradients(call_kernel, tensors)
        results = [o.detach().clone() for o in outputs]
        grads = {name: None if g is None else g.clone() for name, g in grads.items()}
    expected, expected_grads = run_with_gradients(call_reference, tensors, torch.float64)
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        close(a, b, values, f"output {i}")
    for name, grad in expected_grads.items():
        if grad is not None:
            assert grads[name] is not None, f"no gradient of {name}"
            assert grads[name].dtype == tensors[name].dtype, f"gradient of {name} is {grads[name].dtype}"
            close(grads[name], grad, gradients, f"gradient of {name}")
