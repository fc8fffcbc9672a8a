"""MXFP4 in plain PyTorch: both nibbles and the scale by one table lookup, so no arithmetic that could flush."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from kimi_hf.ops.mxfp4.reference import GROUP, MAGNITUDES, scale_bytes, unpack_reference

# Bytes decoded at a time: the index of a piece (4 bytes for each, 1 MiB) stays in the second-level cache.
PIECE = 1 << 18
# Elements of W that `packed_matmul` holds dequantised at a time.
BLOCK = 1 << 20
_PAIR = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}


@cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256 * 256] integers, entry scale * 256 + byte: the bit patterns of the two values of `byte` side by side."""
    byte = torch.arange(256, dtype=torch.uint8, device=device).repeat(256, 1)[:, :, None]
    scale = torch.arange(256, dtype=torch.uint8, device=device)[:, None, None]
    codes = byte.expand(256, 256, GROUP // 2).contiguous()
    decoded = unpack_reference(codes, scale.expand(256, 256, 1).contiguous(), dtype)[..., :2].contiguous()
    return decoded.view(_PAIR[dtype]).view(-1)


def unpack_eager(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `kimi_hf.ops.mxfp4.unpack`."""
    if dtype not in _PAIR:
        return unpack_reference(packed, scale, dtype)
    if torch.compiler.is_compiling():
        return _unpack_by_arithmetic(packed, scale, dtype)
    table = _table(dtype, packed.device)
    rows, columns = packed.reshape(-1, packed.shape[-1]), packed.shape[-1]
    scales = scale.reshape(-1, scale.shape[-1])
    out = torch.empty(len(rows), columns, dtype=_PAIR[dtype], device=packed.device)
    step = max(1, PIECE // max(columns, 1))
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        index = rows[piece].to(torch.int32).view(-1, columns * 2 // GROUP, GROUP // 2)
        index.add_(scales[piece].to(torch.int32).unsqueeze(-1), alpha=256)
        torch.index_select(table, 0, index.view(-1), out=out[piece].view(-1))
    return out.view(dtype).view(*packed.shape[:-1], 2 * columns)


def _unpack_by_arithmetic(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in fp32 products, for graphs that a compiler fuses. Scale 0 is the subnormal 2^-127."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).int()
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device=packed.device)[codes]
    bits = torch.where(scale == 0, 1 << 22, scale.to(torch.int32) << 23)
    factor = bits.to(torch.int32).view(torch.float32)
    return (values.unflatten(-1, (-1, GROUP)) * factor.unsqueeze(-1)).flatten(-2).to(dtype)


def pack_eager(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `kimi_hf.ops.mxfp4.pack`: thresholds between neighbouring magnitudes, in pieces."""
    scale = scale_bytes(weight) if scale is None else scale
    columns = weight.shape[-1]
    rows, scales = weight.reshape(-1, columns), scale.reshape(-1, columns // GROUP)
    packed = torch.empty(len(rows), columns // 2, dtype=torch.uint8, device=weight.device)
    step = max(1, PIECE // max(columns, 1))
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        packed[piece] = _pack_piece(rows[piece], scales[piece])
    return packed.view(*weight.shape[:-1], columns // 2), scale


def _pack_piece(rows: Tensor, scales: Tensor) -> Tensor:
    # fp64 holds every bf16, fp16 and fp32 divided by any scale exactly
    scaled = rows.to(torch.float64).unflatten(-1, (-1, GROUP))
    scaled = (scaled * torch.exp2(127 - scales.double()).unsqueeze(-1)).flatten(-2)
    magnitude = scaled.abs()
    code = torch.zeros(rows.shape, dtype=torch.uint8, device=rows.device)
    # Midpoints of [0, 0.5, 1, 1.5, 2, 3, 4, 6]; a tie goes to the even code, so upwards where the upper code is even.
    for upper, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), start=1):
        code += magnitude > middle if upper % 2 else magnitude >= middle
    code += torch.signbit(scaled) * 8
    return code[..., 0::2] | code[..., 1::2] << 4


def packed_matmul_eager(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """See `kimi_hf.ops.mxfp4.packed_matmul`."""
    if torch.compiler.is_compiling():
        return linear(x, _unpack_by_arithmetic(packed, scale, x.dtype))
    return _PackedMatmul.apply(x, packed, scale)


class _PackedMatmul(torch.autograd.Function):
    """Saves the packed bytes only; the backward dequantises the same blocks again."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(packed, scale)
        out = torch.empty(*x.shape[:-1], packed.shape[0], dtype=x.dtype, device=x.device)
        for rows, block in _blocks(packed, scale, x.dtype):
            out[..., rows] = linear(x, block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        packed, scale = ctx.saved_tensors
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        d_x = torch.zeros(*grad.shape[:-1], 2 * packed.shape[1], dtype=wide, device=grad.device)
        for rows, block in _blocks(packed, scale, grad.dtype):
            d_x += grad[..., rows] @ block
        return d_x.to(grad.dtype), None, None


def _blocks(packed: Tensor, scale: Tensor, dtype: torch.dtype):
    step = max(1, BLOCK // (2 * packed.shape[1]))
    for start in range(0, packed.shape[0], step):
        rows = slice(start, start + step)
        yield rows, unpack_eager(packed[rows], scale[rows], dtype)
