"""Products with one expert of a stack of matrices, dense or packed, without a copy of the whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hf.ops.mxfp4.packed import PackedWeight

# Elements of a packed expert that are dense at a time.
BLOCK = 1 << 20
# Rows up to which an fp32 product is faster as matrix times columns, which reads the matrix at memory speed.
FEW_ROWS = 3


@dataclass(frozen=True)
class Stack:
    """[E, out, in] as (dense,) or (packed, scale)."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, weight: Tensor | PackedWeight) -> Stack:
        return cls((weight.packed, weight.scale) if isinstance(weight, PackedWeight) else (weight,))

    @property
    def rows(self) -> int:
        """out."""
        return self.tensors[0].shape[1]

    def blocks(self, expert: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """(rows of `out`, matrix [rows, in] in `dtype`) of one expert."""
        if len(self.tensors) == 1:
            yield slice(None), self.tensors[0][expert].to(dtype)
            return
        packed = PackedWeight(*self.tensors)
        step = max(1, BLOCK // packed.shape[2])
        for start in range(0, self.rows, step):
            rows = slice(start, start + step)
            yield rows, packed.dense(expert, rows, dtype)


def product(x: Tensor, stack: Stack, expert: int, out: Tensor) -> None:
    """out [n, out] = x [n, in] W^T."""
    for rows, matrix in stack.blocks(expert, x.dtype):
        if len(x) <= FEW_ROWS and x.dtype == torch.float32:
            out[:, rows] = torch.bmm(matrix[None], x.T[None])[0].T
        else:
            torch.mm(x, matrix.T, out=out[:, rows])


def product_transposed(d: Tensor, stack: Stack, expert: int, out: Tensor) -> None:
    """out [n, in] = d [n, out] W."""
    for i, (rows, matrix) in enumerate(stack.blocks(expert, d.dtype)):
        if i:
            out.addmm_(d[:, rows], matrix)
        else:
            torch.mm(d[:, rows], matrix, out=out)


def add_gradient(total: Tensor, d: Tensor, x: Tensor) -> None:
    """total [out, in] += d^T x, for d [n, out] and x [n, in]."""
    if total.dtype == d.dtype:
        total.addmm_(d.T, x)
    else:
        total += d.T @ x
