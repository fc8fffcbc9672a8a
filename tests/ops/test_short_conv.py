"""The short convolution against the goldens, the windows it carries, and packed rows."""

import pytest
import torch
from safetensors.torch import load_file

from kimi_hf.errors import ShapeError
from kimi_hf.ops.short_conv import short_conv

BACKENDS = ("reference", "eager")


@pytest.mark.parametrize("backend", BACKENDS)
def test_goldens(goldens, backend):
    """From nothing, continued, and a prompt shorter than the window."""
    data = load_file(goldens("module_ops/golden.safetensors"))
    weight = data["short_conv.weight"]
    options = {"output_final_state": True, "backend": backend}
    y, state = short_conv(data["short_conv.x"], weight, **options)
    torch.testing.assert_close(y, data["short_conv.y"], atol=1e-6, rtol=1e-6)
    assert torch.equal(state, data["short_conv.state"])
    y, state = short_conv(data["short_conv.next_x"], weight, initial_state=state, **options)
    torch.testing.assert_close(y, data["short_conv.next_y"], atol=1e-6, rtol=1e-6)
    assert torch.equal(state, data["short_conv.next_state"])
    y, state = short_conv(data["short_conv.x"][:, :2], weight, **options)
    torch.testing.assert_close(y, data["short_conv.two_tokens_y"], atol=1e-6, rtol=1e-6)
    assert torch.equal(state, data["short_conv.two_tokens_state"])


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("T", [1, 3, 4, 9])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bounds", [None, "packed"])
def test_doors_agree(width, T, activation, bounds):
    """Values, windows and gradients, with and without a window before, in float64."""
    if bounds is not None:
        bounds = torch.tensor([0, 0, T // 2, T, T])
    N = 2 if bounds is None else 4
    x = torch.randn(2 if bounds is None else 1, T, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, width, dtype=torch.float64, requires_grad=True)
    before = torch.randn(N, 5, width, dtype=torch.float64, requires_grad=True)
    for state in (None, before):
        results = []
        for backend in BACKENDS:
            y, after = short_conv(
                x,
                weight,
                activation=activation,
                initial_state=state,
                output_final_state=True,
                cu_seqlens=bounds,
                backend=backend,
            )
            leaves = [x, weight] + ([] if state is None else [before])
            total = (y * torch.sin(torch.arange(y.numel()).view_as(y))).sum() + after.square().sum()
            results.append((y, after, *torch.autograd.grad(total, leaves, allow_unused=True)))
        for actual, expected in zip(*reversed(results), strict=True):
            torch.testing.assert_close(actual, expected)


def test_gradcheck():
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 1, 4, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def function(x, weight, state):
        return short_conv(x, weight, initial_state=state, output_final_state=True, backend="eager")

    assert torch.autograd.gradcheck(function, (x, weight, state))


@pytest.mark.parametrize("T", [1, 2, 9])
@torch.no_grad()
def test_window_in_place(T):
    x, weight = torch.randn(2, T, 6), torch.randn(6, 4)
    state = torch.randn(2, 6, 4)
    kept = state.clone()
    y, after = short_conv(x, weight, initial_state=state, output_final_state=True)
    assert torch.equal(state, kept)
    y_inplace, after_inplace = short_conv(x, weight, initial_state=state, inplace_state=True)
    assert after_inplace.data_ptr() == state.data_ptr()
    assert torch.equal(after_inplace, after) and torch.equal(y_inplace, y)


@torch.no_grad()
def test_token_by_token_equals_at_once():
    x, weight = torch.randn(2, 12, 6), torch.randn(6, 4)
    whole, window = short_conv(x, weight, output_final_state=True)
    state = torch.zeros(2, 6, 4)
    steps = [short_conv(x[:, t : t + 1], weight, initial_state=state, inplace_state=True)[0] for t in range(12)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert torch.equal(state, window)


def test_bf16_rounds_once():
    """One cast at the end: equal to the fp32 result rounded; the window holds the inputs as they came."""
    x, weight = torch.randn(2, 9, 6).bfloat16(), torch.randn(6, 4)
    y, state = short_conv(x, weight, output_final_state=True)
    expected, _ = short_conv(x.float(), weight)
    assert y.dtype == state.dtype == torch.bfloat16
    assert torch.equal(y, expected.bfloat16())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=torch.zeros(3, 4)), "x has shape"),
        (dict(weight=torch.zeros(5, 4)), "weight has shape"),
        (dict(activation="gelu"), "activation is 'gelu'"),
        (dict(initial_state=torch.zeros(2, 6, 3)), "initial_state has shape"),
        (dict(inplace_state=True), "needs initial_state"),
        (dict(cu_seqlens=torch.tensor([0, 9])), "one packed row"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"x": torch.zeros(2, 9, 6), "weight": torch.zeros(6, 4)} | change
    with pytest.raises(ShapeError, match=message):
        short_conv(arguments.pop("x"), arguments.pop("weight"), **arguments)
