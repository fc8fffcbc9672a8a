"""The Triton door of KDA, and the autograd function that the delta rules and linear attention share with it.

Training and prefill run the chunked kernels; what is saved for the backward is the inputs alone, the rest is computed
again from them. Few tokens without gradients run the recurrent kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_hf.ops.kda.kernels_backward import run_backward
from kimi_hf.ops.kda.kernels_forward import CHUNK, Rule, Sizes, run_chunks, run_output
from kimi_hf.ops.kda.kernels_recurrent import FEW_TOKENS, run_recurrent
from kimi_hf.ops.kernels_common import contiguous

SOFTPLUS = Rule("l2", "channel", "softplus", delta=True, sigmoid_beta=True)
BOUNDED = Rule("l2", "channel", "bounded", delta=True, sigmoid_beta=True)


@dataclass(frozen=True)
class Options:
    """The numbers of a call: scale of q, bound of the gate, dtype of the output, tokens a chunk."""

    scale: float
    lower_bound: float | None
    dtype: torch.dtype
    chunk: int


class _ChunkedRule(torch.autograd.Function):
    """Saves its inputs; the backward runs the first three forward kernels again."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, initial, rule, options, output_final, cu_seqlens):
        inputs = (q, k, v, g, beta, A_log, dt_bias, initial)
        ctx.save_for_backward(*inputs, cu_seqlens)
        ctx.rule, ctx.options = rule, options
        ctx.set_materialize_grads(False)
        final = _fresh_state(q, v, cu_seqlens) if output_final else None
        return _forward(inputs, final, rule, options, cu_seqlens), final

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        *inputs, cu_seqlens = ctx.saved_tensors
        rule, o = ctx.rule, ctx.options
        q, v = inputs[0], inputs[2]
        sizes = Sizes(q, v, rule, cu_seqlens, o.lower_bound, o.chunk)
        do = torch.zeros_like(v) if do is None else do.to(v.dtype)
        do, dfinal = contiguous(do, dfinal)
        chunks = run_chunks(*inputs, None, rule, sizes, o.scale, o.lower_bound, keep_inverse=True)
        grads = run_backward(*inputs, do, dfinal, chunks, rule, sizes, o.scale, o.lower_bound)
        return *grads, None, None, None, None


def _forward(inputs: tuple, final: Tensor | None, rule: Rule, o: Options, cu_seqlens: Tensor | None) -> Tensor:
    sizes = Sizes(inputs[0], inputs[2], rule, cu_seqlens, o.lower_bound, o.chunk)
    chunks = run_chunks(*inputs, final, rule, sizes, o.scale, o.lower_bound, keep_inverse=False)
    return run_output(chunks, sizes, o.dtype)


def _fresh_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    return torch.empty(sequences, *q.shape[2:], v.shape[3], dtype=torch.float32, device=q.device)


def run_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    rule: Rule,
    *,
    scale: float,
    lower_bound: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
    output_dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, V] in v.dtype (or `output_dtype`) and the final state [N, H, K, V] in fp32 or None, for any `Rule`.

    Values of another type than q's are computed in q's.
    """
    T = q.shape[1]
    options = Options(scale, lower_bound, output_dtype or v.dtype, chunk or CHUNK)
    inputs = tuple(contiguous(q, k.to(q.dtype), v.to(q.dtype), g, beta, A_log, dt_bias, initial_state))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        if inplace_state:  # the backward reads the state that is overwritten here
            inputs = (*inputs[:-1], initial_state.clone())
        outputs = _ChunkedRule.apply(*inputs, rule, options, output_final_state or inplace_state, cu_seqlens)
        return (outputs[0], initial_state.copy_(outputs[1].detach())) if inplace_state else outputs
    final = None
    if inplace_state and initial_state.is_contiguous():
        final = initial_state  # a program reads its part of the state before it writes it
    elif output_final_state or inplace_state:
        final = _fresh_state(q, v, cu_seqlens)
    if T <= (FEW_TOKENS if cu_seqlens is None else max(FEW_TOKENS, 2 * (cu_seqlens.numel() - 1))):
        o = run_recurrent(*inputs, final, rule, cu_seqlens, scale, lower_bound, options.dtype)
    else:
        o = _forward(inputs, final, rule, options, cu_seqlens)
    if inplace_state and final is not initial_state:
        final = initial_state.copy_(final)
    return o, final


def kda_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `kimi_hf.ops.kda.kda`."""
    return run_rule(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        SOFTPLUS if lower_bound is None else BOUNDED,
        scale=q.shape[-1] ** -0.5,
        lower_bound=lower_bound,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        inplace_state=inplace_state,
    )
