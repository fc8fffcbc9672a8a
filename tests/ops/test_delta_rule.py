"""DeltaNet and Gated DeltaNet against the float64 goldens, under hostile decay, and at their edges."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu, softplus

from kimi_hf.errors import ShapeError
from kimi_hf.ops.delta_rule import delta_rule
from kimi_hf.ops.kda import l2_normalize

from .recurrent import make_inputs, relative, run, run_with_gradients

RAW = ("q", "k", "v", "beta", "a", "A_log", "dt_bias", "initial_state")


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("model", ["delta_net", "gated_delta_net"])
def test_goldens(goldens, model, backend):
    """From raw projections: q, k = l2norm(silu(.)), beta = sigmoid(.), and the gate of Gated DeltaNet."""
    data = load_file(goldens("ladder_ops/golden.safetensors"))
    for T in (1, 7, 64, 130):
        tag = f"{model}.T{T}"
        raw = {n: data[f"{tag}.{n}"].clone().requires_grad_() for n in RAW if f"{tag}.{n}" in data}
        gate = None
        if "a" in raw:
            gate = -raw["A_log"].exp() * softplus(raw["a"] + raw["dt_bias"])
        o, state = delta_rule(
            l2_normalize(silu(raw["q"])),
            l2_normalize(silu(raw["k"])),
            raw["v"],
            torch.sigmoid(raw["beta"]),
            g=gate,
            initial_state=raw["initial_state"],
            output_final_state=True,
            backend=backend,
        )
        o.backward(data[f"{tag}.grad_o"])
        assert relative(o, data[f"{tag}.o"]) < 2e-6
        assert relative(state, data[f"{tag}.final_state"]) < 2e-6
        for name, x in raw.items():
            assert relative(x.grad, data[f"{tag}.d_{name}"]) < 2e-5, name


@pytest.mark.parametrize("decay", [(-8.0, -8.0), (0.0, -20.37), (-1e-7, -80.0), (0.0, 0.0)])
def test_any_decay_is_safe_and_exact(decay):
    inputs = make_inputs("gated_delta_net", 1, 130, 2, 16, 12, dtype=torch.float64)
    inputs["g"] = torch.tensor(decay).double().repeat(65).view(1, 130, 1).expand(1, 130, 2).contiguous()
    expected = run_with_gradients("gated_delta_net", inputs, backend="reference")
    exact = run_with_gradients("gated_delta_net", inputs, backend="eager")
    narrow = run_with_gradients("gated_delta_net", {n: x.float() for n, x in inputs.items()}, backend="eager")
    for key, value in expected.items():
        assert torch.isfinite(narrow[key]).all(), key
        assert relative(exact[key], value) < 1e-10, key
        assert relative(narrow[key], value) < 2e-5, key


def test_reflections_stay_stable():
    """beta = 2 with unit keys makes every step a reflection: nothing may grow over 300 of them."""
    inputs = make_inputs("delta_net", 1, 300, 2, 16, 12, dtype=torch.float64)
    inputs["beta"] = torch.full_like(inputs["beta"], 2.0)
    expected = run("delta_net", inputs, backend="reference")
    for actual, value in zip(
        run("delta_net", {n: x.float() for n, x in inputs.items()}, backend="eager"), expected, strict=True
    ):
        assert relative(actual, value) < 1e-4


@pytest.mark.parametrize("operation", ["delta_net", "gated_delta_net"])
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 4, 4, 7])])
def test_gradcheck_every_input(operation, cu_seqlens):
    sequences = None if cu_seqlens is None else 3
    inputs = make_inputs(operation, 1, 7, 1, 3, 2, sequences=sequences, dtype=torch.float64)
    names = list(inputs)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def function(*tensors):
        return run(operation, dict(zip(names, tensors, strict=True)), backend="eager", cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=cu_seqlens is not None)


def test_scale_defaults_to_what_the_papers_do():
    inputs = make_inputs("gated_delta_net", 1, 5, 2, 16, 8)
    gate, state = inputs.pop("g"), inputs.pop("initial_state")
    plain, _ = delta_rule(**inputs, initial_state=state)
    torch.testing.assert_close(plain, delta_rule(**inputs, initial_state=state, scale=1.0)[0])
    gated, _ = delta_rule(**inputs, g=gate, initial_state=state)
    torch.testing.assert_close(gated, delta_rule(**inputs, g=gate, initial_state=state, scale=0.25)[0])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=torch.zeros(1, 5, 2, 4)), "k has shape"),
        (dict(g=torch.zeros(1, 5, 2, 8)), "g has shape"),
        (dict(beta=torch.zeros(1, 5)), "beta has shape"),
        (dict(initial_state=torch.zeros(2, 2, 8, 8)), "initial_state has shape"),
        (dict(inplace_state=True), "needs initial_state"),
    ],
)
def test_bad_input_is_named(change, message):
    inputs = make_inputs("delta_net", 1, 5, 2, 8, 8)
    del inputs["initial_state"]
    with pytest.raises(ShapeError, match=message):
        delta_rule(**(inputs | change))
