"""Under torch.compile and autocast: whole graphs, no recompilation by length or by step, the same numbers."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from kimi_hf.ops.gated_norm import gated_norm
from kimi_hf.ops.kda import kda
from kimi_hf.ops.short_conv import short_conv

from .recurrent import OPERATIONS, make_inputs, relative, run, run_with_gradients


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_graph_for_every_length(operation):
    names = list(make_inputs(operation, 1, 8, 2, 8, 6))
    fast = compiled(lambda *tensors: run(operation, dict(zip(names, tensors, strict=True))))
    with torch.no_grad():
        for T in (70, 100, 130):
            inputs = make_inputs(operation, 1, T, 2, 8, 6)
            for actual, expected in zip(fast(*inputs.values()), run(operation, inputs), strict=True):
                torch.testing.assert_close(actual, expected)
    assert counters["stats"]["unique_graphs"] <= 2  # the first length, then any length


def test_gradients_through_a_compiled_graph():
    inputs = make_inputs("kda_bounded", 1, 70, 2, 8, 6)
    names = list(inputs)
    leaves = [x.requires_grad_() for x in inputs.values()]
    results = []
    for wrap in (lambda f: f, compiled):
        o, state = wrap(lambda *tensors: run("kda_bounded", dict(zip(names, tensors, strict=True))))(*leaves)
        results.append(torch.autograd.grad(o.square().sum() + state.sum(), leaves))
    for actual, expected in zip(*results, strict=True):
        assert relative(actual, expected) < 1e-5


@torch.no_grad()
def test_a_decode_step_compiles_once_and_writes_in_place():
    def step(x, window, state, weight, norm, parameters):
        y, _ = short_conv(x["v"].flatten(2), weight, initial_state=window, inplace_state=True)
        o, _ = kda(
            x["q"], x["k"], y.view_as(x["v"]), x["g"], x["beta"], **parameters, initial_state=state, inplace_state=True
        )
        return gated_norm(o, norm, x["g"], eps=1e-5)

    weight, norm = torch.randn(16, 4), torch.rand(8)
    fast, states = compiled(step), [(torch.zeros(1, 16, 4), torch.zeros(1, 2, 8, 8)) for _ in range(2)]
    for turn in range(4):
        x = make_inputs("kda", 1, 1, 2, 8, 8)
        x = {n: y * (turn + 1) for n, y in x.items()}
        parameters = {n: x.pop(n) for n in ("A_log", "dt_bias")}
        results = [f(x, *s, weight, norm, parameters) for f, s in zip((step, fast), states, strict=True)]
        torch.testing.assert_close(*results)
    for plain, other in zip(*states, strict=True):
        torch.testing.assert_close(plain, other)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_registered_operators_are_sound(operation):
    """What torch can check of an operator: its schema, its fake implementation, its autograd registration."""
    inputs = list(make_inputs(operation, 1, 70, 2, 8, 6).values())
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    if operation.startswith("kda"):
        arguments = (torch.ops.kimi_hf.kda_chunked.default, (*inputs, None, None, True))
    elif operation.startswith("linear"):
        state = torch.cat([inputs[3], inputs[4][..., None]], -1)
        arguments = (torch.ops.kimi_hf.linear_attention_chunked.default, (*inputs[:3], state, None, True, True))
    else:
        gate = inputs[4] if operation == "gated_delta_net" else None
        arguments = (torch.ops.kimi_hf.delta_rule_chunked.default, (*inputs[:4], gate, inputs[-1], None, 1.0, True))
    torch.library.opcheck(*arguments, test_utils=checks)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_autocast_does_not_narrow(operation):
    inputs = make_inputs(operation, 1, 70, 2, 8, 6)
    expected = run_with_gradients(operation, inputs, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run_with_gradients(operation, inputs, backend="eager")
        short = run(operation, make_inputs(operation, 1, 1, 2, 8, 6))
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key
    for a, e in zip(short, run(operation, make_inputs(operation, 1, 1, 2, 8, 6)), strict=True):
        assert torch.equal(a, e)


def test_a_module_around_it_trains_under_autocast():
    projection = nn.Linear(8, 5 * 16)
    x = torch.randn(1, 20, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v, g, beta = projection(x).unflatten(-1, (5, 2, 8)).unbind(2)
        o, _ = kda(q, k, v, g, beta[..., 0], A_log=torch.zeros(2), dt_bias=torch.zeros(16))
    o.float().square().sum().backward()
    assert o.dtype == torch.bfloat16 and torch.isfinite(projection.weight.grad).all()
