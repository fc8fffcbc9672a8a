"""The Triton door of KDA, and the differentiable function that the delta rules and linear attention share with it.

Training and prefill run the chunked kernels; what is saved for the backward is the inputs alone, the rest is computed
again from them. Few tokens without gradients run the recurrent kernel. In a compiled graph each is one operator.
"""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from kimi_hf.ops import checks
from kimi_hf.ops.kda.kernels_backward import run_backward
from kimi_hf.ops.kda.kernels_forward import CHUNK, FP32_CHUNK, Rule, Sizes, run_chunks, run_output
from kimi_hf.ops.kda.kernels_recurrent import FEW_TOKENS, run_recurrent
from kimi_hf.ops.kernels_common import contiguous
from kimi_hf.ops.registered import registered

SOFTPLUS = Rule("l2", "channel", "softplus", delta=True, sigmoid_beta=True)
BOUNDED = Rule("l2", "channel", "bounded", delta=True, sigmoid_beta=True)


def _forward(q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, *constants):
    final = _fresh_state(q, v, cu_seqlens)
    return _chunked(q, k, v, g, beta, A_log, dt_bias, initial, final, cu_seqlens, *constants), final


def _chunked(q, k, v, g, beta, A_log, dt_bias, initial, final, cu_seqlens, *constants):
    """o, with the final state written into `final` unless None; `constants` as in `_CONSTANTS`."""
    rule, scale, lower_bound, dtype, chunk = _unpack(constants)
    sizes = Sizes(q, v, rule, cu_seqlens, lower_bound, chunk)
    inputs = contiguous(q, k, v, g, beta, A_log, dt_bias, initial)
    chunks = run_chunks(*inputs, final, rule, sizes, scale, lower_bound, keep_inverse=False)
    return run_output(chunks, sizes, dtype)


def _backward(q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, do, dfinal, *constants):
    """Gradients of the eight tensors, empty ones for those that are None; the first three kernels run again."""
    rule, scale, lower_bound, _, chunk = _unpack(constants)
    sizes = Sizes(q, v, rule, cu_seqlens, lower_bound, chunk)
    inputs = contiguous(q, k, v, g, beta, A_log, dt_bias, initial)
    do = torch.zeros_like(v) if do is None else do.to(v.dtype).contiguous()
    chunks = run_chunks(*inputs, None, rule, sizes, scale, lower_bound, keep_inverse=True)
    dfinal = None if dfinal is None else dfinal.contiguous()
    grads = run_backward(*inputs, do, dfinal, chunks, rule, sizes, scale, lower_bound)
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def _recurrent(q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, *constants):
    final = _fresh_state(q, v, cu_seqlens)
    rule, scale, lower_bound, dtype, _ = _unpack(constants)
    inputs = contiguous(q, k, v, g, beta, A_log, dt_bias, initial)
    return run_recurrent(*inputs, final, rule, cu_seqlens, scale, lower_bound, dtype), final


def _unpack(constants: tuple) -> tuple[Rule, float, float | None, torch.dtype, int]:
    *rule, scale, lower_bound, dtype, chunk = constants
    return Rule(*rule), scale, lower_bound, dtype, chunk


def _fresh_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.empty(sequences, *q.shape[2:], v.shape[3], dtype=torch.float32, device=q.device)


def _fake(q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, *constants):
    return torch.empty(v.shape, dtype=constants[-2], device=v.device), _fresh_state(q, v, cu_seqlens)


def _backward_fake(q, k, v, g, beta, A_log, dt_bias, initial, *others):
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial)
    return tuple(q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)


def _remember(ctx, inputs, output):
    *tensors, cu_seqlens = inputs[:9]
    ctx.save_for_backward(*tensors, cu_seqlens)
    ctx.constants = inputs[9:]
    ctx.set_materialize_grads(False)  # a final state that nobody used has no gradient to read


def _differentiate(ctx, backward, do, dfinal):
    *tensors, cu_seqlens = ctx.saved_tensors
    grads = backward(*tensors, cu_seqlens, do, dfinal, *ctx.constants)
    given = (None if x is None else grad for x, grad in zip(tensors, grads, strict=True))
    return *given, *(None,) * (1 + len(ctx.constants))


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial, "
    "Tensor? cu_seqlens"
)
# the fields of `Rule`, then scale of q, bound of the gate, dtype of the output, tokens a chunk
_CONSTANTS = (
    "str feature, str? decay, str? gate, bool delta, bool sigmoid_beta, float scale, float? lower_bound, "
    "ScalarType dtype, int chunk"
)
_chunked_rule = registered(
    "kimi_hf::chunked_rule_triton",
    schema=f"({_TENSORS}, {_CONSTANTS}) -> (Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    backward_schema=f"({_TENSORS}, Tensor? do, Tensor? dfinal, {_CONSTANTS}) -> ({', '.join(['Tensor'] * 8)})",
    backward=_backward,
    backward_fake=_backward_fake,
    remember=_remember,
    differentiate=_differentiate,
)
_recurrent_rule = torch.library.custom_op(
    "kimi_hf::recurrent_rule_triton",
    _recurrent,
    mutates_args=(),
    schema=f"({_TENSORS}, {_CONSTANTS}) -> (Tensor, Tensor)",
)
_recurrent_rule.register_fake(_fake)


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
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, H, V] in v.dtype (or `output_dtype`) and the final state [N, H, K, V] in fp32 or None, for any `Rule`.

    Values of another type than q's are computed in q's.
    """
    chunk = FP32_CHUNK if q.dtype == torch.float32 else CHUNK
    constants = (*astuple(rule), scale, lower_bound, output_dtype or v.dtype, chunk)
    inputs = (q, k.to(q.dtype), v.to(q.dtype), g, beta, A_log, dt_bias, initial_state)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    few = q.shape[1] <= (FEW_TOKENS if cu_seqlens is None else max(FEW_TOKENS, 2 * sequences))
    needs_grad = checks.needs_gradient(*inputs)
    if needs_grad or torch.compiler.is_compiling():
        if needs_grad and inplace_state:  # the backward reads the state that is overwritten here
            inputs = (*inputs[:-1], initial_state.clone())
        run = _recurrent_rule if few and not needs_grad else _chunked_rule
        o, final = run(*inputs, cu_seqlens, *constants)
        if inplace_state:
            final = initial_state.copy_(final.detach())
        return o, final if output_final_state or inplace_state else None
    # Without gradients and without a compiler the state is updated where it lies.
    if inplace_state and initial_state.is_contiguous():
        final = initial_state  # a program reads its part of the state before it writes it
    else:
        final = _fresh_state(q, v, cu_seqlens) if output_final_state or inplace_state else None
    if few:
        o = run_recurrent(*contiguous(*inputs), final, rule, cu_seqlens, scale, lower_bound, constants[-2])
    else:
        o = _chunked(*inputs, final, cu_seqlens, *constants)
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
