"""Products with MXFP4 matrices in Triton, dequantised in registers.

Two forms. `packed_gemv` for a few rows, each with a matrix of its own: bound by reading the packed bytes, 32-bit words
of eight codes at a time, one fp32 multiply-add a weight and one scale for 32 of them. `grouped_product` for rows sorted
by matrix: tiles of rows against dequantised tiles as matrix products. The output is formed transposed, W x^T, so that
the dequantised tile is the operand that tensor cores take from registers and few rows do not waste them.

The codes are the bits of fp32 numbers: sign at bit 31, the code's exponent and mantissa at bits 24..22 give the value
times 2^-126, subnormal for 0.5, exactly; one multiplication by 2^126 puts it right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.kernels_common import (
    Config,
    _Remembered,
    cdiv,
    choose,
    dot_dtype,
    fp32_precision,
    launch,
    next_power_of_2,
    wide,
)
from kimi_hf.ops.registered import registered

GEMV = (
    Config("n16w64_w4", {"BN": 16, "BW": 64}, num_warps=4, num_stages=2),
    Config("n8w128_w4", {"BN": 8, "BW": 128}, num_warps=4, num_stages=2),
    Config("n32w64_w8", {"BN": 32, "BW": 64}, num_warps=8, num_stages=2),
)
GROUPED = (
    Config("n128k64_w8", {"BN": 128, "BK": 64}, num_warps=8, num_stages=3),
    Config("n64k128_w4", {"BN": 64, "BK": 128}, num_warps=4, num_stages=3),
)
TRANSPOSED = (
    Config("i128o64_w8", {"BI": 128, "BO": 64}, num_warps=8, num_stages=2),
    Config("i64o64_w4", {"BI": 64, "BO": 64}, num_warps=4, num_stages=2),
    Config("i128o32_w8", {"BI": 128, "BO": 32}, num_warps=8, num_stages=2, suits=("fp32",)),
)
MOST_ROWS = 64  # of a tile
FEW_ROWS = 8  # up to here rows of one matrix are multiplied one by one
TWO_126 = tl.constexpr(2.0**126)


@triton.jit
def decode(code):
    """The E2M1 values of codes 0 .. 15 (uint32) in fp32."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * TWO_126


