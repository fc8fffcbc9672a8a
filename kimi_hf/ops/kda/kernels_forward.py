"""The chunked forward of KDA, the delta rules and linear attention, in four kernels.

    prepare   raw decay logits -> cumulative log decay b of each chunk; inverse lengths of q and k
    intra     one program a chunk and head: scores, (I + A)^-1, and what the scan needs:
              w = (I + A)^-1 (beta k e^b), u = (I + A)^-1 (beta v), P (scores of q), q e^b, k e^(b_C - b)
    state     one program a sequence, head and slice of V: the scan over chunks, d = u - w S, S <- e^b_C S + (k e^..)^T d
    output    o = (q e^b) S + P d

The algebra is derived in README.md (section on chunks) and in kimi_k3.md 3.4. In low precision the operands of the
matrix products are of the activation type, all sums, the inverse and the running state are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops.kda.kernels_common import (
    LOG2E,
    SEGMENT,
    SEGMENT_BOUND,
    SEGMENT_DTYPES,
    chunk_tables,
    chunks_of,
    invert_unit_lower,
    level_factor,
    level_mask,
    load_feature,
    load_inverse,
    multiply,
    place,
    segment_exponent,
    sequence_of,
)
from kimi_hf.ops.kernels_common import (
    Config,
    cdiv,
    choose,
    dot_dtype,
    fp32_precision,
    launch,
    next_power_of_2,
    on_hip,
    softplus,
    wide,
)

CHUNK = 64
FP32_CHUNK = 32  # fp32 operands are split into three, and registers hold half as many tokens
# Kinds of calls with default configurations of their own; see `_kind`.
NARROW = ("hip", "fp32", "wide")
PREPARE = (
    Config("k64_w4", {"BK": 64}, num_warps=4, num_stages=1),
    Config("k32_w4", {"BK": 32}, num_warps=4, num_stages=1, suits=("fp32",)),
)
INTRA = (
    Config("k32v64_w8", {"BK": 32, "BV": 64}, num_warps=8, num_stages=1),
    Config("k64v64_w8", {"BK": 64, "BV": 64}, num_warps=8, num_stages=1),
    Config("k16v32_w4", {"BK": 16, "BV": 32}, num_warps=4, num_stages=1, suits=("hip",)),
    Config("k16v32_w8", {"BK": 16, "BV": 32}, num_warps=8, num_stages=1, suits=("fp32", "wide")),
)
STATE = (
    Config("v32_w4", {"BV": 32}, num_warps=4, num_stages=2),
    Config("v64_w8", {"BV": 64}, num_warps=8, num_stages=2),
    Config("v16_w4", {"BV": 16}, num_warps=4, num_stages=1, suits=("hip", "wide")),
    Config("v16_w8", {"BV": 16}, num_warps=8, num_stages=1, suits=("fp32",)),
)
OUTPUT = (
    Config("k64v64_w4", {"BK": 64, "BV": 64}, num_warps=4, num_stages=2),
    Config("k64v128_w8", {"BK": 64, "BV": 128}, num_warps=8, num_stages=2),
)


@dataclass(frozen=True)
class Rule:
    """Which rule the kernels compute; every field is a constant of the compiled code.

    feature: "l2" (KDA), "scale" (q and k as they are), "elu1" (linear attention).
    decay: "channel" (KDA), "head" (Gated DeltaNet), None.
    gate: how the decay input becomes a log decay: "softplus", "bounded", or None when it is one.
    delta: whether a write subtracts what the state predicts.
    sigmoid_beta: whether beta comes as logits.
    """

    feature: str
    decay: str | None
    gate: str | None
    delta: bool
    sigmoid_beta: bool


def _kind(dtype: torch.dtype, K: int, rule: Rule) -> str:
    """What decides the default configurations: the scarcest register budget first."""
    if on_hip():
        return "hip"
    if dtype == torch.float32:
        return "fp32"
    if K > 128:
        return "wide"
    return "" if rule.decay else "undecayed"


class Sizes:
    """Sizes, launch arguments and compile-time constants that all kernels of one call share."""

    def __init__(self, q: Tensor, v: Tensor, rule: Rule, cu: Tensor | None, lower_bound: float | None, chunk: int):
        self.B, self.T, self.H, self.K = q.shape
        self.V = v.shape[3]
        self.tokens, self.chunk, self.device, self.dtype = self.B * self.T, chunk, q.device, q.dtype
        self.sequences = self.B if cu is None else cu.numel() - 1
        tables = None if cu is None else chunk_tables(cu, self.tokens, chunk)
        self.chunks = self.B * cdiv(self.T, chunk) if tables is None else tables.limit
        self.BK_ALL = max(16, next_power_of_2(self.K))
        by_segment = rule.gate == "bounded" and lower_bound >= SEGMENT_BOUND and q.dtype in SEGMENT_DTYPES
        self.lowest = SEGMENT.value.bit_length() - 1 if by_segment else 0  # log2 of the segments the levels leave
        self.levels = chunk.bit_length() - 1 - self.lowest
        self.kind = _kind(q.dtype, self.K, rule)
        self.key = f"{q.dtype}/K{self.BK_ALL}V{next_power_of_2(self.V)}/{rule.decay}"
        self.precision, self.dt = fp32_precision(q.device), dot_dtype(q.dtype)
        # Scores of 16-bit q and k are good to 2^-9 at best, and the inverse is rounded to 16 bits after: one tf32
        # product, good to 2^-11, costs no accuracy there. fp32 keeps the exact one.
        self.solve = self.precision if q.dtype == torch.float32 else self.precision.removesuffix("x3")
        self.where = {"row_tokens": self.T, "cu_ptr": cu, "offset_ptr": None if cu is None else tables.offset}
        self.owner = {"owner_ptr": None if cu is None else tables.owner}
        self.place = {"H": self.H, "C": chunk, "PACKED": cu is not None}
        self.products = {"DT": self.dt, "PRECISION": self.precision}

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_prepare_kernel(
    q_ptr, k_ptr, g_ptr, A_ptr, bias_ptr, b_ptr, q_inverse_ptr, k_inverse_ptr, lower_bound,
    row_tokens, cu_ptr, owner_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    FEATURE: tl.constexpr, DECAY: tl.constexpr, GATE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    start, count = place(tl.program_id(0) // H, row_tokens, cu_ptr, owner_ptr, offset_ptr, C, PACKED)
    if count == 0:
        return
    n = tl.arange(0, C)
    live = n < count
    base = start * H + h  # of [tokens, H]
    if DECAY == "head":
        g = tl.load(g_ptr + base + n * H, mask=live, other=0.0).to(tl.float32)
        tl.store(b_ptr + base + n * H, tl.cumsum(g * LOG2E, 0), mask=live)
    q_squares = tl.zeros([C], tl.float32)
    k_squares = tl.zeros([C], tl.float32)
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        inside = live[:, None] & (col < K)[None, :]
        at = n[:, None] * (H * K) + col[None, :]
        if FEATURE == "l2":
            q = tl.load(q_ptr + base * K + at, mask=inside, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + base * K + at, mask=inside, other=0.0).to(tl.float32)
            q_squares += tl.sum(q * q, 1)
            k_squares += tl.sum(k * k, 1)
        if DECAY == "channel":
            bias = tl.load(bias_ptr + h * K + col, mask=col < K, other=0.0).to(tl.float32)
            A = tl.exp(tl.load(A_ptr + h).to(tl.float32))
            y = tl.load(g_ptr + base * K + at, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
            if GATE == "softplus":
                g = -A * softplus(y)
            else:
                g = lower_bound * tl.sigmoid(A * y)
            g = tl.where(inside, g, 0.0)
            tl.store(b_ptr + base * K + at, tl.cumsum(g * LOG2E, 0), mask=inside)
    if FEATURE == "l2":
        tl.store(q_inverse_ptr + base + n * H, 1.0 / tl.sqrt(q_squares + 1e-6), mask=live)
        tl.store(k_inverse_ptr + base + n * H, 1.0 / tl.sqrt(k_squares + 1e-6), mask=live)


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_intra_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, b_ptr, q_inverse_ptr, k_inverse_ptr, scale,
    q_out_ptr, k_out_ptr, w_ptr, u_ptr, scores_ptr, inverse_ptr,
    row_tokens, cu_ptr, owner_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    FEATURE: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, SIGMOID_BETA: tl.constexpr,
    LEVELS: tl.constexpr, LOWEST: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    start, count = place(tl.program_id(0) // H, row_tokens, cu_ptr, owner_ptr, offset_ptr, C, PACKED)
    if count == 0:
        return
    n = tl.arange(0, C)
    live = n < count
    i, j = n[:, None], n[None, :]
    base = start * H + h  # of [tokens, H]
    q_ptr += base * K
    k_ptr += base * K
    q_inverse = load_inverse(q_inverse_ptr, base + n * H, live, scale, FEATURE)
    k_inverse = load_inverse(k_inverse_ptr, base + n * H, live, 1.0, FEATURE)
    A = tl.zeros([C, C], tl.float32)  # scores of k with k, strictly below the diagonal
    P = tl.zeros([C, C], tl.float32)  # scores of q with k, with the diagonal

    if DECAY == "channel":
        b_ptr += base * K
        for level in range(LEVELS):
            shift = LEVELS - 1 - level + LOWEST
            k_scores = tl.zeros([C, C], tl.float32)
            q_scores = tl.zeros([C, C], tl.float32)
            for first in range(0, K, BK):
                col = (first + tl.arange(0, BK))[None, :]
                inside = live[:, None] & (col < K)
                at = i * (H * K) + col
                b = tl.load(b_ptr + at, mask=inside, other=0.0)
                E = level_factor(b, b_ptr, n, count, col, inside, shift, H, K)
                k = (load_feature(k_ptr, at, inside, k_inverse, FEATURE) * E).to(DT)  # [C, BK]
                q = load_feature(q_ptr, at, inside, q_inverse, FEATURE) * E
                q_scores += multiply(q, tl.trans(k), DT, PRECISION)
                if DELTA:
                    k_scores += multiply(k, tl.trans(k), DT, PRECISION)
            pairs = level_mask(i, j, shift)
            A += tl.where(pairs, k_scores, 0.0)
            P += tl.where(pairs, q_scores, 0.0)
        # What the levels leave: segments of 16 relative to their first token, or the diagonal of P, whose factor is 1.
        k_scores = tl.zeros([C, C], tl.float32)
        q_scores = tl.zeros([C, C], tl.float32)
        for first in range(0, K, BK):
            col = (first + tl.arange(0, BK))[None, :]
            inside = live[:, None] & (col < K)
            at = i * (H * K) + col
            q = load_feature(q_ptr, at, inside, q_inverse, FEATURE)
            k = load_feature(k_ptr, at, inside, k_inverse, FEATURE)
            if LOWEST > 0:
                b = tl.load(b_ptr + at, mask=inside, other=0.0)
                x = segment_exponent(b, b_ptr, n, col, inside, H, K)
                right = tl.trans((k * tl.exp2(-x)).to(DT))
                left = tl.exp2(x)
                q_scores += multiply(q * left, right, DT, PRECISION)
                if DELTA:
                    k_scores += multiply(k * left, right, DT, PRECISION)
            else:
                q_scores += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
        pairs = i >> LOWEST == j >> LOWEST
        A += tl.where(pairs & (i > j), k_scores, 0.0)
        P += tl.where(pairs & (i >= j), q_scores, 0.0)
    else:
        for first in range(0, K, BK):
            col = (first + tl.arange(0, BK))[None, :]
            inside = live[:, None] & (col < K)
            at = i * (H * K) + col
            k = load_feature(k_ptr, at, inside, k_inverse, FEATURE).to(DT)
            P += multiply(load_feature(q_ptr, at, inside, q_inverse, FEATURE), tl.trans(k), DT, PRECISION)
            if DELTA:
                A += multiply(k, tl.trans(k), DT, PRECISION)
        if DECAY == "head":
            b_row = tl.load(b_ptr + base + n * H, mask=live, other=0.0)
            # masked before the exponential, which would overflow above the diagonal
            E = tl.exp2(tl.where(i >= j, b_row[:, None] - b_row[None, :], 0.0))
            A *= E
            P *= E
        A = tl.where(i > j, A, 0.0)
        P = tl.where(i >= j, P, 0.0)
    square = i * (H * C) + j
    tl.store(scores_ptr + base * C + square, P.to(scores_ptr.dtype.element_ty), mask=live[:, None])

    if DELTA:
        beta = tl.load(beta_ptr + base + n * H, mask=live, other=0.0).to(tl.float32)
        if SIGMOID_BETA:
            beta = tl.where(live, tl.sigmoid(beta), 0.0)
        M = invert_unit_lower(A * beta[:, None], C, SOLVE).to(DT)
        if inverse_ptr is not None:
            tl.store(inverse_ptr + base * C + square, M.to(inverse_ptr.dtype.element_ty), mask=live[:, None])

    if DECAY == "head":
        b_row = tl.load(b_ptr + base + n * H, mask=live, other=0.0)
        from_start = tl.exp2(b_row)[:, None]
        to_end = tl.exp2(tl.where(live, tl.load(b_ptr + base + (count - 1) * H) - b_row, 0.0))[:, None]
    for first in range(0, K, BK):
        col = (first + tl.arange(0, BK))[None, :]
        inside = live[:, None] & (col < K)
        at = i * (H * K) + col
        q = load_feature(q_ptr, at, inside, q_inverse, FEATURE)
        k = load_feature(k_ptr, at, inside, k_inverse, FEATURE)
        k_from_start, k_to_end = k, k
        if DECAY == "channel":
            b = tl.load(b_ptr + at, mask=inside, other=0.0)
            b_last = tl.load(b_ptr + (count - 1) * (H * K) + col, mask=col < K, other=0.0)
            E = tl.exp2(b)
            q, k_from_start = q * E, k * E
            k_to_end = k * tl.exp2(tl.where(live[:, None], b_last - b, 0.0))
        elif DECAY == "head":
            q, k_from_start, k_to_end = q * from_start, k * from_start, k * to_end
        tl.store(q_out_ptr + base * K + at, q.to(q_out_ptr.dtype.element_ty), mask=inside)
        tl.store(k_out_ptr + base * K + at, k_to_end.to(k_out_ptr.dtype.element_ty), mask=inside)
        if DELTA:
            w = multiply(M, k_from_start * beta[:, None], DT, PRECISION)
            tl.store(w_ptr + base * K + at, w.to(w_ptr.dtype.element_ty), mask=inside)
    if DELTA:
        for first in range(0, V, BV):
            col = (first + tl.arange(0, BV))[None, :]
            inside = live[:, None] & (col < V)
            at = i * (H * V) + col
            v = tl.load(v_ptr + base * V + at, mask=inside, other=0.0).to(tl.float32)
            u = multiply(M, v * beta[:, None], DT, PRECISION)
            tl.store(u_ptr + base * V + at, u.to(u_ptr.dtype.element_ty), mask=inside)


@triton.jit
def chunk_decay(b_ptr, col, H: tl.constexpr, K: tl.constexpr, DECAY: tl.constexpr):
    """exp(b) at the token and head (row of [tokens, H]) that b_ptr was moved to: [BK] per channel, or one number."""
    if DECAY == "channel":
        return tl.exp2(tl.load(b_ptr + col, mask=col < K, other=0.0))
    else:
        return tl.exp2(tl.load(b_ptr))


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_state_kernel(
    k_ptr, w_ptr, u_ptr, b_ptr, d_ptr, states_ptr, initial_ptr, final_ptr,
    row_tokens, cu_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """S [BK, BV] in registers over the chunks of a sequence; d replaces u; the state before each chunk is kept.

    `k_ptr` holds k e^(b_C - b). Without DELTA u is v and d is not written.
    """
    slices: tl.constexpr = (V + BV - 1) // BV
    sequence = tl.program_id(0) // (H * slices)
    h = tl.program_id(0) // slices % H
    n = tl.arange(0, C)
    col = tl.arange(0, BK)
    out = (tl.program_id(0) % slices) * BV + tl.arange(0, BV)
    state_at = col[:, None] * V + out[None, :]
    state_inside = (col < K)[:, None] & (out < V)[None, :]
    if initial_ptr is not None:
        initial_at = (wide(sequence) * H + h) * (K * V)
        S = tl.load(initial_ptr + initial_at + state_at, mask=state_inside, other=0.0).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    first_chunk, chunk_end = chunks_of(sequence, row_tokens, offset_ptr, C, PACKED)
    begin, end = sequence_of(sequence, row_tokens, cu_ptr, PACKED)
    for chunk in range(first_chunk, chunk_end):
        start = begin + wide(chunk - first_chunk) * C
        count = tl.minimum(end - start, C).to(tl.int32)
        live = n < count
        base = start * H + h
        inside_k = live[:, None] & (col < K)[None, :]
        inside_v = live[:, None] & (out < V)[None, :]
        at_k = n[:, None] * (H * K) + col[None, :]
        at_v = n[:, None] * (H * V) + out[None, :]
        states_at = (wide(chunk) * H + h) * (K * V)
        tl.store(states_ptr + states_at + state_at, S.to(states_ptr.dtype.element_ty), mask=state_inside)
        d = tl.load(u_ptr + base * V + at_v, mask=inside_v, other=0.0).to(tl.float32)
        if DELTA:
            w = tl.load(w_ptr + base * K + at_k, mask=inside_k, other=0.0)
            d -= multiply(w, S, DT, PRECISION)
            tl.store(d_ptr + base * V + at_v, d.to(d_ptr.dtype.element_ty), mask=inside_v)
        if DECAY is not None:
            last = base + (count - 1) * H
            decay = chunk_decay(b_ptr + (last * K if DECAY == "channel" else last), col, H, K, DECAY)
            S *= decay[:, None] if DECAY == "channel" else decay
        k = tl.load(k_ptr + base * K + at_k, mask=inside_k, other=0.0)
        S += multiply(tl.trans(k), d, DT, PRECISION)
    if final_ptr is not None:
        final_at = (wide(sequence) * H + h) * (K * V)
        tl.store(final_ptr + final_at + state_at, S.to(final_ptr.dtype.element_ty), mask=state_inside)


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_output_kernel(
    q_ptr, d_ptr, scores_ptr, states_ptr, o_ptr,
    row_tokens, cu_ptr, owner_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o = (q e^b) S + P d for one chunk, head and slice of V; `q_ptr` holds q e^b."""
    slices: tl.constexpr = (V + BV - 1) // BV
    chunk = tl.program_id(0) // (H * slices)
    h = tl.program_id(0) // slices % H
    start, count = place(chunk, row_tokens, cu_ptr, owner_ptr, offset_ptr, C, PACKED)
    if count == 0:
        return
    n = tl.arange(0, C)
    live = (n < count)[:, None]
    base = start * H + h
    out = ((tl.program_id(0) % slices) * BV + tl.arange(0, BV))[None, :]
    states_ptr += (wide(chunk) * H + h) * (K * V)
    o = tl.zeros([C, BV], tl.float32)
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        at = n[:, None] * (H * K) + col[None, :]
        q = tl.load(q_ptr + base * K + at, mask=live & (col < K)[None, :], other=0.0)
        S = tl.load(states_ptr + col[:, None] * V + out, mask=(col < K)[:, None] & (out < V), other=0.0)
        o += multiply(q, S, DT, PRECISION)
    inside = live & (out < V)
    at = n[:, None] * (H * V) + out
    P = tl.load(scores_ptr + base * C + n[:, None] * (H * C) + n[None, :], mask=live, other=0.0)
    d = tl.load(d_ptr + base * V + at, mask=inside, other=0.0)
    o += multiply(P, d, DT, PRECISION)
    tl.store(o_ptr + base * V + at, o.to(o_ptr.dtype.element_ty), mask=inside)


