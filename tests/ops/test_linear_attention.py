"""Linear attention against the float64 goldens and at its edges."""

import pytest
import torch
from safetensors.torch import load_file

from kimi_hf.errors import ShapeError
from kimi_hf.ops.linear_attention import linear_attention

from .recurrent import make_inputs, relative, run


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("T", [1, 7, 64, 130])
def test_goldens(goldens, T, backend):
    data = load_file(goldens("ladder_ops/golden.safetensors"))
    tag = f"linear_attention.T{T}"
    names = ("q", "k", "v", "initial_state", "initial_normalizer")
    raw = {n: data[f"{tag}.{n}"].clone().requires_grad_() for n in names}
    o, state, normalizer = run("linear_attention", raw, backend=backend)
    o.backward(data[f"{tag}.grad_o"])
    assert relative(o, data[f"{tag}.o"]) < 2e-6
    assert relative(state, data[f"{tag}.final_state"]) < 2e-6
    assert relative(normalizer, data[f"{tag}.final_normalizer"]) < 2e-6
    for name, x in raw.items():
        assert relative(x.grad, data[f"{tag}.d_{name}"]) < 2e-5, name


@pytest.mark.parametrize("operation", ["linear_attention", "linear_attention_plain"])
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 4, 4, 7])])
def test_gradcheck_every_input(operation, cu_seqlens):
    sequences = None if cu_seqlens is None else 3
    inputs = make_inputs(operation, 1, 7, 1, 3, 2, sequences=sequences, dtype=torch.float64)
    names = list(inputs)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def function(*tensors):
        return run(operation, dict(zip(names, tensors, strict=True)), backend="eager", cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=cu_seqlens is not None)


def test_a_single_key_reads_back_its_value():
    """With one token the weights sum to one, so the output is the value whatever q and k are."""
    inputs = make_inputs("linear_attention", 2, 1, 2, 8, 4)
    o, _ = linear_attention(inputs["q"], inputs["k"], inputs["v"])
    torch.testing.assert_close(o, inputs["v"])


def test_bad_input_is_named():
    q = torch.zeros(1, 5, 2, 8)
    with pytest.raises(ShapeError, match="k has shape"):
        linear_attention(q, q[..., :4], q)
    with pytest.raises(ShapeError, match=r"initial_state\[1\] has shape"):
        linear_attention(q, q, q, initial_state=(torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 1)))
    with pytest.raises(ShapeError, match="needs initial_state"):
        linear_attention(q, q, q, inplace_state=True)
