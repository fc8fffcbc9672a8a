"""The definition of MXFP4, by arithmetic on codes and exponents."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops import checks

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127  # of the scale's exponent
GROUP = 32


def unpack_reference(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """See `kimi_hf.ops.mxfp4.unpack`. In fp64, where every finite product is exact, and cast once."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()  # low half first
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float64, device=packed.device)[codes]
    factor = torch.exp2(scale.double() - BIAS).masked_fill(scale == 255, float("inf"))
    return (values * factor.repeat_interleave(GROUP, dim=-1)).to(dtype)


def scale_bytes(weight: Tensor) -> Tensor:
    """E8M0 byte of each group of 32: see `kimi_hf.ops.mxfp4.pack`."""
    largest = weight.unflatten(-1, (-1, GROUP)).abs().amax(-1).to(torch.bfloat16)
    # a bf16 is sign, 8 exponent bits, 7 mantissa bits: adding a quarter carries into the exponent from 1.75 on
    exponent = (largest.view(torch.int16).to(torch.int32) + 32) >> 7
    return (exponent - 2).clamp_(0, 254).to(torch.uint8)


def pack_reference(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `kimi_hf.ops.mxfp4.pack`: the nearest of the eight magnitudes, by distance."""
    scale = scale_bytes(weight) if scale is None else scale
    scaled = weight.double() * torch.exp2(BIAS - scale.double()).repeat_interleave(GROUP, dim=-1)
    table = torch.tensor(MAGNITUDES, dtype=torch.float64, device=weight.device)
    distance = (scaled.abs().clamp(max=6.0).unsqueeze(-1) - table).abs()
    nearest = distance <= distance.amin(-1, keepdim=True)  # one code, or two neighbours at a tie
    code = torch.arange(8, device=weight.device)
    even_first = torch.where(nearest, code % 2, 2)
    codes = even_first.argmin(-1) + 8 * torch.signbit(scaled)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), scale


def packed_matmul_reference(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """See `kimi_hf.ops.mxfp4.packed_matmul`."""
    return x @ unpack_reference(packed, scale, checks.compute_dtype(x.dtype)).to(x.dtype).T