@dataclass
class Chunks:
    """What `prepare`, `intra` and `state` computed, for the output kernel and for the backward.

    b fp32 [tokens, H, K] or [tokens, H] or None; inverse lengths fp32 [tokens, H] or None; q_out (q e^b), k_out
    (k e^(b_C - b)), w: like q; u, d: like v; scores, inverse: [tokens, H, C]; states [chunks, H, K, V].
    """

    b: Tensor | None
    q_inverse: Tensor | None
    k_inverse: Tensor | None
    q_out: Tensor
    k_out: Tensor
    w: Tensor | None
    u: Tensor
    d: Tensor
    scores: Tensor
    inverse: Tensor | None
    states: Tensor


def run_chunks(
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
    sizes: Sizes,
    scale: float,
    lower_bound: float | None,
    keep_inverse: bool,
) -> Chunks:
    """The first three kernels. All inputs contiguous; `final` fp32 [N, H, K, V] is filled unless None."""
    s, device = sizes, sizes.device
    fp32 = torch.float32
    b = {None: None, "head": (s.tokens, s.H), "channel": (s.tokens, s.H, s.K)}[rule.decay]
    b = None if b is None else s.empty(*b, dtype=fp32)
    norms = [s.empty(s.tokens, s.H, dtype=fp32) if rule.feature == "l2" else None for _ in range(2)]
    if b is not None or norms[0] is not None:
        config = choose(chunk_prepare_kernel, PREPARE, s.key, device, kind=s.kind)
        launch(
            chunk_prepare_kernel, (s.chunks * s.H,), config, device, **s.where, **s.owner, **s.place,
            q_ptr=q, k_ptr=k, g_ptr=g, A_ptr=A_log, bias_ptr=dt_bias, b_ptr=b, q_inverse_ptr=norms[0],
            k_inverse_ptr=norms[1], lower_bound=float(lower_bound or 0.0), K=s.K, FEATURE=rule.feature,
            DECAY=rule.decay, GATE=rule.gate,
        )  # fmt: skip
    q_out, k_out, w = s.empty(*q.shape), s.empty(*q.shape), s.empty(*q.shape) if rule.delta else None
    u, d = (s.empty(*v.shape), s.empty(*v.shape)) if rule.delta else (v, v)
    scores = s.empty(s.tokens, s.H, s.chunk)
    inverse = s.empty(s.tokens, s.H, s.chunk) if rule.delta and keep_inverse else None
    launch(
        chunk_intra_kernel, (s.chunks * s.H,), choose(chunk_intra_kernel, INTRA, s.key, device, kind=s.kind), device,
        **s.where, **s.owner, **s.place, **s.products,
        q_ptr=q, k_ptr=k, v_ptr=v, beta_ptr=beta, b_ptr=b, q_inverse_ptr=norms[0], k_inverse_ptr=norms[1], scale=scale,
        q_out_ptr=q_out, k_out_ptr=k_out, w_ptr=w, u_ptr=u, scores_ptr=scores, inverse_ptr=inverse,
        K=s.K, V=s.V, FEATURE=rule.feature, DECAY=rule.decay, DELTA=rule.delta, SIGMOID_BETA=rule.sigmoid_beta,
        LEVELS=s.levels, LOWEST=s.lowest, SOLVE=s.solve,
    )  # fmt: skip
    states = s.empty(s.chunks, s.H, s.K, s.V)
    config = choose(chunk_state_kernel, STATE, s.key, device, kind=s.kind)
    launch(
        chunk_state_kernel, (s.sequences * s.H * cdiv(s.V, config.constants["BV"]),), config, device,
        **s.where, **s.place, **s.products,
        k_ptr=k_out, w_ptr=w, u_ptr=u, b_ptr=b, d_ptr=d, states_ptr=states, initial_ptr=initial, final_ptr=final,
        K=s.K, V=s.V, DECAY=rule.decay, DELTA=rule.delta, BK=s.BK_ALL,
    )  # fmt: skip
    return Chunks(b, *norms, q_out, k_out, w, u, d, scores, inverse, states)


def run_output(chunks: Chunks, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """The fourth kernel: o [B, T, H, V]."""
    s = sizes
    o = s.empty(s.B, s.T, s.H, s.V, dtype=dtype)
    config = choose(chunk_output_kernel, OUTPUT, s.key, s.device)
    launch(
        chunk_output_kernel, (s.chunks * s.H * cdiv(s.V, config.constants["BV"]),), config, s.device,
        **s.where, **s.owner, **s.place, **s.products,
        q_ptr=chunks.q_out, d_ptr=chunks.d, scores_ptr=chunks.scores, states_ptr=chunks.states, o_ptr=o,
        K=s.K, V=s.V,
    )  # fmt: skip
    return o
