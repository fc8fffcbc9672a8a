"""Absorbed latent attention for few queries in Triton: the latent cache is read as it lies, split over the sequence.

    q~ = W_UK^T q_n              one batched product (library)
    split pass                   per query, group of heads and range of keys: online softmax of
                                 scale (q~ . c_s + q_r . k_s), sum of P_s c_s in fp32
    merge pass                   the ranges' sums weighed by their softmax totals
    context = W_UV sum           one batched product (library)

The latent tile is loaded once and used twice, as keys and as values. A query that sees no key gets zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops.kernels_common import (
    Config,
    cdiv,
    choose,
    dot_dtype,
    fp32_precision,
    launch,
    next_power_of_2,
    on_hip,
    wide,
)

SPLIT = (
    Config("h32s32_w8", {"BH": 32, "BS": 32}, num_warps=8, num_stages=2),
    Config("h16s32_w4", {"BH": 16, "BS": 32}, num_warps=4, num_stages=2),
    Config("h64s32_w8", {"BH": 64, "BS": 32}, num_warps=8, num_stages=2),
    Config("h32s32_w4", {"BH": 32, "BS": 32}, num_warps=4, num_stages=1, suits=("hip",)),
    Config("h16s32_w8", {"BH": 16, "BS": 32}, num_warps=8, num_stages=1, suits=("fp32",)),
)
SLICE = 64  # of R, in the scores of fp32
MERGE = Config("w4", num_warps=4, num_stages=1)
PROGRAMS = 264  # wanted in the split pass: two for each of a large GPU's 132 processors
LEAST_KEYS = 128  # of a range


@triton.jit(do_not_specialize=["queries", "keys", "range_keys", "ranges", "mask_b", "mask_t", "mask_s"])
def latent_split_kernel(
    q_ptr, rope_ptr, latent_ptr, k_rope_ptr, mask_ptr, part_ptr, total_ptr, scale, lowest,
    queries, keys, range_keys, ranges, latent_b, latent_s, k_rope_b, k_rope_s, mask_b, mask_t, mask_s,
    A: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
    SLICE: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """part [ranges, B T, A, R]: normalised sums of one range of keys; total [ranges, B T, A]: its log2 softmax total."""
    groups: tl.constexpr = (A + BH - 1) // BH
    part = tl.program_id(0) % ranges
    group = tl.program_id(0) // ranges % groups
    row = tl.program_id(0) // ranges // groups  # b * T + t
    b, t = row // queries, row % queries
    head = group * BH + tl.arange(0, BH)
    r, p = tl.arange(0, BR), tl.arange(0, BP)
    at = wide(row) * A + head
    heads = head < A
    if SLICE == BR:
        q = tl.load(q_ptr + at[:, None] * R + r[None, :], mask=heads[:, None] & (r < R)[None, :], other=0.0).to(DT)
    if P > 0:
        rope_inside = heads[:, None] & (p < P)[None, :]
        q_rope = tl.load(rope_ptr + at[:, None] * P + p[None, :], mask=rope_inside, other=0.0).to(DT)
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    mixed = tl.zeros([BH, BR], tl.float32)
    first = part * range_keys
    last = tl.minimum(first + range_keys, keys)
    if CAUSAL:
        last = tl.minimum(last, keys - queries + t + 1)
    for start in range(first, last, BS):
        s = start + tl.arange(0, BS)
        visible = s < last
        at_c = wide(b) * latent_b + wide(s)[:, None] * latent_s + r[None, :]
        c = tl.load(latent_ptr + at_c, mask=visible[:, None] & (r < R)[None, :], other=0.0).to(DT)  # [BS, BR]
        if SLICE == BR:
            scores = tl.dot(q, tl.trans(c), input_precision=PRECISION)
        else:  # operands of fp32 do not fit the registers at once; both come from the cache slice by slice
            scores = tl.zeros([BH, BS], tl.float32)
            for r_first in range(0, R, SLICE):
                part_r = r_first + tl.arange(0, SLICE)
                at_q = at[:, None] * R + part_r[None, :]
                q_part = tl.load(q_ptr + at_q, mask=heads[:, None] & (part_r < R)[None, :], other=0.0)
                at_part = wide(b) * latent_b + wide(s)[:, None] * latent_s + part_r[None, :]
                c_part = tl.load(latent_ptr + at_part, mask=visible[:, None] & (part_r < R)[None, :], other=0.0)
                scores += tl.dot(q_part.to(DT), tl.trans(c_part.to(DT)), input_precision=PRECISION)
        if P > 0:
            k_inside = visible[:, None] & (p < P)[None, :]
            at_k = wide(b) * k_rope_b + wide(s)[:, None] * k_rope_s + p[None, :]
            k = tl.load(k_rope_ptr + at_k, mask=k_inside, other=0.0).to(DT)
            scores += tl.dot(q_rope, tl.trans(k), input_precision=PRECISION)
        scores *= scale
        if MASK == "bool":
            opened = tl.load(mask_ptr + wide(b) * mask_b + wide(t) * mask_t + wide(s) * mask_s, mask=visible, other=0)
            visible = visible & (opened != 0)
        elif MASK == "additive":
            bias = tl.load(
                mask_ptr + wide(b) * mask_b + wide(t) * mask_t + wide(s) * mask_s, mask=visible, other=lowest
            )
            visible = visible & (bias.to(tl.float32) > lowest)
            scores += tl.where(visible, bias.to(tl.float32), 0.0)[None, :]
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing visible yet
        keep = tl.exp(top - anchor)
        probabilities = tl.exp(scores - anchor[:, None])
        total = total * keep + tl.sum(probabilities, 1)
        mixed = mixed * keep[:, None] + tl.dot(probabilities.to(DT), c, input_precision=PRECISION)
        top = new_top
    seen = total > 0
    mixed = tl.where(seen[:, None], mixed / tl.where(seen, total, 1.0)[:, None], 0.0)
    rows = tl.num_programs(0) // (ranges * groups)
    at = (wide(part) * rows + row) * A + head
    tl.store(part_ptr + at[:, None] * R + r[None, :], mixed, mask=heads[:, None] & (r < R)[None, :])
    tl.store(total_ptr + at, tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf")), mask=heads)


@triton.jit(do_not_specialize=["rows", "ranges"])
def latent_merge_kernel(part_ptr, total_ptr, out_ptr, rows, ranges, R: tl.constexpr, BR: tl.constexpr):
    """out [rows, R] = sum over ranges of part, weighed by the softmax of their totals; rows = B T A."""
    row = tl.program_id(0)
    r = tl.arange(0, BR)
    top = float("-inf")
    weight = 0.0
    mixed = tl.zeros([BR], tl.float32)
    for part in range(0, ranges):
        at = wide(part) * rows + row
        score = tl.load(total_ptr + at)
        new_top = tl.maximum(top, score)
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep, add = tl.exp(top - anchor), tl.exp(score - anchor)
        mixed = mixed * keep + add * tl.load(part_ptr + at * R + r, mask=r < R, other=0.0)
        weight = weight * keep + add
        top = new_top
    mixed = tl.where(weight > 0, mixed / tl.where(weight > 0, weight, 1.0), 0.0)
    tl.store(out_ptr + wide(row) * R + r, mixed.to(out_ptr.dtype.element_ty), mask=r < R)


def latent_attention_triton(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b_weight: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    form: str | None,
    need_weights: bool,
) -> tuple[Tensor, None]:
    """See `kimi_hf.ops.latent_attention.latent_attention`; absorbed, without gradients, without weights."""
    B, T, A, n = q_nope.shape
    S, R = latent.shape[1:]
    up_key, up_value = kv_b_weight[:, :n], kv_b_weight[:, n:]  # [A, n, R], [A, v, R]
    absorbed = torch.matmul(q_nope.reshape(B * T, A, n).transpose(0, 1), up_key).transpose(0, 1)  # [B T, A, R]
    run = _operator if torch.compiler.is_compiling() else absorbed_attention
    mixed = run(absorbed.contiguous().view(B, T, A, R), q_rope, latent, k_rope, scale, mask, is_causal)
    context = torch.matmul(mixed.view(B * T, A, R).transpose(0, 1), up_value.mT).transpose(0, 1)
    return context.reshape(B, T, A, -1), None


def absorbed_attention(
    q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, scale: float, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """sum_s P_s c_s [B, T, A, R] for absorbed queries q [B, T, A, R]; the other arguments as `latent_attention`'s."""
    B, T, A, R = q.shape
    S, P, device = latent.shape[1], q_rope.shape[-1], q.device
    rows, BR = B * T, max(16, next_power_of_2(R))
    kind = "fp32" if q.dtype == torch.float32 else "hip" if on_hip() else ""
    config = choose(latent_split_kernel, SPLIT, f"{q.dtype}/R{R}", device, kind=kind)
    groups = cdiv(A, config.constants["BH"])
    ranges = max(1, min(cdiv(PROGRAMS, max(1, rows * groups)), cdiv(S, LEAST_KEYS)))
    range_keys = cdiv(cdiv(S, ranges), config.constants["BS"]) * config.constants["BS"]
    ranges = max(1, cdiv(S, range_keys)) if S else 1
    strides, kind, lowest = (0, 0, 0), None, 0.0
    if mask is not None:
        mask = mask.expand(B, 1, T, S)
        strides = (mask.stride(0), mask.stride(2), mask.stride(3))
        kind = "bool" if mask.dtype == torch.bool else "additive"
        lowest = 0.0 if kind == "bool" else torch.finfo(mask.dtype).min
        mask = mask.view(torch.uint8) if kind == "bool" else mask
    # slices of a longer buffer are read in place
    latent = latent if latent.stride(2) == 1 else latent.contiguous()
    k_rope = k_rope if P == 0 or k_rope.stride(2) == 1 else k_rope.contiguous()
    part = torch.empty(ranges, rows, A, R, dtype=torch.float32, device=device)
    total = torch.empty(ranges, rows, A, dtype=torch.float32, device=device)
    launch(
        latent_split_kernel, (rows * groups * ranges,), config, device,
        q_ptr=q.contiguous(), rope_ptr=q_rope.contiguous(), latent_ptr=latent, k_rope_ptr=k_rope,
        latent_b=latent.stride(0), latent_s=latent.stride(1), k_rope_b=k_rope.stride(0), k_rope_s=k_rope.stride(1),
        mask_ptr=mask, part_ptr=part, total_ptr=total, scale=scale, lowest=lowest,
        queries=T, keys=S, range_keys=range_keys, ranges=ranges, mask_b=strides[0], mask_t=strides[1],
        mask_s=strides[2], A=A, R=R, P=P, BR=BR, BP=max(16, next_power_of_2(P)),
        CAUSAL=mask is None and is_causal and T > 1, MASK=kind, DT=dot_dtype(q.dtype),
        PRECISION=fp32_precision(device), SLICE=min(SLICE, BR) if q.dtype == torch.float32 else BR,
    )  # fmt: skip
    mixed = torch.empty(B, T, A, R, dtype=q.dtype, device=device)
    launch(
        latent_merge_kernel, (rows * A,), MERGE, device,
        part_ptr=part, total_ptr=total, out_ptr=mixed, rows=rows * A, ranges=ranges, R=R,
        BR=next_power_of_2(R),
    )  # fmt: skip
    return mixed


_operator = torch.library.custom_op(
    "kimi_hf::absorbed_attention_triton",
    absorbed_attention,
    mutates_args=(),
    schema="(Tensor q, Tensor q_rope, Tensor latent, Tensor k_rope, float scale, Tensor? mask, bool is_causal) -> Tensor",
)
_operator.register_fake(lambda q, *others: torch.empty(q.shape, dtype=q.dtype, device=q.device))
