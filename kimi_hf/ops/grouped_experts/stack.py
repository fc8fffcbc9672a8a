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
# Rows up to which an expert is thin: its product is bound by reading the matrix, not by arithmetic.
THIN = 64

Rows = tuple[tuple[int, slice], ...]  # experts in rising order, each with its rows


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


def multiply(x: Tensor, stack: Stack, experts: Rows, out: Tensor, *, transposed: bool = False) -> None:
    """out[rows] = x[rows] W^T (`transposed`: x[rows] W) for each expert and its rows.

    With several threads neighbours with few rows go together, padded to the longest, as one batched product: its
    threads take an expert each and meet once, instead of sharing every thin product and waiting for each other.
    """
    together = torch.get_num_threads() > 1 and len(stack.tensors) == 1 and stack.tensors[0].dtype == x.dtype
    for run in neighbours(experts) if together else ((member,) for member in experts):
        if len(run) > 1:
            _batched(x, stack.tensors[0], run, out, transposed)
            continue
        expert, rows = run[0]
        (product_transposed if transposed else product)(x[rows], stack, expert, out=out[rows])


def neighbours(experts: Rows) -> Iterator[Rows]:
    """Runs of consecutive experts with at most THIN rows each, of which padding makes at most twice as many."""
    run: list[tuple[int, slice]] = []
    longest = total = 0
    for expert, rows in experts:
        count = rows.stop - rows.start
        longest, total = max(longest, count), total + count
        if run and (expert != run[-1][0] + 1 or longest > THIN or longest * (len(run) + 1) > 2 * total):
            yield tuple(run)
            run, longest, total = [], count, count
        run.append((expert, rows))
    if run:
        yield tuple(run)


def _batched(x: Tensor, weight: Tensor, run: Rows, out: Tensor, transposed: bool) -> None:
    span = slice(run[0][1].start, run[-1][1].stop)
    counts = [rows.stop - rows.start for _, rows in run]
    longest = max(counts)
    place = [i * longest + j for i, count in enumerate(counts) for j in range(count)]
    place = torch.tensor(place, device=x.device)
    padded = x.new_zeros(len(run) * longest, x.shape[1]).index_copy_(0, place, x[span])
    matrices = weight[run[0][0] : run[-1][0] + 1]
    result = torch.bmm(padded.view(len(run), longest, -1), matrices if transposed else matrices.mT)
    torch.index_select(result.flatten(0, 1), 0, place, out=out[span])


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
