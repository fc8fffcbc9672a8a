"""The short convolution in plain PyTorch: W shifted multiply-adds over blocks of time, and a hand-written backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_hf.ops import checks
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.blocks import blocks


def short_conv_eager(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.short_conv.short_conv`."""
    if cu_seqlens is not None:
        return _packed(x, weight, activation, initial_state, output_final_state, cu_seqlens)
    width = weight.shape[1]
    if initial_state is None:
        before = x.new_zeros(x.shape[0], width, x.shape[2])
    else:
        before = initial_state.transpose(1, 2).to(x.dtype)
    y = _convolve(x, before[:, 1:], weight, activation)
    if not output_final_state:
        return y, None
    tail = x[:, -width:] if x.shape[1] >= width else torch.cat([before[:, x.shape[1] :], x], 1)
    return y, tail.transpose(1, 2)


def _packed(
    x: Tensor,
    weight: Tensor,
    activation: str | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Sequences of one row, spread out with W window slots before each, convolved at once and closed up again."""
    bounds = checks.sequence_bounds("short_conv", cu_seqlens, x.shape[1])
    width, channels, sequences = weight.shape[1], x.shape[2], len(bounds) - 1
    lengths = torch.tensor([b - a for a, b in zip(bounds, bounds[1:], strict=False)], device=x.device)
    owner = torch.repeat_interleave(torch.arange(sequences, device=x.device), lengths)
    slots = torch.arange(x.shape[1], device=x.device) + (owner + 1) * width  # where each token lies when spread out
    starts = torch.as_tensor(bounds[:-1], device=x.device) + torch.arange(sequences, device=x.device) * width
    window = starts[:, None] + torch.arange(width, device=x.device)  # [N, W]
    history = x.new_zeros(x.shape[1] + sequences * width, channels).index_copy(0, slots, x[0])
    if initial_state is not None:
        before = initial_state.transpose(1, 2).to(x.dtype).reshape(-1, channels)
        history = history.index_copy(0, window.reshape(-1), before)
    spread = _convolve(history[None], x.new_zeros(1, width - 1, channels), weight, activation)
    y = spread[0].index_select(0, slots)[None]
    if not output_final_state:
        return y, None
    last = (window + lengths[:, None]).reshape(-1)  # the last W slots of each sequence reach back into its window
    return y, history.index_select(0, last).view(sequences, width, channels).transpose(1, 2)


def _convolve(x: Tensor, before: Tensor, weight: Tensor, activation: str | None) -> Tensor:
    """x [B, T, C] after before [B, W-1, C] -> [B, T, C] in x.dtype."""
    if torch.compiler.is_compiling():  # a compiler fuses the plain sum, and its gradient, by itself
        dtype = checks.compute_dtype(x.dtype)
        y = _shifted_sum(torch.cat([before, x], 1).to(dtype), weight.to(dtype).t(), x.shape[1])
        return (silu(y) if activation == "silu" else y).to(x.dtype)
    return _Convolution.apply(x, before, weight, activation)


class _Convolution(torch.autograd.Function):
    """Keeps its inputs; the values before the activation are computed again in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, before: Tensor, weight: Tensor, activation: str | None) -> Tensor:
        ctx.save_for_backward(x, before, weight)
        ctx.activation = activation
        taps = _taps(weight, x)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for start, stop in blocks(x.shape[1], x.shape[0] * x.shape[2], least=weight.shape[1]):
            out = _shifted_sum(_history(x, before, start, stop, taps.dtype), taps, stop - start)
            y[:, start:stop] = silu(out, inplace=True) if activation == "silu" else out
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        x, before, weight = ctx.saved_tensors
        B, T, C = x.shape
        width, taps = weight.shape[1], _taps(weight, x)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_taps = torch.zeros_like(taps)
        flipped = taps.flip(0)
        later = taps.new_zeros(B, width - 1, C)  # gradients, before the activation, of the W-1 tokens after the block
        with no_autocast(x):
            for start, stop in reversed(list(blocks(T, B * C, least=width))):
                history = _history(x, before, start, stop, taps.dtype)
                upstream = grad[:, start:stop].to(taps.dtype)
                if ctx.activation == "silu":
                    upstream = upstream * _silu_slope(_shifted_sum(history, taps, stop - start))
                for j in range(width):
                    grad_taps[j] += (history[:, j : j + stop - start] * upstream).sum((0, 1))
                # Token t feeds the outputs t .. t + W - 1: the same sum with the taps reversed, looking forward.
                extended = torch.cat([upstream, later], 1)
                grad_x[:, start:stop] = _shifted_sum(extended, flipped, stop - start)
                later = extended[:, : width - 1]
        # The window before the first token: its last slots feed the first W - 1 outputs.
        padded = torch.cat([later.new_zeros(B, width - 1, C), later], 1)
        grad_before = _shifted_sum(padded, flipped, width - 1).to(before.dtype)
        return grad_x, grad_before, grad_taps.t().to(weight.dtype), None


def _history(x: Tensor, before: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Tokens start - W + 1 .. stop - 1, [B, W-1 + stop - start, C], reaching into `before` at the start."""
    reach = before.shape[1]
    if start >= reach:
        return x[:, start - reach : stop].to(dtype)
    return torch.cat([before[:, start:], x[:, :stop]], 1).to(dtype)


def _taps(weight: Tensor, x: Tensor) -> Tensor:
    """[C, W] -> [W, C] in the compute dtype of x, each tap contiguous: strided ones multiply at a fifth of the speed."""
    return weight.to(checks.compute_dtype(x.dtype)).t().contiguous()


def _shifted_sum(history: Tensor, taps: Tensor, tokens: int) -> Tensor:
    """sum_j taps[j] * history[:, j : j + tokens]: history [B, W-1 + tokens, C], taps [W, C]."""
    y = history[:, :tokens] * taps[0]
    for j in range(1, taps.shape[0]):
        y.addcmul_(history[:, j : j + tokens], taps[j])
    return y


def _silu_slope(x: Tensor) -> Tensor:
    """d silu(x) / dx = s + x s (1 - s) with s = sigmoid(x)."""
    sigmoid = torch.sigmoid(x)
    return torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1).mul_(x).add_(sigmoid)
