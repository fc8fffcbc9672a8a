"""Depthwise causal convolution over time with a window carried across calls."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["short_conv"]

ACTIVATIONS = ("silu", None)
OPERATION = Operation(
    "short_conv",
    Backend("reference", "kimi_hf.ops.short_conv.reference", "short_conv_reference"),
    Backend("eager", "kimi_hf.ops.short_conv.eager", "short_conv_eager"),
    Backend("triton", "kimi_hf.ops.short_conv.kernels", "short_conv_triton", kernel_limits.dtype),
)


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    inplace_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t[c] = act(sum_j weight[c, j] * x_{t-W+1+j}[c]): `weight[:, W-1]` multiplies the current token.

    Args:
        x: [B, T, C], any floating dtype, T >= 1.
        weight: [C, W] or [C, 1, W] (a Conv1d's), usually fp32.
        activation: "silu" or None.
        initial_state: [N, C, W], the last W raw inputs, oldest first; None for zeros. Only W-1 of them are read.
        output_final_state: also return the window after the last token.
        cu_seqlens: int [N+1], packed sequences in one row (B = 1); the window restarts at every boundary.
        inplace_state: write the final window into `initial_state` (no gradients) and return it.
        backend: None for automatic.
    Returns:
        y [B, T, C] in x.dtype; the final window [N, C, W] in x.dtype (zeros where there was no token), or None.
    Raises:
        ShapeError: shapes, dtypes, an unknown activation; BackendError: a named backend cannot serve.
    Numerics: convolution and activation in fp32 (fp64 for fp64 x), one cast.
    Source: kimi_k3.md 3.2; the released `ShortConvolution` of flash-linear-attention.
    """
    checks.require_rank("short_conv", "x", x, 3, "(B, T, C)")
    if weight.dim() == 3:
        weight = weight.squeeze(1)
    channels = x.shape[2]
    if weight.dim() != 2 or weight.shape[0] != channels:
        raise ShapeError(
            f"short_conv: weight has shape {tuple(weight.shape)}, expected (C, W) or (C, 1, W) with C = {channels}"
        )
    if activation not in ACTIVATIONS:
        raise ShapeError(f"short_conv: activation is {activation!r}, expected 'silu' or None")
    checks.require_floating("short_conv", x=x, weight=weight)
    sequences = checks.number_of_sequences("short_conv", x.shape[0], cu_seqlens)
    if initial_state is not None:
        shape = (sequences, channels, weight.shape[1])
        checks.require_shape("short_conv", "initial_state", initial_state, shape, "(N, C, W)")
    if inplace_state:
        checks.require_inplace_allowed("short_conv", initial_state, x, weight)
    run = OPERATION.pick(x, backend)
    y, state = run(
        x,
        weight,
        activation=activation,
        initial_state=initial_state,
        output_final_state=output_final_state or inplace_state,
        cu_seqlens=cu_seqlens,
    )
    if inplace_state:
        state = initial_state.copy_(state)
    return y, state
