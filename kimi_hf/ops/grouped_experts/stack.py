"""Products with one expert of a stack of matrices, dense or packed, without a copy of the whole stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hf.ops.mxfp4 import unpack
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
    def experts(self) -> int:
        """E."""
        return self.tensors[0].shape[0]

    @property
    def rows(self) -> int:
        """out."""
        return self.tensors[0].shape[1]

    @property
    def columns(self) -> int:
        """in."""
        return self.tensors[0].shape[2] * (1 if len(self.tensors) == 1 else 2)

    def blocks(self, expert: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """(rows of `out`, matrix [rows, in] in `dtype`) of one expert."""
        if len(self.tensors) == 1:
            yield slice(None), self.tensors[0][expert].to(dtype)
            return
        yield from packed_blocks(*(tensor[expert] for tensor in self.tensors), dtype)


@dataclass(frozen=True)
class FetchedStack(Stack):
    """[E, out, in] of which an expert's matrix is fetched when it is asked for: `fetch(expert)` gives it as (dense,) or
    (packed, scale), anywhere; it is moved to `device` block by block and not kept."""

    tensors: tuple[Tensor, ...]  # none
    fetch: Callable[[int], tuple[Tensor, ...]]
    shape: tuple[int, int, int]
    device: torch.device

    @property
    def experts(self) -> int:
        return self.shape[0]

    @property
    def rows(self) -> int:
        return self.shape[1]

    @property
    def columns(self) -> int:
        return self.shape[2]

    def blocks(self, expert: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        tensors = self.fetch(expert)
        if len(tensors) == 1:
            yield slice(None), tensors[0].to(self.device, dtype)
        else:
            yield from packed_blocks(*(tensor.to(self.device) for tensor in tensors), dtype)


def packed_blocks(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(rows, matrix [rows, in] in `dtype`) of packed [out, in / 2], at most BLOCK elements dense at a time."""
    step = max(1, BLOCK // (2 * packed.shape[1]))
    for start in range(0, packed.shape[0], step):
        rows = slice(start, start + step)
        yield rows, unpack(packed[rows], scale[rows], dtype, check=False)


def multiply(x: Tensor, stack: Stack, experts: Rows, out: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """[n, out] with x[rows] W^T (`transposed`: [n, in] with x[rows] W) for each expert and its rows; into `out` if given.

    Neighbours with few rows go together. With several threads padded to the longest, as one batched product: its
    threads take an expert each and meet once, instead of sharing every thin product and waiting for each other. With
    one thread as torch's grouped product, which is the same loop without Python in it.
    """
    runs, together = ((member,) for member in experts), None
    if len(stack.tensors) == 1 and stack.tensors[0].dtype == x.dtype:
        if torch.get_num_threads() > 1:
            runs, together = neighbours(experts), _batched
        elif _torch_can_group(x, stack.tensors[0]):
            runs, together = thin_runs(experts, x.dtype), _grouped
    for run in runs:
        if len(run) == len(experts) > 1:
            result = together(x, stack.tensors[0], run, transposed)
            return result if out is None else out.copy_(result)
        if out is None:
            out = x.new_empty(x.shape[0], stack.columns if transposed else stack.rows)
        if len(run) > 1:
            out[_span(run)] = together(x, stack.tensors[0], run, transposed)
        else:
            expert, rows = run[0]
            (product_transposed if transposed else product)(x[rows], stack, expert, out=out[rows])
    return out


def thin_runs(experts: Rows, dtype: torch.dtype) -> Iterator[Rows]:
    """Runs of experts with at most THIN rows each; fp32 experts with FEW_ROWS stay alone where those are typical."""
    few = FEW_ROWS if dtype == torch.float32 and _span(experts).stop <= (FEW_ROWS + 1) * len(experts) else 0
    run: list[tuple[int, slice]] = []
    for expert, rows in experts:
        if few < rows.stop - rows.start <= THIN:
            run.append((expert, rows))
            continue
        if run:
            yield tuple(run)
            run = []
        yield ((expert, rows),)
    if run:
        yield tuple(run)


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


def _span(run: Rows) -> slice:
    return slice(run[0][1].start, run[-1][1].stop) if run else slice(0, 0)


def _batched(x: Tensor, weight: Tensor, run: Rows, transposed: bool) -> Tensor:
    counts = [rows.stop - rows.start for _, rows in run]
    longest = max(counts)
    place = torch.tensor([i * longest + j for i, count in enumerate(counts) for j in range(count)])
    padded = x.new_zeros(len(run) * longest, x.shape[1]).index_copy_(0, place, x[_span(run)])
    padded = padded.unflatten(0, (len(run), -1))
    matrices = weight[run[0][0] : run[-1][0] + 1]
    if transposed:
        result = torch.bmm(padded, matrices)
    elif longest <= FEW_ROWS and x.dtype == torch.float32:
        result = torch.bmm(matrices, padded.mT).mT
    else:
        result = torch.bmm(padded, matrices.mT)
    return result.flatten(0, 1).index_select(0, place)


def _grouped(x: Tensor, weight: Tensor, run: Rows, transposed: bool) -> Tensor:
    span, first = _span(run), run[0][0]
    ends: list[int] = []
    for expert, rows in run:
        ends += [ends[-1]] * (expert - first - len(ends)) if ends else []  # experts in between have no rows
        ends.append(rows.stop - span.start)
    matrices = weight[first : run[-1][0] + 1]
    offsets = torch.tensor(ends, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(x[span], matrices if transposed else matrices.mT, offs=offsets)


def _torch_can_group(x: Tensor, weight: Tensor) -> bool:
    """torch's grouped product (2.10 on) wants rows of whole 16 bytes, and on older versions such addresses too."""
    return (
        hasattr(torch.nn.functional, "grouped_mm")
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
        and weight.data_ptr() % 16 == 0
    )


def product(x: Tensor, stack: Stack, expert: int, out: Tensor) -> None:
    """out [n, out] = x [n, in] W^T."""
    few = x.shape[0] <= FEW_ROWS and x.dtype == torch.float32
    for rows, matrix in stack.blocks(expert, x.dtype):
        target = out if rows == slice(None) else out[:, rows]
        if few:
            target.copy_(torch.bmm(matrix.unsqueeze(0), x.mT.unsqueeze(0)).squeeze(0).mT)
        else:
            torch.mm(x, matrix.mT, out=target)


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
