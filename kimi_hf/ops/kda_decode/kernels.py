"""One token through a KDA mixer in Triton: convolutions, gate, state update, read and gated norm in one or two kernels.

The state is read once and written once. With many (sequence, head) pairs one program holds a whole head's state and
does everything. With few, the state is cut along V so that the GPU is filled; the norm needs the whole head, so it and
the shift of the q and k windows, which all cuts read, follow in a second, small kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops.kda.kernels_recurrent import log2_decay, rule_step
from kimi_hf.ops.kernels_common import Config, activate, cdiv, launch, next_power_of_2, wide

ENOUGH_PROGRAMS = 264  # two for each of a large GPU's 132 processors
CUT = 32  # columns of V a program in the two-kernel form
MOST_ELEMENTS = 1 << 14  # of a state that one program holds


# One tap at a time: as [channels, W] tiles the windows would impose their layout on the state.
@triton.jit
def convolve(x_ptr, window_ptr, weight_ptr, channel, real, ROUND: tl.constexpr, W: tl.constexpr):
    """SiLU of the convolution at this token [BC], rounded as its output is; pointers of one sequence, channel [BC]."""
    x = tl.load(x_ptr + channel, mask=real, other=0.0).to(tl.float32)
    y = x * tl.load(weight_ptr + channel * W + W - 1, mask=real, other=0.0).to(tl.float32)
    for w in tl.static_range(W - 1):
        tap = tl.load(window_ptr + channel * W + w + 1, mask=real, other=0.0).to(tl.float32)
        y += tap * tl.load(weight_ptr + channel * W + w, mask=real, other=0.0).to(tl.float32)
    return activate(y, "silu").to(ROUND).to(tl.float32)


@triton.jit
def shift_window(x_ptr, window_ptr, channel, real, W: tl.constexpr):
    """Drop the oldest input of each channel's window and append this token's. Nobody may read the window any more."""
    for w in tl.static_range(W - 1):
        tl.store(window_ptr + channel * W + w, tl.load(window_ptr + channel * W + w + 1, mask=real), mask=real)
    tl.store(window_ptr + channel * W + W - 1, tl.load(x_ptr + channel, mask=real), mask=real)


@triton.jit
def gated_norm_row(o, z_ptr, weight_ptr, out, real, eps, V: tl.constexpr):
    """o [BV] of one head: RMS norm, weight, sigmoid gate."""
    z = tl.load(z_ptr + out, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + out, mask=real, other=0.0).to(tl.float32)
    return o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * weight * tl.sigmoid(z)


@triton.jit
def kda_decode_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, z_ptr, window_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr,
    A_ptr, bias_ptr, norm_ptr, state_ptr, y_ptr, real_ptr, scale, lower_bound, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, GATE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV < V: y is fp32 scratch that receives o, and the q and k windows are left to the second kernel.

    A row that is not real keeps its memory; its output is 0.
    """
    cuts: tl.constexpr = (V + BV - 1) // BV
    sequence = wide(tl.program_id(0) // (H * cuts))
    h = tl.program_id(0) // cuts % H
    ROUND: tl.constexpr = q_ptr.dtype.element_ty
    key = tl.arange(0, BK)
    out = (tl.program_id(0) % cuts) * BV + tl.arange(0, BV)
    real_k, real_v = key < K, out < V
    q_ptr += sequence * (H * K) + h * K
    k_ptr += sequence * (H * K) + h * K
    v_ptr += sequence * (H * V) + h * V
    y_ptr += sequence * (H * V) + h * V
    if real_ptr is not None:
        if tl.load(real_ptr + sequence) == 0:
            tl.store(y_ptr + out, tl.zeros([BV], y_ptr.dtype.element_ty), mask=real_v)
            return
    window_ptr += sequence * (2 * H * K + H * V) * W
    q_window_ptr = window_ptr + h * K * W
    k_window_ptr = window_ptr + (H + h) * K * W
    v_window_ptr = window_ptr + (2 * H * K + h * V) * W
    state_at = state_ptr + (sequence * H + h) * (K * V) + key[:, None] * V + out[None, :]
    state_inside = real_k[:, None] & real_v[None, :]
    S = tl.load(state_at, mask=state_inside, other=0.0)
    q = convolve(q_ptr, q_window_ptr, q_weight_ptr + h * K * W, key, real_k, ROUND, W)
    k = convolve(k_ptr, k_window_ptr, k_weight_ptr + h * K * W, key, real_k, ROUND, W)
    v = convolve(v_ptr, v_window_ptr, v_weight_ptr + h * V * W, out, real_v, ROUND, W)
    q *= scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
    k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    g = tl.load(g_ptr + (sequence * H + h) * K + key, mask=real_k, other=0.0).to(tl.float32)
    decay = tl.exp2(log2_decay(g, A_ptr, bias_ptr, h, key, lower_bound, K, GATE))
    beta = tl.sigmoid(tl.load(beta_ptr + sequence * H + h).to(tl.float32))
    S, o = rule_step(S, q, k, v, decay, beta, "channel", True)
    tl.store(state_at, S, mask=state_inside)
    o = o.to(ROUND).to(tl.float32)
    tl.debug_barrier()  # every thread has read the windows
    shift_window(v_ptr, v_window_ptr, out, real_v, W)
    if BV >= V:
        shift_window(q_ptr, q_window_ptr, key, real_k, W)
        shift_window(k_ptr, k_window_ptr, key, real_k, W)
        o = gated_norm_row(o, z_ptr + (sequence * H + h) * V, norm_ptr, out, real_v, eps, V)
    tl.store(y_ptr + out, o.to(y_ptr.dtype.element_ty), mask=real_v)


@triton.jit
def kda_decode_finish_kernel(
    q_ptr, k_ptr, o_ptr, z_ptr, window_ptr, norm_ptr, y_ptr, real_ptr, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The second kernel of the two-kernel form: gated norm of o, and the shift of the q and k windows."""
    sequence, h = wide(tl.program_id(0) // H), tl.program_id(0) % H
    key, out = tl.arange(0, BK), tl.arange(0, BV)
    window_ptr += sequence * (2 * H * K + H * V) * W
    at = (sequence * H + h) * V
    o = tl.load(o_ptr + at + out, mask=out < V, other=0.0)
    y = gated_norm_row(o, z_ptr + at, norm_ptr, out, out < V, eps, V)
    tl.store(y_ptr + at + out, y.to(y_ptr.dtype.element_ty), mask=out < V)
    if real_ptr is not None:
        if tl.load(real_ptr + sequence) == 0:
            return
    shift_window(q_ptr + (sequence * H + h) * K, window_ptr + h * K * W, key, key < K, W)
    shift_window(k_ptr + (sequence * H + h) * K, window_ptr + (H + h) * K * W, key, key < K, W)


def _warps(elements: int) -> int:
    """32 fp32 of the state a thread."""
    return max(4, elements // (32 * 32))


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Tensor,
    window: Tensor,
    state: Tensor,
    conv_weights: Sequence[Tensor],
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    norm_weight: Tensor,
    eps: float,
    real: Tensor | None,
) -> Tensor:
    N, H, K, V = state.shape
    W = window.shape[-1]
    BK, BV = max(16, next_power_of_2(K)), max(16, next_power_of_2(V))
    q, k, v, g, beta, gate = (x.contiguous() for x in (q, k, v, g, beta, gate))
    weights = [w.reshape(w.shape[0], W).contiguous() for w in conv_weights]
    whole = BV <= CUT or (N * H >= ENOUGH_PROGRAMS and BK * BV <= MOST_ELEMENTS)
    cut = BV if whole else CUT
    y = torch.empty_like(gate)
    o = y if whole else torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    shared = {"q_ptr": q, "k_ptr": k, "z_ptr": gate, "window_ptr": window, "norm_ptr": norm_weight, "eps": eps,
              "real_ptr": None if real is None else real.contiguous().view(torch.uint8)}  # fmt: skip
    sizes = {"H": H, "K": K, "V": V, "W": W, "BK": BK}
    config = Config("whole" if whole else "cut", {"BV": cut}, _warps(BK * cut), num_stages=1)
    launch(
        kda_decode_kernel, (N * H * cdiv(V, cut),), config, q.device,
        **shared, **sizes, v_ptr=v, g_ptr=g, beta_ptr=beta, q_weight_ptr=weights[0], k_weight_ptr=weights[1],
        v_weight_ptr=weights[2], A_ptr=A_log, bias_ptr=dt_bias, state_ptr=state, y_ptr=o, scale=K**-0.5,
        lower_bound=float(lower_bound or 0.0), GATE="softplus" if lower_bound is None else "bounded",
    )  # fmt: skip
    if not whole:
        config = Config("finish", {"BV": BV}, num_warps=4, num_stages=1)
        launch(kda_decode_finish_kernel, (N * H,), config, q.device, **shared, **sizes, o_ptr=o, y_ptr=y)
    return y


_operator = torch.library.custom_op(
    "kimi_hf::kda_decode_triton",
    _step,
    mutates_args=("window", "state"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor gate, Tensor(a!) window, Tensor(b!) state, "
    "Tensor[] conv_weights, Tensor A_log, Tensor dt_bias, float? lower_bound, Tensor norm_weight, float eps, Tensor? real) "
    "-> Tensor",
)
_operator.register_fake(lambda q, k, v, g, beta, gate, *others: torch.empty_like(gate))


def kda_decode_triton(
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
    real: Tensor | None,
) -> Tensor:
    """See `kimi_hf.ops.kda_decode.kda_decode`."""
    run = _operator if torch.compiler.is_compiling() else _step
    tensors = (q, k, v, g, beta, gate, window, state, list(conv_weights), A_log, dt_bias)
    return run(*tensors, lower_bound, norm_weight, eps, real)
