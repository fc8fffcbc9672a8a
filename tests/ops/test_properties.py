"""What holds for every recurrent operation: the doors agree, nothing leaks, states carry, identities between the rungs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import softplus

from kimi_hf.ops.delta_rule import delta_rule
from kimi_hf.ops.kda import l2_normalize

from .recurrent import LENGTHS, OPERATIONS, PACKED, cut, make_inputs, relative, run, run_with_gradients

FAST = settings(max_examples=7, deadline=None, derandomize=True)


def assert_same(actual, expected, tolerance):
    for key, value in expected.items():
        assert relative(actual[key], value) < tolerance, key


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_doors_agree_at_every_length(operation, T):
    B, H, K, V = (1, 1, 8, 6) if T > 300 else (2, 2, 16, 12)
    inputs = make_inputs(operation, B, T, H, K, V)
    expected = run_with_gradients(operation, inputs, backend="reference")
    assert_same(run_with_gradients(operation, inputs, backend="eager"), expected, 2e-5)


@pytest.mark.parametrize("K, V", [(24, 60), (60, 24), (100, 100), (1, 3), (7, 1)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_doors_agree_at_every_head_size(operation, K, V):
    inputs = make_inputs(operation, 2, 70, 3, K, V, dtype=torch.float64)
    expected = run_with_gradients(operation, inputs, backend="reference", with_state=False)
    # One normalised channel is a sign: its gradient cancels to rounding noise.
    keys = [key for key in expected if K > 1 or key not in ("d_q", "d_k")]
    actual = run_with_gradients(operation, inputs, backend="eager", with_state=False)
    assert_same({k: actual[k] for k in keys}, {k: expected[k] for k in keys}, 1e-9)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_doors_agree_packed(operation):
    """Values and gradients, and equality with running every sequence alone."""
    bounds = torch.tensor(PACKED)
    N = len(PACKED) - 1
    inputs = make_inputs(operation, 1, PACKED[-1], 2, 16, 12, sequences=N)
    expected = run_with_gradients(operation, inputs, backend="reference", cu_seqlens=bounds)
    actual = run_with_gradients(operation, inputs, backend="eager", cu_seqlens=bounds)
    assert_same(actual, expected, 2e-5)
    for n, (start, end) in enumerate(zip(PACKED, PACKED[1:], strict=False)):
        alone = {name: x[n : n + 1] if name.startswith("initial") else x for name, x in inputs.items()}
        if start == end:
            assert torch.equal(actual["out1"][n], inputs["initial_state"][n])
            continue
        o, state, *_ = run(operation, cut(alone, slice(start, end)), backend="eager")
        assert relative(actual["out0"][:, start:end], o) < 2e-5
        assert relative(actual["out1"][n : n + 1], state) < 2e-5


@pytest.mark.parametrize("operation", OPERATIONS)
def test_packed_documents_do_not_see_each_other(operation):
    bounds = torch.tensor([0, 66, 100])
    inputs = make_inputs(operation, 1, 100, 2, 16, 12, sequences=2)
    before = run(operation, inputs, cu_seqlens=bounds)
    inputs["v"][:, :66] += 100
    inputs["initial_state"][0] -= 50
    after = run(operation, inputs, cu_seqlens=bounds)
    assert torch.equal(before[0][:, 66:], after[0][:, 66:])
    assert torch.equal(before[1][1], after[1][1])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bf16_is_the_fp32_result_rounded(operation):
    inputs = make_inputs(operation, 2, 130, 2, 16, 12, dtype=torch.bfloat16)
    inputs = {n: x.float() if n in ("A_log", "dt_bias") else x for n, x in inputs.items()}
    wide = {n: x.float() for n, x in inputs.items()}
    narrow, expected = run(operation, inputs, backend="eager"), run(operation, wide, backend="eager")
    assert narrow[0].dtype == torch.bfloat16 and narrow[1].dtype == torch.float32
    assert torch.equal(narrow[0], expected[0].bfloat16())
    assert torch.equal(narrow[1], expected[1])
    gradients = run_with_gradients(operation, inputs, backend="eager")
    reference = run_with_gradients(operation, inputs, backend="reference")
    for key, value in reference.items():
        assert gradients[key].dtype == value.dtype
        assert relative(gradients[key].float(), value.float()) < (1e-2 if value.dtype == torch.bfloat16 else 2e-5), key


@pytest.mark.parametrize("operation", OPERATIONS)
def test_outputs_do_not_depend_on_later_tokens(operation):
    """Bitwise, at positions inside a chunk, at its end and in the next one."""
    inputs = make_inputs(operation, 1, 150, 2, 16, 12)
    before = run(operation, inputs, backend="eager")[0]
    for t in (0, 15, 16, 63, 64, 100):
        changed = {n: x.clone() for n, x in inputs.items()}
        # The plain delta rule wants keys of length <= 1, write strengths in (0, 1) and log decays <= 0.
        scales = {"k": 0.25, "beta": 1, "g": -1} if operation.endswith("delta_net") else {}
        for name in {"q", "k", "v", "g", "beta"} & set(changed):
            noise = torch.rand_like(changed[name][:, t + 1 :])
            changed[name][:, t + 1 :] = scales.get(name, 100) * noise
        after = run(operation, changed, backend="eager")[0]
        assert torch.equal(before[:, : t + 1], after[:, : t + 1]), t


@pytest.mark.parametrize("T", [1, 3, 70])
@pytest.mark.parametrize("operation", OPERATIONS)
@torch.no_grad()
def test_state_in_place(operation, T):
    inputs = make_inputs(operation, 2, T, 2, 16, 12)
    kept = {n: x.clone() for n, x in inputs.items()}
    expected = run(operation, inputs, backend="eager")
    for name, x in inputs.items():
        assert torch.equal(x, kept[name]), f"{name} was overwritten"
    address = inputs["initial_state"].data_ptr()
    actual = run(operation, inputs, backend="eager", inplace_state=True)
    assert actual[1].data_ptr() == address
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("operation", ["kda", "gated_delta_net"])
def test_stepping_in_and_out_of_inference_mode(operation):
    """What stepping keeps between calls must not be tied to the mode in which it was made."""
    inputs = make_inputs(operation, 3, 2, 3, 8, 6)
    with torch.inference_mode():
        inside = run(operation, inputs)
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    with torch.no_grad():
        without = run(operation, leaves)
    for a, b in zip(inside, without, strict=True):
        assert torch.equal(a, b)
    run(operation, leaves)[0].sum().backward()


@pytest.mark.parametrize("operation", OPERATIONS)
@torch.no_grad()
def test_strided_inputs(operation):
    """Heads cut from a fused projection, and a transposed batch: same numbers as contiguous ones."""
    inputs = make_inputs(operation, 2, 70, 2, 16, 12)
    strided = dict(inputs)
    fused = torch.cat([inputs["q"], inputs["k"], inputs["v"]], -1)
    strided["q"], strided["k"], strided["v"] = fused.split([16, 16, 12], -1)
    if "beta" in inputs:
        strided["beta"] = inputs["beta"].transpose(0, 1).contiguous().transpose(0, 1)
    for actual, expected in zip(run(operation, strided), run(operation, inputs), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("operation", OPERATIONS)
@FAST
@given(st.integers(1, 139), st.booleans())
def test_a_sequence_may_be_split_anywhere(operation, at, gradients):
    """Carrying the state over a cut gives the same outputs; with gradients, the chunked path at short lengths too."""
    inputs = make_inputs(operation, 2, 140, 2, 8, 6, dtype=torch.float64)
    inputs["v"].requires_grad_(gradients)
    whole = run(operation, inputs)
    first = run(operation, cut(inputs, slice(0, at)))
    states = dict(zip(("initial_state", "initial_normalizer"), first[1:], strict=False))
    second = run(operation, cut(inputs, slice(at, None)) | states)
    assert relative(torch.cat([first[0], second[0]], 1), whole[0]) < 1e-12
    assert relative(second[1], whole[1]) < 1e-12


@pytest.mark.parametrize("operation", OPERATIONS)
@FAST
@given(st.permutations(range(5)), st.sampled_from([1, 20, 70]))
def test_permuting_rows_permutes_results(operation, order, T):
    inputs = make_inputs(operation, 5, T, 2, 8, 6)
    permuted = {n: x if n in ("A_log", "dt_bias") else x[order] for n, x in inputs.items()}
    for actual, expected in zip(run(operation, permuted), run(operation, inputs), strict=True):
        torch.testing.assert_close(actual, expected[order], atol=1e-6, rtol=1e-5)


@FAST
@given(st.lists(st.integers(0, 90), min_size=1, max_size=6))
def test_packing_equals_running_alone(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    T = int(bounds[-1])
    inputs = make_inputs("kda", 1, T, 2, 8, 6, sequences=len(lengths), dtype=torch.float64)
    o, state = run("kda", inputs, cu_seqlens=bounds)
    expected, expected_state = run("kda", inputs, cu_seqlens=bounds, backend="reference")
    assert relative(o, expected) < 1e-12 and relative(state, expected_state) < 1e-12


@FAST
@given(st.integers(1, 150), st.integers(1, 20), st.integers(1, 20))
def test_kda_with_equal_channels_is_gated_delta_net(T, K, V):
    inputs = make_inputs("kda", 1, T, 2, K, V, dtype=torch.float64)
    inputs["g"] = inputs["g"][..., :1].expand(1, T, 2, K).contiguous()
    inputs["dt_bias"] = inputs["dt_bias"].view(2, K)[:, :1].expand(2, K).reshape(-1)
    o, state = run("kda", inputs)
    g = -inputs["A_log"].exp() * softplus(inputs["g"][..., 0] + inputs["dt_bias"].view(2, K)[:, 0])
    expected, expected_state = delta_rule(
        l2_normalize(inputs["q"]),
        l2_normalize(inputs["k"]),
        inputs["v"],
        torch.sigmoid(inputs["beta"]),
        g=g,
        initial_state=inputs["initial_state"],
        output_final_state=True,
    )
    assert relative(o, expected) < 1e-12 and relative(state, expected_state) < 1e-12


@FAST
@given(st.integers(1, 150), st.floats(0.1, 2.0))
def test_a_gate_of_zero_is_delta_net(T, scale):
    inputs = make_inputs("delta_net", 2, T, 2, 8, 6, dtype=torch.float64)
    plain = delta_rule(**inputs, scale=scale, output_final_state=True)
    gated = delta_rule(**inputs, scale=scale, g=torch.zeros_like(inputs["beta"]), output_final_state=True)
    for actual, expected in zip(gated, plain, strict=True):
        assert relative(actual, expected) < 1e-13


def test_an_empty_row_passes_states_through():
    inputs = make_inputs("kda", 1, 0, 2, 8, 6, sequences=2)
    for backend in ("reference", "eager"):
        o, state = run("kda", inputs, cu_seqlens=torch.tensor([0, 0, 0]), backend=backend)
        assert o.shape == (1, 0, 2, 6) and torch.equal(state, inputs["initial_state"])
