"""The short convolution in Triton: forward, one-token update, and a backward that stores one fp32 tensor.

Rows of a batch and packed sequences are handled alike: tokens lie in one line, each knows where its sequence starts,
and a tap that would reach before the start reads the carried window instead (zero without one).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops.kernels_common import (
    Config,
    activate,
    activate_slope,
    cdiv,
    choose,
    contiguous,
    launch,
    next_power_of_2,
    sequence_of_token,
    wide,
)
from kimi_hf.ops.short_conv.eager import short_conv_eager

CONFIGS = (
    Config("t16c64_w4", {"BT": 16, "BC": 64}, num_warps=4, num_stages=1),
    Config("t16c128_w8", {"BT": 16, "BC": 128}, num_warps=8, num_stages=1),
    Config("t32c64_w4", {"BT": 32, "BC": 64}, num_warps=4, num_stages=1),
)
WINDOW = Config("c128_w2", {"BC": 128}, num_warps=2, num_stages=1)
PROGRAMS = 256  # of the backward along time: bounds the buffer of partial weight gradients


@triton.jit
def _start(t, row_tokens, owner_ptr, cu_ptr, real, PACKED: tl.constexpr):
    """Sequence and first token of the sequences that tokens t belong to; `row_tokens` is a batch row's length."""
    if PACKED:
        n = tl.load(owner_ptr + t, mask=real, other=0).to(tl.int64)
        start = tl.load(cu_ptr + n).to(tl.int64)
    else:
        n = t // row_tokens
        start = n * row_tokens
    return n, start


@triton.jit
def _end(n, row_tokens, cu_ptr, PACKED: tl.constexpr):
    if PACKED:
        return tl.load(cu_ptr + n + 1).to(tl.int64)
    else:
        return (n + 1) * row_tokens


@triton.jit
def _tap(x_ptr, state_ptr, n, start, s, c, inside, C, W: tl.constexpr):
    """x at token s [BT, 1] of channel c [1, BC], or the carried window where s lies before the sequence: fp32."""
    live = s >= start
    tap = tl.load(x_ptr + s * C + c, mask=inside & live, other=0.0).to(tl.float32)
    if state_ptr is not None:
        old = tl.load(state_ptr + (n * C + c) * W + (s - start + W), mask=inside & ~live, other=0.0)
        tap += old.to(tl.float32)
    return tap


