"""Pieces that the chunked kernels share: where a chunk lies, how q and k are read, the level scheme of the scores.

**Levels.** Inside a chunk of C tokens the score of (i, j), i > j, carries exp(b_i - b_j) per channel, b the cumulative log
decay. The pairs of a chunk are split by halving: on the level with half-segments of `half` tokens, i lies in the second
half and j in the first half of one segment of 2 * half tokens. With r the last token of the first half,
exp(b_i - b_j) = exp(b_i - b_r) exp(b_r - b_j), both factors at most 1, and for token n of the segment the factor is
exp(-|b_n - b_r|) whichever half it lies in: one scaled tile E * k and one product of it with itself per level, masked.
Nothing overflows for any decay. log2(C) levels reach every pair; where the decay of one step is bounded (>= -5) the
last four are replaced by one product inside segments of 16 tokens relative to their middle, with exponents within 40.

Log decays are held in base 2 (`b` below), so that exp is one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops.kernels_common import _Remembered

LOG2E = tl.constexpr(1.4426950408889634)
MIDDLE = tl.constexpr(16)  # segment length of the bounded gate's middle scheme
BOUND_OF_MIDDLE = -5.0


class ChunkTables:
    """Where the chunks of packed sequences lie, built on the device.

    `offset` int32 [N+1]: chunks before sequence n. `owner` int32 [limit]: a chunk's sequence; `limit`, known to the
    host, is at least the number of chunks, and chunks past offset[N] are empty.
    """

    def __init__(self, cu_seqlens: Tensor, tokens: int, chunk: int):
        sequences = cu_seqlens.numel() - 1
        self.limit = tokens // chunk + sequences
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        counts = torch.div(lengths + (chunk - 1), chunk, rounding_mode="floor")
        self.offset = torch.zeros(sequences + 1, dtype=torch.int32, device=cu_seqlens.device)
        self.offset[1:] = counts.cumsum(0)
        chunks = torch.arange(self.limit, dtype=torch.int32, device=cu_seqlens.device)
        owner = torch.searchsorted(self.offset, chunks, right=True, out_int32=True) - 1
        self.owner = owner.clamp(max=sequences - 1)


chunk_tables = _Remembered(ChunkTables)


@triton.jit
def place(chunk, row_tokens, cu_ptr, owner_ptr, offset_ptr, C: tl.constexpr, PACKED: tl.constexpr):
    """First token and end of the sequence of `chunk`, as positions in the line of all tokens (int64).

    start >= end for the unused chunks of a packed row.
    """
    if PACKED:
        n = tl.load(owner_ptr + chunk)
        start = tl.load(cu_ptr + n).to(tl.int64) + (chunk - tl.load(offset_ptr + n)).to(tl.int64) * C
        end = tl.load(cu_ptr + n + 1).to(tl.int64)
    else:
        row_chunks = tl.cdiv(row_tokens, C)
        n = (chunk // row_chunks).to(tl.int64)
        start = n * row_tokens + (chunk % row_chunks) * C
        end = (n + 1) * row_tokens
    return start, end


@triton.jit
def chunks_of(n, row_tokens, offset_ptr, C: tl.constexpr, PACKED: tl.constexpr):
    """First chunk of sequence n and the chunk after its last."""
    if PACKED:
        first, last = tl.load(offset_ptr + n), tl.load(offset_ptr + n + 1)
    else:
        row_chunks = tl.cdiv(row_tokens, C)
        first, last = n * row_chunks, (n + 1) * row_chunks
    return first, last


@triton.jit
def feature(x, inverse, FEATURE: tl.constexpr):
    """The map in front of the rule, fp32: x [C, BK] raw; inverse [C], the inverse length (times the scale for q).

    "l2": unit length; "scale": x times `inverse`; "elu1": elu(x) + 1. Masked entries of x must be 0 (-inf for "elu1").
    """
    if FEATURE == "elu1":
        return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    else:
        return x * inverse[:, None]


@triton.jit
def load_feature(ptr, at, inside, inverse, FEATURE: tl.constexpr):
    """Rows of q or k through `feature`, 0 where masked."""
    if FEATURE == "elu1":
        x = tl.load(ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    return feature(x, inverse, FEATURE)


@triton.jit
def load_inverse(ptr, row, live, scale, FEATURE: tl.constexpr):
    """[C] factor of the rows for `feature`: scale times the stored inverse length, or the scale alone."""
    if FEATURE == "l2":
        return tl.load(ptr + row, mask=live, other=0.0) * scale
    else:
        return tl.where(live, scale, 0.0).to(tl.float32)


@triton.jit
def level_mask(i, j, half: tl.constexpr):
    """[C, C] pairs of the level: one segment of 2 * half tokens, i in its second half, j in its first."""
    return (i // (2 * half) == j // (2 * half)) & (i // half % 2 == 1) & (j // half % 2 == 0)


@triton.jit
def level_factor(b, b_ptr, i, live, start, end, at, stride, columns, half: tl.constexpr):
    """E [C, BK] of a level: exp2(-|b_n - b_r|), r the last token of the first half of n's segment (or the last token)."""
    r = tl.minimum(start + (i // (2 * half)) * (2 * half) + half - 1, end - 1)
    anchor = tl.load(b_ptr + r[:, None] * stride + at, mask=live[:, None] & columns, other=0.0)
    return tl.exp2(-tl.abs(b - anchor))


@triton.jit
def middle_exponent(b, b_ptr, i, live, start, end, at, stride, columns):
    """b_n - b_m [C, BK], m the middle token of n's segment of 16 (or the last token); 0 for tokens past the end."""
    m = tl.minimum(start + (i // MIDDLE) * MIDDLE + MIDDLE // 2 - 1, end - 1)
    anchor = tl.load(b_ptr + m[:, None] * stride + at, mask=live[:, None] & columns, other=0.0)
    return tl.where(live[:, None], b - anchor, 0.0)


@triton.jit
def multiply(a, b, DT: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b with operands of type DT and fp32 sums; fp32 operands by the named precision."""
    return tl.dot(a.to(DT), b.to(DT), input_precision=PRECISION)
