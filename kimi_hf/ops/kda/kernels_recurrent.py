"""The recurrence itself in Triton, for decoding: the state is read once, written once, and lives in registers between.

One program a sequence, head and slice of V. Gate, lengths, sigmoid and scale are fused; no gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops.kda.kernels_common import LOG2E, sequence_of
from kimi_hf.ops.kda.kernels_forward import Rule
from kimi_hf.ops.kernels_common import Config, cdiv, choose, launch, next_power_of_2, softplus, wide

CONFIGS = (
    Config("v32_w4", {"BV": 32}, num_warps=4, num_stages=1),
    Config("v16_w2", {"BV": 16}, num_warps=2, num_stages=1),
    Config("v64_w8", {"BV": 64}, num_warps=8, num_stages=1),
)
FEW_TOKENS = 16  # a sequence: up to here one launch of this kernel beats the four of the chunked form


@triton.jit
def log2_decay(g, A_ptr, bias_ptr, h, col, lower_bound, K: tl.constexpr, GATE: tl.constexpr):
    """Base-2 log decay [BK] of one token and head from its input: logits through the named gate, or natural logs."""
    if GATE is None:
        return g * LOG2E
    else:
        y = g + tl.load(bias_ptr + h * K + col, mask=col < K, other=0.0).to(tl.float32)
        A = tl.exp(tl.load(A_ptr + h).to(tl.float32))
        if GATE == "softplus":
            return -A * softplus(y) * LOG2E
        else:
            return lower_bound * tl.sigmoid(A * y) * LOG2E


@triton.jit
def rule_step(S, q, k, v, decay, beta, DECAY: tl.constexpr, DELTA: tl.constexpr):
    """One token: S [BK, BV], q, k [BK] mapped, v [BV]; decay [BK] or a number. Returns the new S and o [BV]."""
    if DECAY == "channel":
        S *= decay[:, None]
    elif DECAY == "head":
        S *= decay
    if DELTA:
        v = beta * (v - tl.sum(S * k[:, None], 0))
    S += k[:, None] * v[None, :]
    return S, tl.sum(S * q[:, None], 0)


@triton.jit(do_not_specialize=["row_tokens"])
def recurrent_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, A_ptr, bias_ptr, o_ptr, initial_ptr, final_ptr, scale, lower_bound,
    row_tokens, cu_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, FEATURE: tl.constexpr,
    DECAY: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr, SIGMOID_BETA: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    slices: tl.constexpr = (V + BV - 1) // BV
    sequence = tl.program_id(0) // (H * slices)
    h = tl.program_id(0) // slices % H
    col = tl.arange(0, BK)
    out = (tl.program_id(0) % slices) * BV + tl.arange(0, BV)
    state_at = (wide(sequence) * H + h) * (K * V) + col[:, None] * V + out[None, :]
    state_inside = (col < K)[:, None] & (out < V)[None, :]
    if initial_ptr is not None:
        S = tl.load(initial_ptr + state_at, mask=state_inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    begin, end = sequence_of(sequence, row_tokens, cu_ptr, PACKED)
    for t in range(begin, end):
        row = t * H + h
        q = tl.load(q_ptr + row * K + col, mask=col < K, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + row * K + col, mask=col < K, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * V + out, mask=out < V, other=0.0).to(tl.float32)
        if FEATURE == "l2":
            q *= scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
            k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        elif FEATURE == "elu1":
            q = tl.where(col < K, tl.where(q > 0, q + 1.0, tl.exp(tl.minimum(q, 0.0))), 0.0)
            k = tl.where(col < K, tl.where(k > 0, k + 1.0, tl.exp(tl.minimum(k, 0.0))), 0.0)
        else:
            q *= scale
        decay = 1.0
        if DECAY == "channel":
            g = tl.load(g_ptr + row * K + col, mask=col < K, other=0.0).to(tl.float32)
            decay = tl.exp2(log2_decay(g, A_ptr, bias_ptr, h, col, lower_bound, K, GATE))
        elif DECAY == "head":
            decay = tl.exp2(tl.load(g_ptr + row).to(tl.float32) * LOG2E)
        beta = 1.0
        if DELTA:
            beta = tl.load(beta_ptr + row).to(tl.float32)
            if SIGMOID_BETA:
                beta = tl.sigmoid(beta)
        S, o = rule_step(S, q, k, v, decay, beta, DECAY, DELTA)
        tl.store(o_ptr + row * V + out, o.to(o_ptr.dtype.element_ty), mask=out < V)
    if final_ptr is not None:
        tl.debug_barrier()  # it may be the initial state, which every thread has read by now
        tl.store(final_ptr + state_at, S.to(final_ptr.dtype.element_ty), mask=state_inside)


def run_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial: Tensor | None,
    final: Tensor | None,
    rule: Rule,
    cu_seqlens: Tensor | None,
    scale: float,
    lower_bound: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """o [B, T, H, V] in `dtype`; the state after the last token into `final`, which may be `initial`. All inputs contiguous."""
    B, T, H, K = q.shape
    V = v.shape[3]
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    o = torch.empty(v.shape, dtype=dtype, device=v.device)
    config = choose(recurrent_kernel, CONFIGS, f"{q.dtype}/K{next_power_of_2(K)}V{next_power_of_2(V)}", q.device)
    launch(
        recurrent_kernel, (sequences * H * cdiv(V, config.constants["BV"]),), config, q.device,
        q_ptr=q, k_ptr=k, v_ptr=v, g_ptr=g, beta_ptr=beta, A_ptr=A_log, bias_ptr=dt_bias, o_ptr=o, initial_ptr=initial,
        final_ptr=final, scale=scale, lower_bound=float(lower_bound or 0.0), row_tokens=T, cu_ptr=cu_seqlens, H=H, K=K,
        V=V, PACKED=cu_seqlens is not None, FEATURE=rule.feature, DECAY=rule.decay, GATE=rule.gate, DELTA=rule.delta,
        SIGMOID_BETA=rule.sigmoid_beta, BK=next_power_of_2(K),
    )  # fmt: skip
    return o