@triton.jit
def decode_scale(byte):
    """2^(byte - 127) in fp32, subnormal at 0, infinite at 255."""
    bits = byte.to(tl.uint32) << 23
    return tl.where(byte == 0, 0x00400000, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def load_tile(packed_ptr, scale_ptr, row, byte, inside, IN: tl.constexpr, BYTES: tl.constexpr):
    """Values of columns 2 * byte and of 2 * byte + 1, each [rows, BYTES] fp32: row [rows], byte [BYTES], from a matrix."""
    packed = tl.load(packed_ptr + row[:, None] * (IN // 2) + byte[None, :], mask=inside, other=0).to(tl.uint32)
    first = byte // 16  # 16 bytes share a scale
    scale = tl.load(scale_ptr + row[:, None] * (IN // 32) + first[None, :], mask=inside, other=127)
    factor = decode_scale(scale)
    return decode(packed & 15) * factor, decode(packed >> 4) * factor


@triton.jit
def packed_gemv_kernel(
    x_ptr, packed_ptr, scale_ptr, expert_ptr, y_ptr, experts, share,
    OUT: tl.constexpr, IN: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """y[p] = W[expert[p]] x[p // share] for one p and BN rows of W; `packed_ptr` to 32-bit words. No expert: nothing."""
    WORDS: tl.constexpr = IN // 8
    blocks: tl.constexpr = (OUT + BN - 1) // BN
    p = tl.program_id(0) // blocks
    row = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    expert = 0
    if expert_ptr is not None:
        expert = tl.load(expert_ptr + p)
    if (expert < 0) | (expert >= experts):
        return
    packed_ptr += wide(expert) * OUT * WORDS
    scale_ptr += wide(expert) * OUT * (IN // 32)
    x_ptr += wide(p // share) * IN
    total = tl.zeros([BN, BW // 4], tl.float32)
    for first in range(0, WORDS, BW):
        word = first + tl.arange(0, BW)
        inside = (row < OUT)[:, None] & (word < WORDS)[None, :]
        codes = tl.load(packed_ptr + row[:, None] * WORDS + word[None, :], mask=inside, other=0)
        codes = codes.to(tl.uint32, bitcast=True)
        part = tl.zeros([BN, BW], tl.float32)
        for i in tl.static_range(8):
            x = tl.load(x_ptr + word * 8 + i, mask=word < WORDS, other=0.0).to(tl.float32)
            part += decode((codes >> (4 * i)) & 15) * x[None, :]
        group = first // 4 + tl.arange(0, BW // 4)
        inside = (row < OUT)[:, None] & (group < IN // 32)[None, :]
        scale = tl.load(scale_ptr + row[:, None] * (IN // 32) + group[None, :], mask=inside, other=127)
        total += tl.sum(tl.reshape(part, [BN, BW // 4, 4]), 2) * decode_scale(scale)
    at = wide(p) * OUT + row
    tl.store(y_ptr + at, tl.sum(total, 1).to(y_ptr.dtype.element_ty), mask=row < OUT)


@triton.jit
def _tile_rows(tile, owner_ptr, offset_ptr, bound_ptr, BM: tl.constexpr):
    """The matrix of a tile of rows, its rows [BM], and the end of that matrix's rows."""
    expert = tl.load(owner_ptr + tile)
    first = tl.load(bound_ptr + expert) + (tile - tl.load(offset_ptr + expert)) * BM
    return expert, first + tl.arange(0, BM), tl.load(bound_ptr + expert + 1)


@triton.jit(do_not_specialize=["share"])
def grouped_product_kernel(
    x_ptr, gather_ptr, packed_ptr, scale_ptr, y_ptr, owner_ptr, offset_ptr, bound_ptr, share,
    OUT: tl.constexpr, IN: tl.constexpr, BM: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] for BM rows r of one matrix e and BN outputs. With `gather_ptr` row r is x[gather[r] // share]."""
    HALF: tl.constexpr = BK // 2
    blocks: tl.constexpr = (OUT + BN - 1) // BN
    expert, row, end = _tile_rows(tl.program_id(0) // blocks, owner_ptr, offset_ptr, bound_ptr, BM)
    real = row < end
    source = row
    if gather_ptr is not None:
        source = tl.load(gather_ptr + row, mask=real, other=0) // share
    source = source.to(tl.int64)
    out = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    packed_ptr += wide(expert) * OUT * (IN // 2)
    scale_ptr += wide(expert) * OUT * (IN // 32)
    y = tl.zeros([BN, BM], tl.float32)
    for first in range(0, IN, BK):
        col = first + tl.arange(0, BK)
        x = tl.load(x_ptr + source[:, None] * IN + col[None, :], mask=real[:, None] & (col < IN)[None, :], other=0.0)
        even, odd = tl.split(tl.reshape(x.to(DT), [BM, HALF, 2]))
        byte = first // 2 + tl.arange(0, HALF)
        inside = (out < OUT)[:, None] & (byte < IN // 2)[None, :]
        low, high = load_tile(packed_ptr, scale_ptr, out, byte, inside, IN, HALF)
        y += tl.dot(low.to(DT), tl.trans(even), input_precision=PRECISION)
        y += tl.dot(high.to(DT), tl.trans(odd), input_precision=PRECISION)
    at = row.to(tl.int64)[None, :] * OUT + out[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=real[None, :] & (out < OUT)[:, None])


@triton.jit
def grouped_transposed_kernel(
    g_ptr, packed_ptr, scale_ptr, x_ptr, owner_ptr, offset_ptr, bound_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, BM: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
    BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """x[r] = W[e]^T g[r] for BM rows r of one matrix e and BI of its inputs: the gradient of the product."""
    HALF: tl.constexpr = BI // 2
    blocks: tl.constexpr = (IN + BI - 1) // BI
    expert, row, end = _tile_rows(tl.program_id(0) // blocks, owner_ptr, offset_ptr, bound_ptr, BM)
    real = row < end
    first = (tl.program_id(0) % blocks) * BI
    byte = first // 2 + tl.arange(0, HALF)
    packed_ptr += wide(expert) * OUT * (IN // 2)
    scale_ptr += wide(expert) * OUT * (IN // 32)
    even = tl.zeros([BM, HALF], tl.float32)
    odd = tl.zeros([BM, HALF], tl.float32)
    for start in range(0, OUT, BO):
        out = start + tl.arange(0, BO)
        at = row.to(tl.int64)[:, None] * OUT + out[None, :]
        g = tl.load(g_ptr + at, mask=real[:, None] & (out < OUT)[None, :], other=0.0).to(DT)
        inside = (out < OUT)[:, None] & (byte < IN // 2)[None, :]
        low, high = load_tile(packed_ptr, scale_ptr, out, byte, inside, IN, HALF)
        even += tl.dot(g, low.to(DT), input_precision=PRECISION)
        odd += tl.dot(g, high.to(DT), input_precision=PRECISION)
    x = tl.reshape(tl.join(even, odd), [BM, BI])
    col = first + tl.arange(0, BI)
    at = row.to(tl.int64)[:, None] * IN + col[None, :]
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=real[:, None] & (col < IN)[None, :])


@dataclass(frozen=True)
class RowTiles:
    """Which rows belong to which matrix, in tiles of `size` rows; all on the device, nothing read back.

    bound int32 [E+1]: first sorted row of each matrix. offset int32 [E+1]: its first tile. owner int32 [limit]: a
    tile's matrix; tiles past the last real one are empty.
    """

    bound: Tensor
    offset: Tensor
    owner: Tensor
    size: int

    @classmethod
    def of(cls, bound: Tensor, rows: int) -> RowTiles:
        """From `bound`, for `rows` rows in all; `size` fits the average number of rows of a matrix."""
        experts = bound.numel() - 1
        size = min(MOST_ROWS, max(16, next_power_of_2(rows // experts)))
        limit = rows // size + min(experts, rows)
        offset = torch.zeros_like(bound)
        offset[1:] = ((bound[1:] - bound[:-1] + (size - 1)) // size).cumsum(0)
        tiles = torch.arange(limit, dtype=torch.int32, device=bound.device)
        owner = torch.searchsorted(offset, tiles, right=True, out_int32=True) - 1
        return cls(bound, offset, owner.clamp(max=experts - 1), size)


# (bound, rows) -> RowTiles; the products of one forward share them
row_tiles = _Remembered(RowTiles.of)


def _gemv(x: Tensor, packed: Tensor, scale: Tensor, expert: Tensor | None, rows: int) -> Tensor:
    E, OUT, IN = packed.shape[0], packed.shape[1], 2 * packed.shape[2]
    x = x.contiguous()
    y = torch.empty(rows, OUT, dtype=x.dtype, device=x.device)
    config = choose(packed_gemv_kernel, GEMV, f"{OUT}x{IN}", x.device)
    launch(
        packed_gemv_kernel, (rows * cdiv(OUT, config.constants["BN"]),), config, x.device,
        x_ptr=x, packed_ptr=packed.contiguous().view(torch.int32), scale_ptr=scale.contiguous(), expert_ptr=expert,
        y_ptr=y, experts=E, share=rows // max(1, len(x)), OUT=OUT, IN=IN,
    )  # fmt: skip
    return y


_gemv_operator = torch.library.custom_op(
    "kimi_hf::packed_gemv_triton",
    _gemv,
    mutates_args=(),
    schema="(Tensor x, Tensor packed, Tensor scale, Tensor? expert, SymInt rows) -> Tensor",
)
_gemv_operator.register_fake(lambda x, packed, scale, expert, rows: x.new_empty(rows, packed.shape[1]))


def packed_gemv(x: Tensor, packed: Tensor, scale: Tensor, expert: Tensor | None, rows: int) -> Tensor:
    """y [rows, out] with y[p] = W[expert[p]] x[p * len(x) // rows]; rows of no matrix stay unwritten. No gradients.

    x [N, in]; packed [E, out, in / 2], scale [E, out, in / 32] uint8; expert integer [rows], or None for matrix 0.
    """
    return (_gemv_operator if torch.compiler.is_compiling() else _gemv)(x, packed, scale, expert, rows)


def grouped_product(x: Tensor, packed: Tensor, scale: Tensor, bound: Tensor, gather: Tensor | None = None) -> Tensor:
    """y [rows, out], y[r] = W[e of r] x[r], or x[gather[r] * len(x) // rows] with `gather` integer [rows].

    bound int32 [E+1]: matrix e has the rows bound[e] .. bound[e+1] - 1; rows from bound[E] on stay unwritten.
    """
    OUT, IN = packed.shape[1], 2 * packed.shape[2]
    rows = len(x) if gather is None else len(gather)
    tiles = row_tiles(bound, rows)
    y = torch.empty(rows, OUT, dtype=x.dtype, device=x.device)
    config = choose(grouped_product_kernel, GROUPED, f"{x.dtype}/{OUT}x{IN}/M{tiles.size}", x.device)
    launch(
        grouped_product_kernel, (tiles.owner.numel() * cdiv(OUT, config.constants["BN"]),), config, x.device,
        x_ptr=x.contiguous(), gather_ptr=gather, packed_ptr=packed.contiguous(), scale_ptr=scale.contiguous(), y_ptr=y,
        owner_ptr=tiles.owner, offset_ptr=tiles.offset, bound_ptr=tiles.bound, share=rows // max(1, len(x)), OUT=OUT,
        IN=IN, BM=tiles.size, DT=dot_dtype(x.dtype), PRECISION=fp32_precision(x.device),
    )  # fmt: skip
    return y


def grouped_transposed(g: Tensor, packed: Tensor, scale: Tensor, bound: Tensor) -> Tensor:
    """x [rows, in], x[r] = W[e of r]^T g[r]."""
    OUT, IN = packed.shape[1], 2 * packed.shape[2]
    tiles = row_tiles(bound, len(g))
    x = torch.empty(len(g), IN, dtype=g.dtype, device=g.device)
    config = choose(
        grouped_transposed_kernel,
        TRANSPOSED,
        f"{g.dtype}/{OUT}x{IN}/M{tiles.size}",
        g.device,
        kind="fp32" if g.dtype == torch.float32 else "",
    )
    launch(
        grouped_transposed_kernel, (tiles.owner.numel() * cdiv(IN, config.constants["BI"]),), config, g.device,
        g_ptr=g.contiguous(), packed_ptr=packed.contiguous(), scale_ptr=scale.contiguous(), x_ptr=x,
        owner_ptr=tiles.owner, offset_ptr=tiles.offset, bound_ptr=tiles.bound, OUT=OUT, IN=IN, BM=tiles.size,
        DT=dot_dtype(g.dtype), PRECISION=fp32_precision(g.device),
    )  # fmt: skip
    return x


# (x [rows, in], packed, scale, bound) -> [rows, out], with a gradient for x; the matrices are constant.
packed_product = registered(
    "kimi_hf::packed_product_triton",
    schema="(Tensor x, Tensor packed, Tensor scale, Tensor bound) -> Tensor",
    forward=grouped_product,
    fake=lambda x, packed, scale, bound: x.new_empty(x.shape[0], packed.shape[1]),
    backward_schema="(Tensor g, Tensor packed, Tensor scale, Tensor bound) -> Tensor",
    backward=grouped_transposed,
    backward_fake=lambda g, packed, scale, bound: g.new_empty(g.shape[0], 2 * packed.shape[2]),
    remember=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
    differentiate=lambda ctx, backward, g: (backward(g, *ctx.saved_tensors), None, None, None),
)


def packed_matmul_triton(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """See `kimi_hf.ops.mxfp4.packed_matmul`."""
    rows = x.reshape(-1, x.shape[-1])
    packed, scale = packed[None], scale[None]
    if rows.shape[0] <= FEW_ROWS and not checks.needs_gradient(x):
        y = packed_gemv(rows, packed, scale, None, rows.shape[0])
    else:
        bound = torch.arange(2, dtype=torch.int32, device=x.device) * rows.shape[0]
        y = packed_product(rows, packed, scale, bound)
    return y.view(*x.shape[:-1], packed.shape[1])
