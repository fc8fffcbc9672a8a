"""One token through a KDA mixer in Triton: convolutions, gate, state update, read and gated norm in one or two kernels.

The state is read once and written once. With many (sequence, head) pairs one program holds a whole head's state and
does everything. With few, the state is cut along V so that the GPU is filled; the norm needs the whole head, so it and
the shift of the q and k windows, which all cuts read, follow in a second, small kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops.kda.kernels_recurrent import log2_decay, rule_step
from kimi_hf.ops.kernels_common import Config, activate, cdiv, launch, next_power_of_2, wide

ENOUGH_PROGRAMS = 264  # two for each of a large GPU's 132 processors
CUT = 32  # columns of V a program in the two-kernel form


@triton.jit
def load_window(x_ptr, window_ptr, channel, real, W: tl.constexpr, BW: tl.constexpr):
    """The window [BC, BW] after this token, oldest first: `channel` [BC] of the pointers' sequence."""
    w = tl.arange(0, BW)[None, :]
    inside = real[:, None] & (w < W)
    new = tl.load(x_ptr + channel[:, None], mask=inside & (w == W - 1), other=0.0).to(tl.float32)
    old = tl.load(window_ptr + channel[:, None] * W + w + 1, mask=inside & (w < W - 1), other=0.0).to(tl.float32)
    return new + old


@triton.jit
def store_window(window_ptr, window, channel, real, W: tl.constexpr, BW: tl.constexpr):
    w = tl.arange(0, BW)[None, :]
    at = window_ptr + channel[:, None] * W + w
    tl.store(at, window.to(window_ptr.dtype.element_ty), mask=real[:, None] & (w < W))


