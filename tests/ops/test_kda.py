"""Kimi Delta Attention against the float64 goldens, under hostile decay, and at its edges."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kimi_hf.errors import BackendError, ShapeError
from kimi_hf.ops.kda import kda, kda_log_decay, l2_normalize

from .recurrent import make_inputs, relative, run, run_with_gradients

RAW = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
BACKENDS = ("reference", "eager")


def golden_run(data, tag, backend, lower_bound):
    """Outputs and gradients for one golden case, each with its expected value."""
    inputs = {n: data[f"{tag}.{n}"].clone().requires_grad_() for n in RAW if f"{tag}.{n}" in data}
    o, state = kda(**inputs, lower_bound=lower_bound, output_final_state=True, backend=backend)
    pairs = {"o": (o, data[f"{tag}.o"]), "final_state": (state, data[f"{tag}.final_state"])}
    if f"{tag}.grad_o" in data:
        torch.autograd.backward([o, state], [data[f"{tag}.grad_o"], data[f"{tag}.grad_final_state"]])
        pairs |= {f"d_{n}": (x.grad, data[f"{tag}.d_{n}"]) for n, x in inputs.items()}
    return pairs


def check(pairs):
    for name, (actual, expected) in pairs.items():
        assert relative(actual, expected) < (2e-5 if name.startswith("d_") else 2e-6), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_goldens(goldens, backend):
    data = load_file(goldens("kda_op/golden.safetensors"))
    for case in json.loads(goldens("kda_op/meta.json").read_text()):
        check(golden_run(data, case["tag"], backend, case["lower_bound"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_goldens_of_extreme_decay(goldens, backend):
    data = load_file(goldens("kda_op/golden_more.safetensors"))
    check(golden_run(data, "pinned", backend, -5.0))
    check(golden_run(data, "steep", backend, None))


@pytest.mark.parametrize("backend", BACKENDS)
def test_goldens_long_and_packed(goldens, backend):
    data = load_file(goldens("kda_op/golden_more.safetensors"))
    inputs = {name: data[f"long.{name}"] for name in RAW[:-1]}
    for gate, bound in (("bounded", -5.0), ("softplus", None)):
        o, state = kda(**inputs, lower_bound=bound, output_final_state=True, backend=backend)
        assert relative(o, data[f"long.{gate}.o"]) < 2e-6
        assert relative(state, data[f"long.{gate}.final_state"]) < 2e-6
    inputs = {name: data[f"packed.{name}"] for name in (*RAW, "cu_seqlens")}
    o, state = kda(**inputs, lower_bound=-3.0, output_final_state=True, backend=backend)
    assert relative(o, data["packed.o"]) < 2e-6
    assert relative(state, data["packed.final_state"]) < 2e-6


def test_log_decay_by_hand():
    """The two numbers the specification gives, and where each gate lies."""
    g, A_log = torch.tensor([[[0.25]]]), torch.log(torch.tensor([4.0]))
    bias = torch.tensor([0.5])
    assert abs(kda_log_decay(g, A_log, bias, -5.0).item() + 4.762871) < 1e-6
    assert abs(kda_log_decay(g, A_log, bias).item() + 4.547484) < 1e-6
    wide = kda_log_decay(torch.linspace(-90, 90, 7).view(-1, 1, 1), A_log, bias, -5.0)
    assert wide.min() >= -5 and wide.max() <= 0


def test_l2_normalize_is_finite_at_zero():
    x = torch.zeros(2, 3, requires_grad=True)
    l2_normalize(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    unit = l2_normalize(torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(unit, torch.tensor([0.6, 0.8]))


def inputs_with_decay(log_decay, T):
    """Softplus gates that decay by exactly `log_decay` (T,) in every channel: A = 1, softplus(y) = -log_decay."""
    inputs = make_inputs("kda", 1, T, 2, 16, 12, dtype=torch.float64)
    y = torch.log(torch.expm1(-log_decay.double().clamp(max=-1e-30)))
    inputs["g"] = y.view(1, T, 1, 1).expand(1, T, 2, 16).contiguous()
    inputs["A_log"], inputs["dt_bias"] = torch.zeros(2).double(), torch.zeros(32).double()
    return inputs


DECAYS = {
    "-8 everywhere": torch.full((130,), -8.0),
    "alternating 0 and -20": torch.tensor([-1e-30, -20.0]).repeat(65),
    "alternating -1e-7 and -20.37": torch.tensor([-1e-7, -20.37]).repeat(65),
    "-80 everywhere": torch.full((130,), -80.0),
    "none": torch.full((130,), -1e-30),
    "one wall": torch.cat([torch.full((64,), -1e-3), torch.full((1,), -60.0), torch.full((65,), -1e-3)]),
}


@pytest.mark.parametrize("name", DECAYS)
def test_any_decay_is_safe_and_exact(name):
    """Finite values and gradients, equal to the recurrence in float64, also where a split exponential overflows."""
    inputs = inputs_with_decay(DECAYS[name], 130)
    expected = run_with_gradients("kda", inputs, backend="reference")
    exact = run_with_gradients("kda", inputs, backend="eager")
    narrow = run_with_gradients("kda", {n: x.float() for n, x in inputs.items()}, backend="eager")
    for key, value in expected.items():
        assert torch.isfinite(narrow[key]).all(), key
        assert relative(exact[key], value) < 1e-10, key
        assert relative(narrow[key], value) < 2e-5, key


@pytest.mark.parametrize("level", [-60.0, 60.0])
def test_saturated_bounded_gate(level):
    inputs = make_inputs("kda_bounded", 1, 130, 2, 16, 12, dtype=torch.float64)
    inputs["g"] = torch.full_like(inputs["g"], level)
    expected = run_with_gradients("kda_bounded", inputs, backend="reference")
    narrow = run_with_gradients("kda_bounded", {n: x.float() for n, x in inputs.items()}, backend="eager")
    for key, value in expected.items():
        assert torch.isfinite(narrow[key]).all(), key
        # The slope of a closed gate is 1e-26 in float64 and 0 in float32.
        assert (narrow[key] - value).abs().max() <= max(1e-20, 2e-5 * value.abs().max().item()), key


@pytest.mark.parametrize("operation", ["kda", "kda_bounded"])
def test_gradcheck_every_input(operation):
    inputs = make_inputs(operation, 1, 6, 2, 3, 2, dtype=torch.float64)
    names = list(inputs)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def function(*tensors):
        return run(operation, dict(zip(names, tensors, strict=True)), backend="eager")

    assert torch.autograd.gradcheck(function, leaves)


def test_gradcheck_across_chunks_and_packed():
    bound = torch.tensor([0, 5, 5, 75])
    inputs = make_inputs("kda", 1, 75, 1, 2, 2, sequences=3, dtype=torch.float64)
    names = list(inputs)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def function(*tensors):
        return run("kda", dict(zip(names, tensors, strict=True)), backend="eager", cu_seqlens=bound)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_frozen_inputs_and_unused_outputs():
    """Gradients of some inputs only, through one output only."""
    inputs = make_inputs("kda", 2, 70, 2, 8, 8)
    v = inputs["v"].requires_grad_()
    o, state = run("kda", inputs, backend="eager")
    (only_o,) = torch.autograd.grad(o.sum(), v, retain_graph=True)
    (only_state,) = torch.autograd.grad(state.sum(), v, retain_graph=True)
    (both,) = torch.autograd.grad(o.sum() + state.sum(), v)
    torch.testing.assert_close(only_o + only_state, both, atol=1e-5, rtol=1e-5)


def test_backward_memory_is_linear_in_tokens():
    """What autograd keeps: the inputs themselves, and at most one state a chunk."""
    T, H, K = 1024, 2, 32
    inputs = {n: x.requires_grad_() for n, x in make_inputs("kda", 1, T, H, K, K).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        run("kda", inputs, backend="eager")
    own = {x.data_ptr() for x in inputs.values()}
    extra = sum(x.numel() for x in saved if x is not None and x.data_ptr() not in own)
    assert extra <= H * K * K * (T // 32 + 1)


BAD = {
    "q rank": (dict(q=torch.zeros(2, 3)), "q has shape"),
    "k shape": (dict(k=torch.zeros(1, 5, 2, 4)), "k has shape"),
    "v heads": (dict(v=torch.zeros(1, 5, 3, 8)), "v has shape"),
    "g shape": (dict(g=torch.zeros(1, 5, 2, 7)), "g has shape"),
    "beta shape": (dict(beta=torch.zeros(1, 5, 2, 1)), "beta has shape"),
    "A_log": (dict(A_log=torch.zeros(1, 1, 2, 1)), "A_log has shape"),
    "dt_bias": (dict(dt_bias=torch.zeros(2, 8)), "dt_bias has shape"),
    "bound": (dict(lower_bound=5.0), "lower_bound is 5.0"),
    "state shape": (dict(initial_state=torch.zeros(1, 2, 4, 8)), "initial_state has shape"),
    "state dtype": (dict(initial_state=torch.zeros(1, 2, 8, 8).bfloat16()), "initial_state is torch.bfloat16"),
    "integers": (dict(q=torch.zeros(1, 5, 2, 8, dtype=torch.long)), "expected a floating dtype"),
    "cu_seqlens end": (dict(cu_seqlens=torch.tensor([0, 4])), "number of tokens 5"),
    "cu_seqlens order": (dict(cu_seqlens=torch.tensor([0, 4, 2, 5])), "not decrease"),
    "cu_seqlens dtype": (dict(cu_seqlens=torch.tensor([0.0, 5.0])), "expected int"),
    "inplace without state": (dict(inplace_state=True), "needs initial_state"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    change, message = BAD[name]
    inputs = make_inputs("kda", 1, 5, 2, 8, 8)
    del inputs["initial_state"]
    with pytest.raises(ShapeError, match=message.replace("(", r"\(")):
        kda(**(inputs | change))


def test_more_errors():
    inputs = make_inputs("kda", 2, 5, 2, 8, 8)
    state = inputs.pop("initial_state")
    with pytest.raises(ShapeError, match="one packed row"):
        kda(**inputs, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ShapeError, match="takes part in gradients"):
        kda(**inputs, initial_state=state.clone().requires_grad_(), inplace_state=True)
    with pytest.raises(ShapeError, match="takes part in gradients"):
        kda(**(inputs | {"v": inputs["v"].clone().requires_grad_()}), initial_state=state, inplace_state=True)
    with pytest.raises(BackendError, match="no such backend"):
        kda(**inputs, backend="cuda")
