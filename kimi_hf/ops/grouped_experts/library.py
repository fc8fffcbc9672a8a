"""The grouped products as torch operators, so that a compiled graph holds each as one node.

`x` [P, in] is sorted by expert and `ends` [E] are the cumulative rows; rows past the last end come out as zeros. Inside,
each expert with rows is one product with its slice; the number of rows is read there, not in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hf.ops.grouped_experts.stack import Stack, product, product_transposed


@torch.library.custom_op("kimi_hf::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [P, in], weight [E, out, in] -> [P, out], row p times its expert's matrix transposed."""
    out = x.new_zeros(len(x), weight.shape[1])
    for expert, rows in _groups(ends):
        product(x[rows], Stack((weight,)), expert, out=out[rows])
    return out


@torch.library.custom_op("kimi_hf::grouped_outer", mutates_args=())
def grouped_outer(d: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """d [P, out], x [P, in] -> [E, out, in], the sum over each expert's rows of d x^T."""
    total = x.new_zeros(len(ends), d.shape[1], x.shape[1])
    for expert, rows in _groups(ends):
        torch.mm(d[rows].T, x[rows], out=total[expert])
    return total


@torch.library.custom_op("kimi_hf::grouped_linear_packed", mutates_args=())
def grouped_linear_packed(x: Tensor, packed: Tensor, scale: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """`grouped_linear` with an MXFP4 stack; `transposed` multiplies by the matrices themselves, [P, out] -> [P, in]."""
    stack = Stack((packed, scale))
    out = x.new_zeros(len(x), 2 * packed.shape[2] if transposed else packed.shape[1])
    for expert, rows in _groups(ends):
        (product_transposed if transposed else product)(x[rows], stack, expert, out=out[rows])
    return out


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _(d: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], d.shape[1], x.shape[1])


@grouped_linear_packed.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], 2 * packed.shape[2] if transposed else packed.shape[1])


def _save_dense(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _dense_backward(ctx, grad: Tensor):
    x, weight, ends = ctx.saved_tensors
    d_x = grouped_linear(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
    d_weight = grouped_outer(grad, x, ends) if ctx.needs_input_grad[1] else None
    return d_x, d_weight, None


def _save_packed(ctx, inputs, output) -> None:
    _, packed, scale, ends, ctx.transposed = inputs
    ctx.save_for_backward(packed, scale, ends)


def _packed_backward(ctx, grad: Tensor):
    return grouped_linear_packed(grad, *ctx.saved_tensors, not ctx.transposed), None, None, None, None


grouped_linear.register_autograd(_dense_backward, setup_context=_save_dense)
grouped_linear_packed.register_autograd(_packed_backward, setup_context=_save_packed)
