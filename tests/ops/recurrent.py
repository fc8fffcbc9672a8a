"""What the tests of the recurrent operations share: random raw inputs, and runs that return values and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.ops.delta_rule import delta_rule
from kimi_hf.ops.kda import kda
from kimi_hf.ops.linear_attention import linear_attention

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 2048)
OPERATIONS = ("kda", "kda_bounded", "delta_net", "gated_delta_net", "linear_attention", "linear_attention_plain")
# Sequences of every kind: empty ones first, last and in the middle, single tokens, one short of a chunk, one over it.
PACKED = (0, 0, 3, 4, 4, 67, 132, 260, 260)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected entry."""
    if not expected.numel():
        return 0.0
    scale = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return ((actual.to(expected.dtype) - expected).abs().max() / scale).item()


def make_inputs(
    operation: str, B: int, T: int, H: int, K: int, V: int, *, sequences: int | None = None, dtype=torch.float32
) -> dict[str, Tensor]:
    """Random inputs of `run`, states included; drawn in fp64 so that every dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(B * 1000 + T * 7 + H + K + V)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    N = sequences or B
    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    if operation.startswith("kda"):
        inputs |= {"g": 2 * normal(B, T, H, K), "beta": normal(B, T, H)}
        inputs |= {"A_log": normal(H).abs(), "dt_bias": normal(H * K)}
    elif operation != "linear_attention" and operation != "linear_attention_plain":
        inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
        inputs["beta"] = torch.sigmoid(normal(B, T, H))
        if operation == "gated_delta_net":
            inputs["g"] = -2 * normal(B, T, H).abs()
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    states = {"initial_state": normal(N, H, K, V)}
    if operation.startswith("linear"):
        states["initial_normalizer"] = normal(N, H, K).abs() * 10
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    return inputs | {name: x.to(state_dtype) for name, x in states.items()}


def run(operation: str, inputs: dict[str, Tensor], *, backend=None, cu_seqlens=None, with_state=True, **options):
    """Outputs of an operation as a flat tuple: o, the final state, and the final normaliser if there is one."""
    inputs = dict(inputs)
    state, normalizer = inputs.pop("initial_state", None), inputs.pop("initial_normalizer", None)
    options |= {"output_final_state": True, "cu_seqlens": cu_seqlens, "backend": backend}
    if operation.startswith("linear"):
        options["initial_state"] = (state, normalizer) if with_state and state is not None else None
        o, final = linear_attention(**inputs, normalize=operation == "linear_attention", **options)
        return o, *final
    options["initial_state"] = state if with_state else None
    if operation.startswith("kda"):
        return kda(**inputs, lower_bound=-5.0 if operation == "kda_bounded" else None, **options)
    return delta_rule(**inputs, **options)


def run_with_gradients(operation: str, inputs: dict[str, Tensor], **options) -> dict[str, Tensor]:
    """Outputs and the gradients of every input for fixed random cotangents of all outputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outputs = run(operation, leaves, **options)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    used = {n: x for n, x in leaves.items() if options.get("with_state", True) or not n.startswith("initial")}
    gradients = torch.autograd.grad(outputs, list(used.values()), cotangents)
    named = {f"out{i}": x.detach() for i, x in enumerate(outputs)}
    return named | {f"d_{name}": x for name, x in zip(used, gradients, strict=True)}


def cut(inputs: dict[str, Tensor], tokens: slice, rows: slice = slice(None)) -> dict[str, Tensor]:
    """The inputs of some tokens and rows; parameters and states keep their tokens, states their rows."""
    per_token = {"q", "k", "v", "g", "beta"}
    result = {}
    for name, x in inputs.items():
        if name in per_token:
            x = x[rows, tokens]
        elif name.startswith("initial"):
            x = x[rows]
        result[name] = x
    return result
