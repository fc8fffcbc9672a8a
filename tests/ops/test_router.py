"""The router: goldens, doors, what the bias may and may not do, groups, gradients, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kimi_hf.errors import ShapeError
from kimi_hf.ops.router import route

DOORS = ("reference", "eager")
CASES = {
    "plain": {"top_k": 4},
    "scaled": {"top_k": 4, "scaling": 2.446},
    "raw": {"top_k": 4, "renormalize": False},
    "groups": {"top_k": 4, "num_groups": 4, "topk_groups": 2},
    "softmax": {"top_k": 4, "activation": "softmax"},
    "top1": {"top_k": 1},
}


@pytest.fixture
def golden(goldens):
    return load_file(goldens("module_ops/golden.safetensors"))


def ordered(indices, weights):
    indices, order = indices.sort(-1)
    return indices, weights.gather(1, order)


def inputs(tokens=50, experts=24, width=16, dtype=torch.float32):
    return torch.randn(tokens, width).to(dtype), torch.randn(experts, width).to(dtype), torch.randn(experts) / 4


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", CASES)
def test_golden(golden, door, case):
    hidden, weight, bias = golden["router.hidden"][0], golden["router.weight"], golden["router.correction_bias"]
    indices, weights, logits = route(hidden, weight, bias, **CASES[case], backend=door)
    indices, weights = ordered(indices, weights)
    assert indices.dtype == torch.int64 and weights.dtype == logits.dtype == torch.float32
    assert torch.equal(indices, golden[f"router.{case}.experts"])
    torch.testing.assert_close(weights, golden[f"router.{case}.weights"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("door", DOORS)
def test_bias_selects_and_never_weighs(door):
    """Field report: scores 0.50, 0.51, 0.30, 0.20 with bias 7.004, 6.990, 6, 6 choose the first expert."""
    scores = torch.tensor([0.50, 0.51, 0.30, 0.20])
    bias = torch.tensor([7.004, 6.990, 6.0, 6.0])
    arguments = torch.ones(1, 1), torch.logit(scores)[:, None], bias
    indices, weights, _ = route(*arguments, top_k=1, renormalize=False, backend=door)
    assert indices.item() == 0
    assert weights.item() == pytest.approx(0.5, abs=1e-6)
    _, weights, _ = route(*arguments, top_k=3, scaling=2.446, backend=door)
    assert weights.sum().item() == pytest.approx(2.446, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_doors_agree(case, dtype):
    hidden, weight, bias = inputs(dtype=dtype)
    results = [route(hidden, weight, bias, **CASES[case], backend=door) for door in DOORS]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for indices, weights, logits in results:
        assert weights.dtype == logits.dtype == wide and indices.shape == weights.shape
    torch.testing.assert_close(results[0][2], results[1][2])
    for a, b in zip(ordered(*results[0][:2]), ordered(*results[1][:2]), strict=True):
        torch.testing.assert_close(a, b)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_groups_limit_the_choice(data):
    groups = data.draw(st.integers(2, 5))
    size = data.draw(st.integers(1, 4))
    kept = data.draw(st.integers(1, groups - 1))
    top_k = data.draw(st.integers(1, kept * size))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    hidden, weight, bias = inputs(tokens=9, experts=groups * size)
    arguments = {"top_k": top_k, "num_groups": groups, "topk_groups": kept}
    (a, wa, _), (b, wb, _) = (route(hidden, weight, bias, **arguments, backend=door) for door in DOORS)
    (a, wa), (b, wb) = ordered(a, wa), ordered(b, wb)
    assert torch.equal(a, b)
    torch.testing.assert_close(wa, wb)
    assert all(len(set(row)) <= kept for row in (a // size).tolist())
    assert all(len(set(row)) == top_k for row in a.tolist())


def test_a_common_offset_of_the_bias_changes_nothing():
    hidden, weight, bias = inputs()
    bias = (bias * 256).round() / 256  # so that adding 64 is exact
    plain, shifted = (route(hidden, weight, b, top_k=4) for b in (bias, bias + 64.0))
    assert torch.equal(plain[0].sort(-1).values, shifted[0].sort(-1).values)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(door, case):
    hidden, weight, bias = inputs(tokens=5, experts=16, width=6, dtype=torch.float64)
    bias = bias.double().requires_grad_()

    def weights_and_logits(hidden, weight):
        _, weights, logits = route(hidden, weight, bias, **CASES[case], backend=door)
        return weights, logits

    assert torch.autograd.gradcheck(weights_and_logits, (hidden.requires_grad_(), weight.requires_grad_()))
    weights_and_logits(hidden, weight)[0].sum().backward()
    assert bias.grad is None


def test_low_precision_gradients_and_what_is_kept():
    hidden, weight, bias = inputs(dtype=torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()
    cotangent = torch.randn(50, 4)
    grads = []
    for door in DOORS:
        out = route(hidden, weight, bias, top_k=4, activation="softmax", backend=door)[1].sort(-1).values
        grads.append(torch.autograd.grad(out, (hidden, weight), cotangent))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        route(hidden, weight, bias, top_k=4)
    assert not any(t.dtype == torch.float32 and t.shape in (hidden.shape, weight.shape) for t in kept)


@pytest.mark.parametrize("door", DOORS)
def test_autocast_does_not_narrow(door):
    hidden, weight, bias = inputs()
    plain = route(hidden, weight, bias, top_k=4, backend=door)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = route(hidden, weight, bias, top_k=4, backend=door)
    assert torch.equal(plain[2], cast[2])


def test_traces_into_one_graph_and_serves_no_tokens():
    hidden, weight, bias = inputs()
    compiled = torch.compile(
        lambda h: route(h, weight, bias, top_k=4, num_groups=4, topk_groups=2), backend="aot_eager", fullgraph=True
    )
    for a, b in zip(compiled(hidden), route(hidden, weight, bias, top_k=4, num_groups=4, topk_groups=2), strict=True):
        torch.testing.assert_close(a, b)
    assert route(hidden[:0], weight, None, top_k=4)[0].shape == (0, 4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden": torch.randn(2, 3, 16)}, "hidden has shape"),
        ({"weight": torch.randn(24, 15)}, "weight has shape"),
        ({"bias": torch.randn(23)}, "bias has shape"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"top_k": 25}, "top_k is 25"),
        ({"top_k": 0}, "top_k is 0"),
        ({"num_groups": 5, "topk_groups": 2}, "24 experts in 5 groups"),
        ({"num_groups": 4, "topk_groups": 0}, "at least one kept group"),
        ({"num_groups": 6, "topk_groups": 1, "top_k": 5}, "between 1 and 4"),
        ({"hidden": torch.ones(2, 16, dtype=torch.long)}, "floating"),
    ],
)
def test_errors(changes, message):
    hidden, weight, bias = inputs()
    arguments = {"hidden": hidden, "weight": weight, "bias": bias, "top_k": 4} | changes
    with pytest.raises(ShapeError, match=message):
        route(**arguments)
