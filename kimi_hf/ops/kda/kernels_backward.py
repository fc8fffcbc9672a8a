"""The chunked backward, in five kernels after the forward's first three have been run again.

With do and the gradient dS of the state after a chunk (symbols as in kernels_forward.py, M = (I + A)^-1):

    state_grad    the scan in reverse:  dd = P^T do + (k e^(b_C-b)) dS,
                  dS <- e^b_C dS + (q e^b)^T do - w^T dd
    value_grad    dP = do d^T;  y = M^T dd;  dA = -y u^T;  dv = beta y
    key_grad      through q e^b, k e^(b_C-b), w and e^b_C, channel block by channel block;  dA -= (M^T dw) w^T
    score_grad    through the scores P and A, level by level
    input_grad    through the gate, the lengths and the sigmoid

No gradient of an exponential is formed: a term x_i y_j e^(b_i - b_j) gives x_i dx_i, which is also y_j dy_j, to the log
decay of every step from j + 1 to i. Split at the token r as the scores are (kernels_common.py), a row's share x_i dx_i
goes to the steps from r + 1 to i and a column's to those from j + 1 to r: sums without a subtraction, so that steps of
strong decay get their tiny gradients right. Gradients of q, k and the log decay travel between kernels in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops.kda.kernels_common import (
    chunks_of,
    level_factor,
    level_mask,
    load_feature,
    load_inverse,
    multiply,
    place,
    segment_exponent,
    sequence_of,
)
from kimi_hf.ops.kda.kernels_forward import NARROW, Chunks, Rule, Sizes, chunk_decay
from kimi_hf.ops.kernels_common import Config, cdiv, choose, launch, softplus, wide

STATE_GRAD = (
    Config("v32_w4", {"BV": 32}, num_warps=4, num_stages=1),
    Config("v64_w8", {"BV": 64}, num_warps=8, num_stages=1),
    Config("v16_w8", {"BV": 16}, num_warps=8, num_stages=1, suits=NARROW),
)
VALUE_GRAD = (
    Config("v32_w8", {"BV": 32}, num_warps=8, num_stages=1),
    Config("v64_w8", {"BV": 64}, num_warps=8, num_stages=1),
    Config("v16_w8", {"BV": 16}, num_warps=8, num_stages=1, suits=NARROW),
)
KEY_GRAD = (
    Config("k32v64_w8", {"BK": 32, "BV": 64}, num_warps=8, num_stages=1),
    Config("k64v32_w8", {"BK": 64, "BV": 32}, num_warps=8, num_stages=1),
    Config("k16v32_w8", {"BK": 16, "BV": 32}, num_warps=8, num_stages=1, suits=("hip", "wide")),
    Config("k16v16_w8", {"BK": 16, "BV": 16}, num_warps=8, num_stages=1, suits=("fp32",)),
)
SCORE_GRAD = (
    Config("k16_w8", {"BK": 16}, num_warps=8, num_stages=1),
    Config("k32_w8", {"BK": 32}, num_warps=8, num_stages=1, suits=("undecayed",)),
    Config("k16_w4", {"BK": 16}, num_warps=4, num_stages=1, suits=("hip",)),
)
INPUT_GRAD = (Config("k64_w8", {"BK": 64}, num_warps=8, num_stages=1),)


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_state_grad_kernel(
    q_ptr, k_ptr, w_ptr, b_ptr, scores_ptr, do_ptr, dd_ptr, dstates_ptr, dfinal_ptr, dinitial_ptr,
    row_tokens, cu_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dS [BK, BV] in registers over the chunks of a sequence, last first; the gradient after each chunk is kept."""
    slices: tl.constexpr = (V + BV - 1) // BV
    sequence = tl.program_id(0) // (H * slices)
    h = tl.program_id(0) // slices % H
    n = tl.arange(0, C)
    col = tl.arange(0, BK)
    out = (tl.program_id(0) % slices) * BV + tl.arange(0, BV)
    state_at = col[:, None] * V + out[None, :]
    state_inside = (col < K)[:, None] & (out < V)[None, :]
    ends_at = (wide(sequence) * H + h) * (K * V)
    if dfinal_ptr is not None:
        dS = tl.load(dfinal_ptr + ends_at + state_at, mask=state_inside, other=0.0).to(tl.float32)
    else:
        dS = tl.zeros([BK, BV], tl.float32)
    first_chunk, chunk_end = chunks_of(sequence, row_tokens, offset_ptr, C, PACKED)
    begin, end = sequence_of(sequence, row_tokens, cu_ptr, PACKED)
    for back in range(0, chunk_end - first_chunk):
        chunk = chunk_end - 1 - back
        start = begin + wide(chunk - first_chunk) * C
        count = tl.minimum(end - start, C).to(tl.int32)
        live = n < count
        base = start * H + h
        inside_k = live[:, None] & (col < K)[None, :]
        inside_v = live[:, None] & (out < V)[None, :]
        at_k = n[:, None] * (H * K) + col[None, :]
        at_v = n[:, None] * (H * V) + out[None, :]
        states_at = (wide(chunk) * H + h) * (K * V)
        tl.store(dstates_ptr + states_at + state_at, dS.to(dstates_ptr.dtype.element_ty), mask=state_inside)
        do = tl.load(do_ptr + base * V + at_v, mask=inside_v, other=0.0)
        P = tl.load(scores_ptr + base * C + n[:, None] * (H * C) + n[None, :], mask=live[:, None], other=0.0)
        k = tl.load(k_ptr + base * K + at_k, mask=inside_k, other=0.0)
        dd = multiply(tl.trans(P), do, DT, PRECISION)
        dd += multiply(k, dS, DT, PRECISION)
        tl.store(dd_ptr + base * V + at_v, dd.to(dd_ptr.dtype.element_ty), mask=inside_v)
        if DECAY is not None:
            last = base + (count - 1) * H
            decay = chunk_decay(b_ptr + (last * K if DECAY == "channel" else last), col, H, K, DECAY)
            dS *= decay[:, None] if DECAY == "channel" else decay
        q = tl.load(q_ptr + base * K + at_k, mask=inside_k, other=0.0)
        dS += multiply(tl.trans(q), do, DT, PRECISION)
        if DELTA:
            w = tl.load(w_ptr + base * K + at_k, mask=inside_k, other=0.0)
            dS -= multiply(tl.trans(w), dd, DT, PRECISION)
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + ends_at + state_at, dS.to(dinitial_ptr.dtype.element_ty), mask=state_inside)


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_value_grad_kernel(
    v_ptr, beta_ptr, u_ptr, d_ptr, inverse_ptr, do_ptr, dd_ptr, dscores_ptr, dA_part_ptr, dv_ptr, dbeta_ptr,
    row_tokens, cu_ptr, owner_ptr, offset_ptr,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    DELTA: tl.constexpr, SIGMOID_BETA: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dP, the part of dA that comes from u, dv, and the part of dbeta (of the sigmoid's result) that comes from u."""
    h = tl.program_id(0) % H
    start, count = place(tl.program_id(0) // H, row_tokens, cu_ptr, owner_ptr, offset_ptr, C, PACKED)
    if count == 0:
        return
    n = tl.arange(0, C)
    live = n < count
    base = start * H + h
    square = n[:, None] * (H * C) + n[None, :]
    dP = tl.zeros([C, C], tl.float32)
    if DELTA:
        dA = tl.zeros([C, C], tl.float32)
        dbeta = tl.zeros([C], tl.float32)
        beta = tl.load(beta_ptr + base + n * H, mask=live, other=0.0).to(tl.float32)
        if SIGMOID_BETA:
            beta = tl.sigmoid(beta)
        M = tl.load(inverse_ptr + base * C + square, mask=live[:, None], other=0.0)
    for first in range(0, V, BV):
        col = (first + tl.arange(0, BV))[None, :]
        inside = live[:, None] & (col < V)
        at = base * V + n[:, None] * (H * V) + col
        do = tl.load(do_ptr + at, mask=inside, other=0.0)
        d = tl.load(d_ptr + at, mask=inside, other=0.0)
        dP += multiply(do, tl.trans(d), DT, PRECISION)
        if DELTA:
            dd = tl.load(dd_ptr + at, mask=inside, other=0.0)
            u = tl.load(u_ptr + at, mask=inside, other=0.0)
            v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
            y = multiply(tl.trans(M), dd, DT, PRECISION)
            dA -= multiply(y, tl.trans(u), DT, PRECISION)
            dbeta += tl.sum(y * v, 1)
            tl.store(dv_ptr + at, (beta[:, None] * y).to(dv_ptr.dtype.element_ty), mask=inside)
    below = n[:, None] >= n[None, :]
    dP = tl.where(below, dP, 0.0)
    tl.store(dscores_ptr + base * C + square, dP.to(dscores_ptr.dtype.element_ty), mask=live[:, None])
    if DELTA:
        tl.store(dA_part_ptr + base * C + square, dA, mask=live[:, None])
        tl.store(dbeta_ptr + base + n * H, dbeta, mask=live)


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_key_grad_kernel(
    q_ptr, k_ptr, beta_ptr, b_ptr, q_inverse_ptr, k_inverse_ptr, scale,
    w_ptr, d_ptr, inverse_ptr, states_ptr, dstates_ptr, do_ptr, dd_ptr,
    dA_part_ptr, dA_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    row_tokens, cu_ptr, owner_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    FEATURE: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, SIGMOID_BETA: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr, SHARES: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of the mapped q and k, of the log decay and of beta through q e^b, k e^(b_C-b), w and e^b_C."""
    h = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    start, count = place(chunk, row_tokens, cu_ptr, owner_ptr, offset_ptr, C, PACKED)
    if count == 0:
        return
    n = tl.arange(0, C)
    live = n < count
    base = start * H + h
    square = n[:, None] * (H * C) + n[None, :]
    states_at = (wide(chunk) * H + h) * (K * V)
    q_inverse = load_inverse(q_inverse_ptr, base + n * H, live, scale, FEATURE)
    k_inverse = load_inverse(k_inverse_ptr, base + n * H, live, 1.0, FEATURE)
    if DECAY == "channel":
        b_ptr += base * K
    elif DECAY == "head":
        b_row = tl.load(b_ptr + base + n * H, mask=live, other=0.0)
        b_end = tl.load(b_ptr + base + (count - 1) * H)
        row_share = tl.zeros([C], tl.float32)
        col_share = tl.zeros([C], tl.float32)
        all_share = 0.0 * b_end
    if DELTA:
        beta = tl.load(beta_ptr + base + n * H, mask=live, other=0.0).to(tl.float32)
        if SIGMOID_BETA:
            beta = tl.sigmoid(beta)
        dbeta = tl.load(dbeta_ptr + base + n * H, mask=live, other=0.0)
        dA = tl.load(dA_part_ptr + base * C + square, mask=live[:, None], other=0.0)
        M = tl.load(inverse_ptr + base * C + square, mask=live[:, None], other=0.0)
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        inside = live[:, None] & (col < K)[None, :]
        at = n[:, None] * (H * K) + col[None, :]
        dq = tl.zeros([C, BK], tl.float32)  # of q e^b, then of q
        dk_end = tl.zeros([C, BK], tl.float32)  # of k e^(b_C - b), then that part of k's
        dw = tl.zeros([C, BK], tl.float32)
        ddecay = tl.zeros([BK], tl.float32)  # of e^b_C
        for v_first in range(0, V, BV):
            out = v_first + tl.arange(0, BV)
            inside_v = live[:, None] & (out < V)[None, :]
            at_v = base * V + n[:, None] * (H * V) + out[None, :]
            inside_state = (col < K)[:, None] & (out < V)[None, :]
            S = tl.load(states_ptr + states_at + col[:, None] * V + out[None, :], mask=inside_state, other=0.0)
            dS = tl.load(dstates_ptr + states_at + col[:, None] * V + out[None, :], mask=inside_state, other=0.0)
            do = tl.load(do_ptr + at_v, mask=inside_v, other=0.0)
            dq += multiply(do, tl.trans(S), DT, PRECISION)
            d = tl.load(d_ptr + at_v, mask=inside_v, other=0.0)
            dk_end += multiply(d, tl.trans(dS), DT, PRECISION)
            if DELTA:
                dd = tl.load(dd_ptr + at_v, mask=inside_v, other=0.0)
                dw -= multiply(dd, tl.trans(S), DT, PRECISION)
            if DECAY is not None:
                ddecay += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        q = load_feature(q_ptr + base * K, at, inside, q_inverse, FEATURE)
        k = load_feature(k_ptr + base * K, at, inside, k_inverse, FEATURE)
        if DECAY == "channel":
            b = tl.load(b_ptr + at, mask=inside, other=0.0)
            b_last = tl.load(b_ptr + (count - 1) * (H * K) + col, mask=col < K, other=0.0)
            from_start, state_decay = tl.exp2(b), tl.exp2(b_last)
            to_end = tl.exp2(tl.where(inside, b_last[None, :] - b, 0.0))
        elif DECAY == "head":
            from_start, state_decay = tl.exp2(b_row)[:, None], tl.exp2(b_end)
            to_end = tl.exp2(tl.where(live, b_end - b_row, 0.0))[:, None]
        else:
            from_start, to_end = 1.0, 1.0
        dq *= from_start
        dk_end *= to_end
        dk_row = tl.zeros([C, BK], tl.float32)
        if DELTA:
            y = multiply(tl.trans(M), dw, DT, PRECISION)
            w = tl.load(w_ptr + base * K + at, mask=inside, other=0.0)
            dA -= multiply(y, tl.trans(w), DT, PRECISION)
            y *= from_start
            dbeta += tl.sum(y * k, 1)
            dk_row = beta[:, None] * y
        tl.store(dq_ptr + base * K + at, dq, mask=inside)
        tl.store(dk_ptr + base * K + at, dk_row + dk_end, mask=inside)
        if DECAY == "channel":
            # e^b reaches from the chunk's start to a row, e^(b_C - b) from a column to the end, e^b_C over all steps
            dg = tl.dot(tl.where(n[None, :] >= n[:, None], 1.0, 0.0), q * dq + k * dk_row, input_precision=SHARES)
            dg += tl.dot(tl.where(n[None, :] < n[:, None], 1.0, 0.0), k * dk_end, input_precision=SHARES)
            dg += (state_decay * ddecay)[None, :]
            tl.store(dg_ptr + base * K + at, dg, mask=inside)
        elif DECAY == "head":
            row_share += tl.sum(q * dq + k * dk_row, 1)
            col_share += tl.sum(k * dk_end, 1)
            all_share += state_decay * tl.sum(ddecay, 0)
    if DECAY == "head":
        below = tl.sum(tl.where(n[None, :] < n[:, None], col_share[None, :], 0.0), 1)
        dg = tl.cumsum(row_share, 0, reverse=True) + below + all_share
        tl.store(dg_ptr + base + n * H, dg, mask=live)
    if DELTA:
        dA = tl.where(n[:, None] > n[None, :], dA, 0.0)
        tl.store(dA_ptr + base * C + square, dA.to(dA_ptr.dtype.element_ty), mask=live[:, None])
        tl.store(dbeta_ptr + base + n * H, dbeta, mask=live)


@triton.jit
def score_products(dX, x_left, k_right, left, right, DT: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients through scores X_ij = sum_K (x left)_i (k right)_j.

    dX [C, C] masked; x_left [C, BK] is x times left and any weight of the row, k_right is k times right.
    Returns: the gradient of x over the row's weight, that of k, each [C, BK] fp32.
    """
    dx = multiply(dX, k_right, DT, PRECISION) * left
    dk = multiply(tl.trans(dX), x_left, DT, PRECISION) * right
    return dx, dk


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_score_grad_kernel(
    q_ptr, k_ptr, beta_ptr, b_ptr, q_inverse_ptr, k_inverse_ptr, scale,
    dscores_ptr, dA_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    row_tokens, cu_ptr, owner_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    FEATURE: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, SIGMOID_BETA: tl.constexpr,
    LEVELS: tl.constexpr, LOWEST: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr, SHARES: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Adds the gradients through the scores to dq, dk, dg and dbeta."""
    h = tl.program_id(0) % H
    start, count = place(tl.program_id(0) // H, row_tokens, cu_ptr, owner_ptr, offset_ptr, C, PACKED)
    if count == 0:
        return
    n = tl.arange(0, C)
    live = n < count
    i, j = n[:, None], n[None, :]
    base = start * H + h
    square = i * (H * C) + j
    q_inverse = load_inverse(q_inverse_ptr, base + n * H, live, scale, FEATURE)
    k_inverse = load_inverse(k_inverse_ptr, base + n * H, live, 1.0, FEATURE)
    # dP and dA are read again wherever they are used: held in registers in the layouts of four products they spill.
    dscores_ptr += base * C
    beta = tl.zeros([C], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    if DELTA:
        dA_ptr += base * C
        beta = tl.load(beta_ptr + base + n * H, mask=live, other=0.0).to(tl.float32)
        if SIGMOID_BETA:
            beta = tl.sigmoid(beta)
        dbeta = tl.load(dbeta_ptr + base + n * H, mask=live, other=0.0)
    if DECAY == "channel":
        b_ptr += base * K
        diagonal = tl.load(dscores_ptr + n * (H * C + 1), mask=live, other=0.0).to(tl.float32)
    elif DECAY == "head":
        b_row = tl.load(b_ptr + base + n * H, mask=live, other=0.0)
        E = tl.exp2(tl.where(i >= j, b_row[:, None] - b_row[None, :], 0.0))
        q_terms = tl.zeros([C, C], tl.float32)
        k_terms = tl.zeros([C, C], tl.float32)
    for first in range(0, K, BK):
        col = (first + tl.arange(0, BK))[None, :]
        inside = live[:, None] & (col < K)
        at = i * (H * K) + col
        q = load_feature(q_ptr + base * K, at, inside, q_inverse, FEATURE)
        k = load_feature(k_ptr + base * K, at, inside, k_inverse, FEATURE)
        dq = tl.load(dq_ptr + base * K + at, mask=inside, other=0.0)
        dk = tl.load(dk_ptr + base * K + at, mask=inside, other=0.0)
        if DECAY == "channel":
            dg = tl.load(dg_ptr + base * K + at, mask=inside, other=0.0)
            b = tl.load(b_ptr + at, mask=inside, other=0.0)
            for part in tl.static_range(2 if DELTA else 1):  # P, then A
                for level in range(LEVELS):
                    shift = LEVELS - 1 - level + LOWEST
                    E = level_factor(b, b_ptr, n, count, col, inside, shift, H, K)
                    # masked after the load, whose vectors would break into single elements
                    dX = tl.load(dscores_ptr + square if part == 0 else dA_ptr + square, mask=live[:, None], other=0.0)
                    dX = tl.where(level_mask(i, j, shift), dX, 0.0)
                    k_E = k * E
                    if part == 0:
                        row_part, col_part = score_products(dX, q * E, k_E, E, E, DT, PRECISION)
                        dq += row_part
                        shares = q * row_part
                    else:
                        row_part, col_part = score_products(dX, k_E * beta[:, None], k_E, E, E, DT, PRECISION)
                        dbeta += tl.sum(k * row_part, 1)
                        row_part *= beta[:, None]
                        dk += row_part
                        shares = k * row_part
                    dk += col_part
                    # rows lie in second halves, columns in first halves: one tile holds the shares of both
                    shares += k * col_part
                    second = (i >> shift) % 2 == 1
                    steps = (i >> shift == j >> shift) & ((second & (j >= i)) | (~second & (j < i)))
                    dg += tl.dot(tl.where(steps, 1.0, 0.0), shares, input_precision=SHARES)
            if LOWEST > 0:
                x = segment_exponent(b, b_ptr, n, col, inside, H, K)
                left, right = tl.exp2(x), tl.exp2(-x)
                pairs = (i >> LOWEST == j >> LOWEST) & (i > j)
                shares = tl.zeros([C, BK], tl.float32)
                for part in tl.static_range(2 if DELTA else 1):
                    dX = tl.load(dscores_ptr + square if part == 0 else dA_ptr + square, mask=live[:, None], other=0.0)
                    dX = tl.where(pairs, dX, 0.0)
                    if part == 0:
                        row_part, col_part = score_products(dX, q * left, k * right, left, right, DT, PRECISION)
                        dq += row_part
                        shares += q * row_part
                    else:
                        k_left = k * left * beta[:, None]
                        row_part, col_part = score_products(dX, k_left, k * right, left, right, DT, PRECISION)
                        dbeta += tl.sum(k * row_part, 1)
                        row_part *= beta[:, None]
                        dk += row_part
                        shares += k * row_part
                    dk += col_part
                    shares -= k * col_part
                # The difference of rows and columns: a step's own term is at least e^-5 of those that cancel.
                within = (i >> LOWEST == j >> LOWEST) & (j >= i)
                dg += tl.dot(tl.where(within, 1.0, 0.0), shares, input_precision=SHARES)
            # The diagonal of P carries no decay: as a share it would cancel only up to rounding.
            dq += diagonal[:, None] * k
            dk += diagonal[:, None] * q
            tl.store(dg_ptr + base * K + at, dg, mask=inside)
        else:
            dX = tl.load(dscores_ptr + square, mask=live[:, None], other=0.0).to(tl.float32)
            if DECAY == "head":
                dX *= E
            row_part, col_part = score_products(dX, q, k, 1.0, 1.0, DT, PRECISION)
            dq += row_part
            dk += col_part
            if DELTA:
                dX = tl.load(dA_ptr + square, mask=live[:, None], other=0.0).to(tl.float32)
                if DECAY == "head":
                    dX *= E
                row_part, col_part = score_products(dX, k * beta[:, None], k, 1.0, 1.0, DT, PRECISION)
                dbeta += tl.sum(k * row_part, 1)
                dk += row_part * beta[:, None] + col_part
            if DECAY == "head":
                q_terms += multiply(q, tl.trans(k), DT, PRECISION)
                if DELTA:
                    k_terms += multiply(k, tl.trans(k), DT, PRECISION)
        tl.store(dq_ptr + base * K + at, dq, mask=inside)
        tl.store(dk_ptr + base * K + at, dk, mask=inside)
    if DECAY == "head":
        # the term of (i, j) goes to the steps j + 1 .. i: over i >= t by a product, over j < t by a sum
        terms = q_terms * tl.load(dscores_ptr + square, mask=live[:, None], other=0.0).to(tl.float32)
        if DELTA:
            terms += k_terms * tl.load(dA_ptr + square, mask=live[:, None], other=0.0).to(tl.float32) * beta[:, None]
        terms *= E
        terms = tl.dot(tl.where(j >= i, 1.0, 0.0), terms, input_precision=SHARES)
        dg = tl.load(dg_ptr + base + n * H, mask=live, other=0.0)
        dg += tl.sum(tl.where(j < i, terms, 0.0), 1)
        tl.store(dg_ptr + base + n * H, dg, mask=live)
    if DELTA:
        tl.store(dbeta_ptr + base + n * H, dbeta, mask=live)


@triton.jit
def feature_grad(x, dx, inverse, along, scale, FEATURE: tl.constexpr):
    """Gradient of a raw row [C, BK] from that of its map; `along` [C] is sum_K raw * dx for "l2"."""
    if FEATURE == "l2":
        # x -> scale r x with r = (sum x^2 + eps)^-1/2, dr/dx = -r^3 x
        return scale * inverse[:, None] * (dx - x * (along * inverse * inverse)[:, None])
    elif FEATURE == "elu1":
        return dx * tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    else:
        return scale * dx


@triton.jit(do_not_specialize=["row_tokens"])
def chunk_input_grad_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_ptr, bias_ptr, q_inverse_ptr, k_inverse_ptr, scale, lower_bound,
    dq_mapped_ptr, dk_mapped_ptr, dg_mapped_ptr, dbeta_mapped_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, dA_ptr, dbias_ptr,
    row_tokens, cu_ptr, owner_ptr, offset_ptr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    FEATURE: tl.constexpr, DECAY: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr, SIGMOID_BETA: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """From the gradients of mapped q, k, log decay and beta to those of the inputs; A_log and dt_bias: this chunk's share."""
    h = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    start, count = place(chunk, row_tokens, cu_ptr, owner_ptr, offset_ptr, C, PACKED)
    n = tl.arange(0, C)
    live = n < count
    base = start * H + h
    q_inverse = load_inverse(q_inverse_ptr, base + n * H, live, 1.0, FEATURE)
    k_inverse = load_inverse(k_inverse_ptr, base + n * H, live, 1.0, FEATURE)
    if DELTA:
        dbeta = tl.load(dbeta_mapped_ptr + base + n * H, mask=live, other=0.0)
        if SIGMOID_BETA:
            beta = tl.sigmoid(tl.load(beta_ptr + base + n * H, mask=live, other=0.0).to(tl.float32))
            dbeta *= beta * (1.0 - beta)
        tl.store(dbeta_ptr + base + n * H, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)
    if DECAY == "head":
        dg = tl.load(dg_mapped_ptr + base + n * H, mask=live, other=0.0)
        tl.store(dg_ptr + base + n * H, dg.to(dg_ptr.dtype.element_ty), mask=live)
    q_along = tl.zeros([C], tl.float32)
    k_along = tl.zeros([C], tl.float32)
    if FEATURE == "l2":
        for first in range(0, K, BK):
            col = (first + tl.arange(0, BK))[None, :]
            inside = live[:, None] & (col < K)
            at = base * K + n[:, None] * (H * K) + col
            q = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
            q_along += tl.sum(q * tl.load(dq_mapped_ptr + at, mask=inside, other=0.0), 1)
            k_along += tl.sum(k * tl.load(dk_mapped_ptr + at, mask=inside, other=0.0), 1)
    dA = tl.zeros([C], tl.float32)
    for first in range(0, K, BK):
        col = (first + tl.arange(0, BK))[None, :]
        inside = live[:, None] & (col < K)
        at = base * K + n[:, None] * (H * K) + col
        x = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dx = tl.load(dq_mapped_ptr + at, mask=inside, other=0.0)
        dx = feature_grad(x, dx, q_inverse, q_along, scale, FEATURE)
        tl.store(dq_ptr + at, dx.to(dq_ptr.dtype.element_ty), mask=inside)
        x = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dx = tl.load(dk_mapped_ptr + at, mask=inside, other=0.0)
        dx = feature_grad(x, dx, k_inverse, k_along, 1.0, FEATURE)
        tl.store(dk_ptr + at, dx.to(dk_ptr.dtype.element_ty), mask=inside)
        if DECAY == "channel":
            dg = tl.load(dg_mapped_ptr + at, mask=inside, other=0.0)
            bias = tl.load(bias_ptr + h * K + col, mask=col < K, other=0.0).to(tl.float32)
            A = tl.exp(tl.load(A_ptr + h).to(tl.float32))
            y = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias
            if GATE == "softplus":
                dy = -A * tl.sigmoid(y) * dg
                dlog = -A * softplus(y) * dg
            else:
                # sigmoid(-z), not 1 - sigmoid(z), which has no digits left where the gate is wide open
                dy = lower_bound * tl.sigmoid(A * y) * tl.sigmoid(-A * y) * A * dg
                dlog = tl.where(dy == 0.0, 0.0, y * dy)  # a gate shut by -inf
            tl.store(dg_ptr + at, dy.to(dg_ptr.dtype.element_ty), mask=inside)
            dbias = tl.sum(tl.where(inside, dy, 0.0), 0)
            at_bias = (wide(chunk) * H + h) * K + first + tl.arange(0, BK)
            tl.store(dbias_ptr + at_bias, dbias, mask=first + tl.arange(0, BK) < K)
            dA += tl.sum(tl.where(inside, dlog, 0.0), 1)
    if DECAY == "channel":
        tl.store(dA_ptr + wide(chunk) * H + h, tl.sum(dA, 0))


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial: Tensor | None,
    do: Tensor,
    dfinal: Tensor | None,
    chunks: Chunks,
    rule: Rule,
    sizes: Sizes,
    scale: float,
    lower_bound: float | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and the initial state; None for inputs that are None."""
    s, c, fp32 = sizes, chunks, torch.float32
    everywhere = {**s.where, **s.place}
    by_chunk = {**everywhere, **s.owner}
    mapping = {"q_inverse_ptr": c.q_inverse, "k_inverse_ptr": c.k_inverse, "scale": scale, "FEATURE": rule.feature}
    delta = {"DELTA": rule.delta, "SIGMOID_BETA": rule.sigmoid_beta}

    dd, dstates = s.empty(*v.shape), s.empty(s.chunks, s.H, s.K, s.V)
    dinitial = None if initial is None else s.empty(*initial.shape, dtype=initial.dtype)
    config = choose(chunk_state_grad_kernel, STATE_GRAD, s.key, s.device, kind=s.kind)
    launch(
        chunk_state_grad_kernel, (s.sequences * s.H * cdiv(s.V, config.constants["BV"]),), config, s.device,
        **everywhere, **s.products, q_ptr=c.q_out, k_ptr=c.k_out, w_ptr=c.w, b_ptr=c.b, scores_ptr=c.scores, do_ptr=do,
        dd_ptr=dd, dstates_ptr=dstates, dfinal_ptr=dfinal, dinitial_ptr=dinitial, K=s.K, V=s.V, DECAY=rule.decay,
        DELTA=rule.delta, BK=s.BK_ALL,
    )  # fmt: skip

    grid = (s.chunks * s.H,)
    dscores = s.empty(s.tokens, s.H, s.chunk)
    dA_part = dA = dbeta_mapped = dbeta = None
    dv = dd
    if rule.delta:
        dA_part, dA = s.empty(*dscores.shape, dtype=fp32), torch.empty_like(dscores)
        dbeta_mapped = s.empty(s.tokens, s.H, dtype=fp32)
        dv, dbeta = s.empty(*v.shape), s.empty(*beta.shape, dtype=beta.dtype)
    launch(
        chunk_value_grad_kernel, grid, choose(chunk_value_grad_kernel, VALUE_GRAD, s.key, s.device, kind=s.kind), s.device,
        **by_chunk, **s.products, **delta, v_ptr=v, beta_ptr=beta, u_ptr=c.u, d_ptr=c.d, inverse_ptr=c.inverse,
        do_ptr=do, dd_ptr=dd, dscores_ptr=dscores, dA_part_ptr=dA_part, dv_ptr=dv, dbeta_ptr=dbeta_mapped, V=s.V,
    )  # fmt: skip

    dq_mapped, dk_mapped = s.empty(*q.shape, dtype=fp32), s.empty(*q.shape, dtype=fp32)
    dg_mapped = None if c.b is None else s.empty(*c.b.shape, dtype=fp32)
    inputs = {"q_ptr": q, "k_ptr": k, "beta_ptr": beta}
    grads = {"dA_ptr": dA, "dq_ptr": dq_mapped, "dk_ptr": dk_mapped, "dg_ptr": dg_mapped, "dbeta_ptr": dbeta_mapped}
    launch(
        chunk_key_grad_kernel, grid, choose(chunk_key_grad_kernel, KEY_GRAD, s.key, s.device, kind=s.kind), s.device,
        **by_chunk, **s.products, **delta, **mapping, **inputs, **grads, dA_part_ptr=dA_part, b_ptr=c.b, w_ptr=c.w, d_ptr=c.d,
        inverse_ptr=c.inverse, states_ptr=c.states, dstates_ptr=dstates, do_ptr=do, dd_ptr=dd, K=s.K, V=s.V,
        DECAY=rule.decay, SHARES=s.solve,
    )  # fmt: skip
    launch(
        chunk_score_grad_kernel, grid, choose(chunk_score_grad_kernel, SCORE_GRAD, s.key, s.device, kind=s.kind), s.device,
        **by_chunk, **s.products, **delta, **mapping, **inputs, **grads, b_ptr=c.b, dscores_ptr=dscores, K=s.K,
        DECAY=rule.decay, LEVELS=s.levels, LOWEST=s.lowest, SHARES=s.solve,
    )  # fmt: skip

    dq, dk = s.empty(*q.shape), s.empty(*q.shape)
    dg = None if g is None else s.empty(*g.shape, dtype=g.dtype)
    channel = rule.decay == "channel"
    dA_log = s.empty(s.chunks, s.H, dtype=fp32) if channel else None
    dbias = s.empty(s.chunks, s.H * s.K, dtype=fp32) if channel else None
    launch(
        chunk_input_grad_kernel, grid, choose(chunk_input_grad_kernel, INPUT_GRAD, s.key, s.device), s.device,
        **by_chunk, **delta, **mapping, **inputs, g_ptr=g, A_ptr=A_log, bias_ptr=dt_bias,
        lower_bound=float(lower_bound or 0.0), dq_mapped_ptr=dq_mapped, dk_mapped_ptr=dk_mapped,
        dg_mapped_ptr=dg_mapped, dbeta_mapped_ptr=dbeta_mapped, dq_ptr=dq, dk_ptr=dk, dg_ptr=dg, dbeta_ptr=dbeta, dA_ptr=dA_log,
        dbias_ptr=dbias, K=s.K, DECAY=rule.decay, GATE=rule.gate,
    )  # fmt: skip
    if channel:
        dA_log, dbias = dA_log.sum(0).to(A_log.dtype), dbias.sum(0).to(dt_bias.dtype)
    return dq, dk, dv, dg, dbeta, dA_log, dbias, dinitial