@triton.jit
def convolve(window, weight_ptr, channel, real, ROUND: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """SiLU of the convolution at this token [BC], rounded as the convolution's output is."""
    w = tl.arange(0, BW)[None, :]
    weight = tl.load(weight_ptr + channel[:, None] * W + w, mask=real[:, None] & (w < W), other=0.0).to(tl.float32)
    return activate(tl.sum(window * weight, 1), "silu").to(ROUND).to(tl.float32)


@triton.jit
def gated_norm_row(o, z_ptr, weight_ptr, out, real, eps, V: tl.constexpr):
    """o [BV] of one head: RMS norm, weight, sigmoid gate."""
    z = tl.load(z_ptr + out, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + out, mask=real, other=0.0).to(tl.float32)
    return o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * weight * tl.sigmoid(z)


@triton.jit
def kda_decode_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, z_ptr, window_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr,
    A_ptr, bias_ptr, norm_ptr, state_ptr, y_ptr, scale, lower_bound, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, GATE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV < V: y is fp32 scratch that receives o, and the q and k windows are left to the second kernel."""
    cuts: tl.constexpr = (V + BV - 1) // BV
    sequence = wide(tl.program_id(0) // (H * cuts))
    h = tl.program_id(0) // cuts % H
    ROUND: tl.constexpr = q_ptr.dtype.element_ty
    key = tl.arange(0, BK)
    out = (tl.program_id(0) % cuts) * BV + tl.arange(0, BV)
    real_k, real_v = key < K, out < V
    q_window_ptr = window_ptr + sequence * (2 * H * K + H * V) * W
    k_window_ptr = q_window_ptr + H * K * W
    v_window_ptr = k_window_ptr + H * K * W
    channel = h * K + key
    q_window = load_window(q_ptr + sequence * (H * K), q_window_ptr, channel, real_k, W, BW)
    k_window = load_window(k_ptr + sequence * (H * K), k_window_ptr, channel, real_k, W, BW)
    v_window = load_window(v_ptr + sequence * (H * V), v_window_ptr, h * V + out, real_v, W, BW)
    state_at = state_ptr + (sequence * H + h) * (K * V) + key[:, None] * V + out[None, :]
    state_inside = real_k[:, None] & real_v[None, :]
    S = tl.load(state_at, mask=state_inside, other=0.0)
    q = convolve(q_window, q_weight_ptr, channel, real_k, ROUND, W, BW)
    k = convolve(k_window, k_weight_ptr, channel, real_k, ROUND, W, BW)
    v = convolve(v_window, v_weight_ptr, h * V + out, real_v, ROUND, W, BW)
    q *= scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
    k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    g = tl.load(g_ptr + sequence * (H * K) + channel, mask=real_k, other=0.0).to(tl.float32)
    decay = tl.exp2(log2_decay(g, A_ptr, bias_ptr, h, key, lower_bound, K, GATE))
    beta = tl.sigmoid(tl.load(beta_ptr + sequence * H + h).to(tl.float32))
    S, o = rule_step(S, q, k, v, decay, beta, "channel", True)
    tl.debug_barrier()  # every slot of the windows has been read
    tl.store(state_at, S, mask=state_inside)
    store_window(v_window_ptr, v_window, h * V + out, real_v, W, BW)
    o = o.to(ROUND).to(tl.float32)
    if BV >= V:
        store_window(q_window_ptr, q_window, channel, real_k, W, BW)
        store_window(k_window_ptr, k_window, channel, real_k, W, BW)
        o = gated_norm_row(o, z_ptr + sequence * (H * V) + h * V, norm_ptr, out, real_v, eps, V)
    tl.store(y_ptr + sequence * (H * V) + h * V + out, o.to(y_ptr.dtype.element_ty), mask=real_v)


@triton.jit
def kda_decode_finish_kernel(
    q_ptr, k_ptr, o_ptr, z_ptr, window_ptr, norm_ptr, y_ptr, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """The second kernel of the two-kernel form: gated norm of o, and the shift of the q and k windows."""
    sequence, h = wide(tl.program_id(0) // H), tl.program_id(0) % H
    key, out = tl.arange(0, BK), tl.arange(0, BV)
    channel = h * K + key
    q_window_ptr = window_ptr + sequence * (2 * H * K + H * V) * W
    k_window_ptr = q_window_ptr + H * K * W
    q_window = load_window(q_ptr + sequence * (H * K), q_window_ptr, channel, key < K, W, BW)
    k_window = load_window(k_ptr + sequence * (H * K), k_window_ptr, channel, key < K, W, BW)
    at = sequence * (H * V) + h * V
    o = tl.load(o_ptr + at + out, mask=out < V, other=0.0)
    y = gated_norm_row(o, z_ptr + at, norm_ptr, out, out < V, eps, V)
    tl.store(y_ptr + at + out, y.to(y_ptr.dtype.element_ty), mask=out < V)
    tl.debug_barrier()
    store_window(q_window_ptr, q_window, channel, key < K, W, BW)
    store_window(k_window_ptr, k_window, channel, key < K, W, BW)


def _warps(elements: int) -> int:
    """64 fp32 of the state a thread."""
    return min(32, max(4, next_power_of_2(elements) // (64 * 32)))


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
) -> Tensor:
    """See `kimi_hf.ops.kda_decode.kda_decode`."""
    N, H, K, V = state.shape
    W = window.shape[-1]
    BK, BV = max(16, next_power_of_2(K)), max(16, next_power_of_2(V))
    q, k, v, g, beta, gate = (x.contiguous() for x in (q, k, v, g, beta, gate))
    weights = [w.reshape(w.shape[0], W).contiguous() for w in conv_weights]
    whole = N * H >= ENOUGH_PROGRAMS or BV <= CUT
    cut = BV if whole else CUT
    y = torch.empty_like(gate)
    o = y if whole else torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    shared = {"q_ptr": q, "k_ptr": k, "z_ptr": gate, "window_ptr": window, "norm_ptr": norm_weight, "eps": eps}
    sizes = {"H": H, "K": K, "V": V, "W": W, "BW": next_power_of_2(W), "BK": BK}
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
