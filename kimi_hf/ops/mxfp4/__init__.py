"""MXFP4: two E2M1 codes a byte, one E8M0 scale for 32 consecutive input columns."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.errors import CheckpointError, ShapeError
from kimi_hf.ops import kernel_limits
from kimi_hf.ops.autocast import autocast_dtype, no_autocast
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["GROUP", "pack", "packed_matmul", "unpack", "unpack_rows"]

GROUP = 32  # input columns that share a scale
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
UNPACK = Operation(
    "mxfp4",
    Backend("reference", "kimi_hf.ops.mxfp4.reference", "unpack_reference"),
    Backend("eager", "kimi_hf.ops.mxfp4.eager", "unpack_eager"),
)
PACK = Operation(
    "mxfp4_pack",
    Backend("reference", "kimi_hf.ops.mxfp4.reference", "pack_reference"),
    Backend("eager", "kimi_hf.ops.mxfp4.eager", "pack_eager"),
)
MATMUL = Operation(
    "mxfp4_matmul",
    Backend("reference", "kimi_hf.ops.mxfp4.reference", "packed_matmul_reference"),
    Backend("eager", "kimi_hf.ops.mxfp4.eager", "packed_matmul_eager"),
    Backend("triton", "kimi_hf.ops.mxfp4.kernels", "packed_matmul_triton", kernel_limits.dtype),
)


def unpack(
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "weight",
    check: bool = True,
    backend: str | None = None,
) -> Tensor:
    """W[..., o, i] = code[o, i] * 2^(scale[o, i // 32] - 127), exactly: subnormals and -0 are kept.

    Codes: bit 3 is the sign, bits 2..0 index [0, 0.5, 1, 1.5, 2, 3, 4, 6]; byte j of a row holds column 2j in its low
    half and column 2j + 1 in its high half.

    Args:
        packed: [..., out, in / 2] uint8.
        scale: [..., out, in / 32] uint8.
        dtype: of the result. Exact in bf16, fp32 and fp64 (codes of 2 and more at scale 254 overflow bf16 and fp32 to
            infinity); fp16 rounds and overflows outside its range.
        name: the tensor's name, for messages.
        check: refuse scale byte 255. Without it 255 decodes to infinities (NaN for code 0), as compressed-tensors does.
        backend: None for automatic.
    Returns: [..., out, in] in `dtype`.
    Raises: ShapeError for shapes or dtypes, CheckpointError for scale byte 255 (NaN in E8M0).
    Source: kimi_k3.md 8; OCP microscaling formats 1.0.
    """
    check_packed(packed, scale, name)
    if dtype not in DTYPES:
        raise ShapeError(f"mxfp4: {name} is to be unpacked to {dtype}, expected one of {DTYPES}")
    if check:
        check_scale(scale, name)
    return UNPACK.pick(packed, backend)(packed, scale, dtype)


def unpack_rows(
    packed: Tensor,
    scale: Tensor,
    rows: Tensor | int | slice,
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "weight",
    backend: str | None = None,
) -> Tensor:
    """`unpack(packed[rows], scale[rows], dtype)`: only the chosen entries of the first axis (experts, or output rows).

    No check of scale bytes: this runs in every forward; `check_scale` belongs to loading.
    """
    return unpack(packed[rows], scale[rows], dtype, name=name, check=False, backend=backend)


def pack(weight: Tensor, *, scale: Tensor | None = None, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantise [..., out, in] to (packed [..., out, in / 2], scale [..., out, in / 32]), both uint8.

    The scale of a group is 2^(e - 2), where 2^e is the group's largest magnitude, rounded to bf16 and then down to a
    power of two unless its mantissa is 1.75 or more, then up; codes are the nearest value (ties to the even code),
    clipped to 6. A group of zeros gets scale byte 0. This is compressed-tensors' rule, byte for byte.

    Args:
        weight: any floating dtype; `in` divisible by 32; finite.
        scale: keep these scale bytes instead: packing what `unpack` gave with its own scales restores every byte.
        backend: None for automatic.
    Raises: ShapeError for shapes or dtypes or values that are not finite.
    """
    if not weight.is_floating_point() or weight.dim() < 1 or weight.shape[-1] % GROUP:
        raise ShapeError(
            f"mxfp4: weight to pack is {weight.dtype} {tuple(weight.shape)}, expected floating [..., out, in] with in "
            f"divisible by {GROUP}"
        )
    if not torch.isfinite(weight).all():
        raise ShapeError("mxfp4: weight to pack holds infinities or NaN, which MXFP4 cannot store; clean it first")
    if scale is not None:
        expected = (*weight.shape[:-1], weight.shape[-1] // GROUP)
        if scale.dtype != torch.uint8 or scale.shape != expected:
            raise ShapeError(f"mxfp4: scale is {scale.dtype} {tuple(scale.shape)}, expected uint8 {expected}")
    return PACK.pick(weight, backend)(weight, scale)


def packed_matmul(x: Tensor, packed: Tensor, scale: Tensor, *, backend: str | None = None) -> Tensor:
    """x W^T with W = unpack(packed, scale, x.dtype), dequantised in blocks of rows so that W never exists as a whole.

    Args:
        x: [..., in], differentiable; the packed weight is a constant.
        packed: [out, in / 2] uint8. scale: [out, in / 32] uint8.
    Returns: [..., out] in x.dtype (under autocast in autocast's).
    Raises: ShapeError for shapes or dtypes.
    """
    check_packed(packed, scale, "weight")
    if packed.dim() != 2 or x.shape[-1] != 2 * packed.shape[1] or x.dtype not in DTYPES:
        raise ShapeError(
            f"mxfp4: x is {x.dtype} {tuple(x.shape)} and packed {tuple(packed.shape)}, expected floating [..., in] and "
            "[out, in / 2]"
        )
    x = x.to(autocast_dtype(x))
    with no_autocast(x):
        return MATMUL.pick(x, backend)(x, packed, scale)


def check_packed(packed: Tensor, scale: Tensor, name: str) -> None:
    """Raise ShapeError unless packed and scale fit together."""
    expected = (*packed.shape[:-1], 2 * packed.shape[-1] // GROUP) if packed.dim() else ()
    if packed.dtype != torch.uint8 or packed.dim() < 2 or 2 * packed.shape[-1] % GROUP:
        raise ShapeError(
            f"mxfp4: {name}_packed is {packed.dtype} {tuple(packed.shape)}, expected uint8 [..., out, in / 2] with in "
            f"divisible by {GROUP}"
        )
    if scale.dtype != torch.uint8 or scale.shape != expected:
        raise ShapeError(
            f"mxfp4: {name}_scale is {scale.dtype} {tuple(scale.shape)}, expected uint8 {expected} for packed "
            f"{tuple(packed.shape)}"
        )


def check_scale(scale: Tensor, name: str) -> None:
    """Raise CheckpointError when a scale byte is 255, which means NaN."""
    bad = int((scale == 255).sum())
    if bad:
        first = tuple((scale == 255).nonzero()[0].tolist())
        raise CheckpointError(
            f"mxfp4: {name}_scale holds {bad} byte(s) 255 (first at {first}), which mean NaN, expected 0 to 254; the "
            "file is damaged or written by another convention: fetch or convert it again"
        )