@triton.jit(do_not_specialize=["tokens", "row_tokens"])
def short_conv_forward_kernel(
    x_ptr, weight_ptr, state_ptr, y_ptr, owner_ptr, cu_ptr, tokens, row_tokens, C,
    W: tl.constexpr, ACTIVATION: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    channel_tiles = tl.cdiv(C, BC)
    program = tl.program_id(0)
    t = (program // channel_tiles).to(tl.int64) * BT + tl.arange(0, BT)
    c = ((program % channel_tiles) * BC + tl.arange(0, BC))[None, :]
    n, start = _start(t, row_tokens, owner_ptr, cu_ptr, t < tokens, PACKED)
    inside = (t < tokens)[:, None] & (c < C)
    y = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        weight = tl.load(weight_ptr + c * W + j, mask=c < C, other=0.0).to(tl.float32)
        y += weight * _tap(x_ptr, state_ptr, n[:, None], start[:, None], t[:, None] - (W - 1) + j, c, inside, C, W)
    tl.store(y_ptr + t[:, None] * C + c, activate(y, ACTIVATION).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "row_tokens", "tiles"])
def short_conv_backward_kernel(
    x_ptr, weight_ptr, state_ptr, dy_ptr, dpre_ptr, dweight_ptr, owner_ptr, cu_ptr, tokens, row_tokens, tiles, C,
    W: tl.constexpr, BW: tl.constexpr, ACTIVATION: tl.constexpr, PACKED: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dpre = dy * act'(conv), recomputed, to memory in fp32; sums of dpre * tap over this program's time tiles."""
    channel_tiles = tl.cdiv(C, BC)
    programs = tl.num_programs(0) // channel_tiles
    program = tl.program_id(0) // channel_tiles
    c = ((tl.program_id(0) % channel_tiles) * BC + tl.arange(0, BC))[None, :]
    tap_index = tl.arange(0, BW)[:, None]
    dweight = tl.zeros([BW, BC], tl.float32)
    for tile in range(program, tiles, programs):
        t = wide(tile) * BT + tl.arange(0, BT)
        n, start = _start(t, row_tokens, owner_ptr, cu_ptr, t < tokens, PACKED)
        inside = (t < tokens)[:, None] & (c < C)
        pre = tl.zeros([BT, BC], tl.float32)
        for j in tl.static_range(W):
            weight = tl.load(weight_ptr + c * W + j, mask=c < C, other=0.0).to(tl.float32)
            s = t[:, None] - (W - 1) + j
            pre += weight * _tap(x_ptr, state_ptr, n[:, None], start[:, None], s, c, inside, C, W)
        dpre = tl.load(dy_ptr + t[:, None] * C + c, mask=inside, other=0.0).to(tl.float32)
        dpre *= activate_slope(pre, ACTIVATION)
        tl.store(dpre_ptr + t[:, None] * C + c, dpre, mask=inside)
        for j in tl.static_range(W):
            s = t[:, None] - (W - 1) + j
            tap = _tap(x_ptr, state_ptr, n[:, None], start[:, None], s, c, inside, C, W)
            dweight += tl.where(tap_index == j, tl.sum(dpre * tap, 0)[None, :], 0.0)
    at = (program.to(tl.int64) * C + c) * W + tap_index
    tl.store(dweight_ptr + at, dweight, mask=(tap_index < W) & (c < C))


@triton.jit(do_not_specialize=["tokens", "row_tokens"])
def short_conv_input_grad_kernel(
    dpre_ptr, weight_ptr, dwindow_ptr, dx_ptr, owner_ptr, cu_ptr, tokens, row_tokens, C,
    W: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx_s = sum_j weight_j dpre_{s+W-1-j} inside the sequence, plus the gradient of the final window."""
    channel_tiles = tl.cdiv(C, BC)
    program = tl.program_id(0)
    s = (program // channel_tiles).to(tl.int64) * BT + tl.arange(0, BT)
    c = ((program % channel_tiles) * BC + tl.arange(0, BC))[None, :]
    n, start = _start(s, row_tokens, owner_ptr, cu_ptr, s < tokens, PACKED)
    end = _end(n, row_tokens, cu_ptr, PACKED)[:, None]
    inside = (s < tokens)[:, None] & (c < C)
    s = s[:, None]
    dx = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        weight = tl.load(weight_ptr + c * W + j, mask=c < C, other=0.0).to(tl.float32)
        t = s + W - 1 - j
        dx += weight * tl.load(dpre_ptr + t * C + c, mask=inside & (t < end), other=0.0)
    if dwindow_ptr is not None:
        slot = s - end + W  # of token s in the final window
        at = (n[:, None] * C + c) * W + slot
        dx += tl.load(dwindow_ptr + at, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
    tl.store(dx_ptr + s * C + c, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["row_tokens"])
def short_conv_state_grad_kernel(
    dpre_ptr, weight_ptr, dwindow_ptr, dstate_ptr, cu_ptr, row_tokens, C,
    W: tl.constexpr, BW: tl.constexpr, PACKED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradient of the carried window: slot w is tap w-1-r of the sequence's token r, and may survive to the end."""
    channel_tiles = tl.cdiv(C, BC)
    n = (tl.program_id(0) // channel_tiles).to(tl.int64)
    c = ((tl.program_id(0) % channel_tiles) * BC + tl.arange(0, BC))[:, None]
    w = tl.arange(0, BW)[None, :]
    start = n * row_tokens
    if PACKED:
        start = tl.load(cu_ptr + n).to(tl.int64)
    tokens = _end(n, row_tokens, cu_ptr, PACKED) - start
    inside = (c < C) & (w < W)
    dstate = tl.zeros([BC, BW], tl.float32)
    for r in tl.static_range(W - 1):
        used = inside & (tl.minimum(w, tokens) > r)
        dpre = tl.load(dpre_ptr + (start + r) * C + c, mask=c < tl.where(tokens > r, C, 0), other=0.0)
        dstate += dpre * tl.load(weight_ptr + c * W + (w - 1 - r), mask=used, other=0.0).to(tl.float32)
    if dwindow_ptr is not None:
        at = (n * C + c) * W + (w - tokens)
        dstate += tl.load(dwindow_ptr + at, mask=inside & (w >= tokens), other=0.0).to(tl.float32)
    tl.store(dstate_ptr + (n * C + c) * W + w, dstate.to(dstate_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["row_tokens"])
def short_conv_window_kernel(
    x_ptr, state_ptr, window_ptr, cu_ptr, row_tokens, C,
    W: tl.constexpr, BW: tl.constexpr, PACKED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The last W raw inputs of each sequence, older ones from the carried window."""
    channel_tiles = tl.cdiv(C, BC)
    n = (tl.program_id(0) // channel_tiles).to(tl.int64)
    c = ((tl.program_id(0) % channel_tiles) * BC + tl.arange(0, BC))[:, None]
    w = tl.arange(0, BW)[None, :]
    start = n * row_tokens
    if PACKED:
        start = tl.load(cu_ptr + n).to(tl.int64)
    s = _end(n, row_tokens, cu_ptr, PACKED) - W + w
    inside = (c < C) & (w < W)
    value = _tap(x_ptr, state_ptr, n, start, s, c, inside, C, W)
    tl.store(window_ptr + (n * C + c) * W + w, value.to(window_ptr.dtype.element_ty), mask=inside)


@triton.jit
def short_conv_update_kernel(
    x_ptr, weight_ptr, state_ptr, y_ptr, window_ptr, C,
    W: tl.constexpr, BW: tl.constexpr, ACTIVATION: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One token a sequence: shift the window, convolve it. `window_ptr` may be `state_ptr`."""
    channel_tiles = tl.cdiv(C, BC)
    n = (tl.program_id(0) // channel_tiles).to(tl.int64)
    c = ((tl.program_id(0) % channel_tiles) * BC + tl.arange(0, BC))[:, None]
    w = tl.arange(0, BW)[None, :]
    inside = (c < C) & (w < W)
    at = (n * C + c) * W + w
    window = tl.load(x_ptr + n * C + c, mask=inside & (w == W - 1), other=0.0).to(tl.float32)
    if state_ptr is not None:
        window += tl.load(state_ptr + at + 1, mask=inside & (w < W - 1), other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c * W + w, mask=inside, other=0.0).to(tl.float32)
    y = activate(tl.sum(window * weight, 1), ACTIVATION)[:, None]
    tl.store(y_ptr + n * C + c, y.to(y_ptr.dtype.element_ty), mask=c < C)
    if window_ptr is not None:
        tl.debug_barrier()  # every thread has read its slots before any slot of a shared buffer is written
        tl.store(window_ptr + at, window.to(window_ptr.dtype.element_ty), mask=inside)


class _ShortConv(torch.autograd.Function):
    """Saves the inputs alone; `owner` and `cu` are None for a plain batch."""

    @staticmethod
    def forward(ctx, x, weight, state, activation, output_window, cu):
        x, weight, state = contiguous(x, weight, state)
        B, T, C = x.shape
        W, tokens, sequences = weight.shape[1], B * T, B if cu is None else cu.numel() - 1
        owner = None if cu is None else sequence_of_token(cu, tokens)
        y = torch.empty_like(x)
        config = choose(short_conv_forward_kernel, CONFIGS, f"W{W}", x.device)
        grid = (cdiv(tokens, config.constants["BT"]) * cdiv(C, config.constants["BC"]),)
        launch(
            short_conv_forward_kernel, grid, config, x.device,
            x_ptr=x, weight_ptr=weight, state_ptr=state, y_ptr=y, owner_ptr=owner, cu_ptr=cu, tokens=tokens,
            row_tokens=T, C=C, W=W, ACTIVATION=activation, PACKED=cu is not None,
        )  # fmt: skip
        window = None
        if output_window:
            window = torch.empty(sequences, C, W, dtype=x.dtype, device=x.device)
            launch(
                short_conv_window_kernel, (sequences * cdiv(C, WINDOW.constants["BC"]),), WINDOW, x.device,
                x_ptr=x, state_ptr=state, window_ptr=window, cu_ptr=cu, row_tokens=T, C=C, W=W,
                BW=next_power_of_2(W), PACKED=cu is not None,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, state, owner, cu)
        ctx.activation = activation
        return y, window

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dwindow):
        x, weight, state, owner, cu = ctx.saved_tensors
        dy, dwindow = contiguous(dy, dwindow)
        B, T, C = x.shape
        W, tokens, device = weight.shape[1], B * T, x.device
        BW, packed = next_power_of_2(W), cu is not None
        config = choose(short_conv_backward_kernel, CONFIGS, f"W{W}", device)
        tiles, channel_tiles = cdiv(tokens, config.constants["BT"]), cdiv(C, config.constants["BC"])
        programs = min(tiles, PROGRAMS)
        dpre = torch.empty(tokens, C, dtype=torch.float32, device=device)
        dweight = torch.empty(programs, C, W, dtype=torch.float32, device=device)
        common = {"owner_ptr": owner, "cu_ptr": cu, "row_tokens": T, "C": C, "W": W, "PACKED": packed}
        launch(
            short_conv_backward_kernel, (programs * channel_tiles,), config, device,
            x_ptr=x, weight_ptr=weight, state_ptr=state, dy_ptr=dy, dpre_ptr=dpre, dweight_ptr=dweight,
            tokens=tokens, tiles=tiles, BW=BW, ACTIVATION=ctx.activation, **common,
        )  # fmt: skip
        dx = torch.empty_like(x)
        launch(
            short_conv_input_grad_kernel, (tiles * channel_tiles,), config, device,
            dpre_ptr=dpre, weight_ptr=weight, dwindow_ptr=dwindow, dx_ptr=dx, tokens=tokens, **common,
        )  # fmt: skip
        dstate = None
        if state is not None and ctx.needs_input_grad[2]:
            dstate = torch.empty_like(state)
            del common["owner_ptr"]
            launch(
                short_conv_state_grad_kernel, (state.shape[0] * cdiv(C, WINDOW.constants["BC"]),), WINDOW, device,
                dpre_ptr=dpre, weight_ptr=weight, dwindow_ptr=dwindow, dstate_ptr=dstate, BW=BW, **common,
            )  # fmt: skip
        return dx, dweight.sum(0).to(weight.dtype), dstate, None, None, None


def short_conv_update(
    x: Tensor, weight: Tensor, state: Tensor | None, window: Tensor | None, activation: str | None
) -> Tensor:
    """One token a sequence, no gradients: x [N, C], weight [C, W], state [N, C, W] or None -> y [N, C].

    The new window is written to `window` (which may be `state`) unless that is None.
    """
    N, C = x.shape
    W = weight.shape[1]
    y = torch.empty_like(x)
    launch(
        short_conv_update_kernel, (N * cdiv(C, WINDOW.constants["BC"]),), WINDOW, x.device,
        x_ptr=x, weight_ptr=weight, state_ptr=state, y_ptr=y, window_ptr=window, C=C, W=W, BW=next_power_of_2(W),
        ACTIVATION=activation,
    )  # fmt: skip
    return y


def short_conv_triton(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.short_conv.short_conv`."""
    if torch.compiler.is_compiling():  # which fuses it with its neighbours
        return short_conv_eager(
            x,
            weight,
            activation=activation,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, initial_state))
    if x.shape[1] == 1 and cu_seqlens is None and not needs_grad:
        B, _, C = x.shape
        window = x.new_empty(B, C, weight.shape[1]) if output_final_state else None
        tensors = contiguous(x.view(B, C) if x.is_contiguous() else x.reshape(B, C), weight, initial_state)
        return short_conv_update(*tensors, window, activation)[:, None], window
    return _ShortConv.apply(x, weight, initial_state, activation, output_final_state, cu_seqlens)
