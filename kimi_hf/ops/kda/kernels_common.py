"""Pieces that the chunked kernels share: where a chunk lies, how q and k are read, the level scheme of the scores.

**Levels.** Inside a chunk of C tokens the score of (i, j), i > j, carries exp(b_i - b_j) per channel, b the cumulative log
decay. The pairs of a chunk are split by halving: on the level with half-segments of `half` tokens, i lies in the second
half and j in the first half of one segment of 2 * half tokens. With r the last token of the first half,
exp(b_i - b_j) = exp(b_i - b_r) exp(b_r - b_j), both factors at most 1, and for token n of the segment the factor is
exp(-|b_n - b_r|) whichever half it lies in: one scaled tile E * k and one product of it with itself per level, masked.
Nothing overflows for any decay. log2(C) levels reach every pair. For bf16 activations and a gate bounded by -5 the last four
levels are replaced by one product inside segments of 16 tokens relative to their first: exponents stay within 75, inside
the range of bf16 and fp32. (fp32 operands keep the levels: three tf32 products would lose the low part of e^-75.)
Every anchor lies before the rows it scales, so an output never depends on later tokens, not even in its last bit.

Log decays are held in base 2 (`b` below), so that exp is one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops.kernels_common import _Remembered, wide

LOG2E = tl.constexpr(1.4426950408889634)
SEGMENT = tl.constexpr(16)  # tokens whose decays one product may span when the gate is bounded
SEGMENT_BOUND = -5.0
SEGMENT_DTYPES = (torch.bfloat16,)


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
    """First token of `chunk` in the line of all tokens (int64) and how many it has (int32).

    The count is 0 for the unused chunks of a packed row. Inside a chunk offsets fit into 32 bits, so kernels add them
    to pointers moved to the chunk's first token.
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
    return start, tl.minimum(tl.maximum(end - start, 0), C).to(tl.int32)


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
def sequence_of(n, row_tokens, cu_ptr, PACKED: tl.constexpr):
    """First token of sequence n in the line of all tokens and the token after its last (int64)."""
    if PACKED:
        begin, end = tl.load(cu_ptr + n).to(tl.int64), tl.load(cu_ptr + n + 1).to(tl.int64)
    else:
        begin, end = wide(n) * row_tokens, (wide(n) + 1) * row_tokens
    return begin, end


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
def level_mask(i, j, shift):
    """[C, C] pairs of the level with half-segments of 2^shift: i in the second half of a segment, j in its first."""
    return (i >> (shift + 1) == j >> (shift + 1)) & ((i >> shift) % 2 == 1) & ((j >> shift) % 2 == 0)


@triton.jit
def level_factor(b, b_ptr, n, count, col, inside, shift, H: tl.constexpr, K: tl.constexpr):
    """E [C, BK] of a level: exp2(-|b_n - b_r|), r the last token of the first half of n's segment (or the last token).

    b_ptr points to the chunk's first token and head; n [C], col [1, BK].
    """
    r = tl.minimum(((n >> (shift + 1)) << (shift + 1)) + (1 << shift) - 1, count - 1)
    anchor = tl.load(b_ptr + r[:, None] * (H * K) + col, mask=inside, other=0.0)
    return tl.exp2(-tl.abs(b - anchor))


@triton.jit
def segment_exponent(b, b_ptr, n, col, inside, H: tl.constexpr, K: tl.constexpr):
    """b_n - b_s [C, BK], s the first token of n's segment of 16; 0 where masked."""
    s = (n // SEGMENT) * SEGMENT
    anchor = tl.load(b_ptr + s[:, None] * (H * K) + col, mask=inside, other=0.0)
    return tl.where(inside, b - anchor, 0.0)


@triton.jit
def multiply(a, b, DT: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b with operands of type DT and fp32 sums; fp32 operands by the named precision."""
    return tl.dot(a.to(DT), b.to(DT), input_precision=PRECISION)


@triton.jit
def invert_unit_lower(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for A [C, C] fp32, strictly lower triangular, C = 16 * 2^n.

    The diagonal blocks of 16 by forward substitution in fp32, all at once, row by row; then pairs of inverted blocks
    are joined, M <- M - M L M with L the part of A below the diagonal that a pair of them encloses, until one is left.
    """
    BLOCKS: tl.constexpr = C // 16
    I = tl.arange(0, BLOCKS)[:, None, None, None]
    J = tl.arange(0, BLOCKS)[None, None, :, None]
    D = -tl.sum(tl.where(I == J, tl.reshape(A, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)  # [BLOCKS, 16, 16]
    r = tl.arange(0, 16)[None, :, None]
    S = D
    for x in range(2, 16):
        rows = tl.sum(tl.where(r == x, D, 0.0), 1)  # row x of every block
        rows += tl.sum(rows[:, :, None] * S, 1)
        S = tl.where(r == x, rows[:, None, :], S)
    S += tl.where(r == tl.arange(0, 16)[None, None, :], 1.0, 0.0)
    M = tl.reshape(tl.where(I == J, S[:, :, None, :], 0.0), [C, C])
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for doubling in tl.static_range(4, 8):
        if (1 << doubling) < C:
            L = tl.where(level_mask(i, j, doubling), A, 0.0)
            ML = tl.dot(M, L, input_precision=PRECISION)
            M -= tl.dot(ML, M, input_precision=PRECISION)
    return M
