"""SiTU: goldens, both doors bit for bit, gradients, what the backward keeps, errors."""

import pytest
import torch
from safetensors.torch import load_file

from kimi_hf.errors import ShapeError
from kimi_hf.ops.situ import eager, situ, situ_glu

DOORS = ("reference", "eager")


@pytest.fixture
def golden(goldens):
    return load_file(goldens("module_ops/golden.safetensors"))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name, beta, linear_beta", [("4_25", 4, 25), ("4_none", 4, None), ("1_none", None, None)])
def test_golden(golden, door, name, beta, linear_beta):
    out = situ_glu(golden["situ.gate_up"], beta=beta, linear_beta=linear_beta, backend=door)
    torch.testing.assert_close(out, golden[f"situ.{name}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("door", DOORS)
def test_bfloat16_is_the_fp32_result_rounded_once(golden, door):
    gate_up = golden["situ.gate_up"].bfloat16()
    out = situ_glu(gate_up, beta=4, linear_beta=25, backend=door)
    assert torch.equal(out, golden["situ.4_25_bfloat16"])
    assert torch.equal(out, situ_glu(gate_up.float(), beta=4, linear_beta=25, backend=door).bfloat16())


@pytest.mark.parametrize("gate, up, value", [(3.0, 40.0, 55.763386), (-6.0, -60.0, 0.220155)])
def test_published_values(gate, up, value):
    out = situ(torch.tensor([gate]), torch.tensor([up]), beta=4.0, linear_beta=25.0)
    assert out.item() == pytest.approx(value, abs=4e-6)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 64), (0, 8), (300, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_doors_agree_to_the_bit(shape, dtype):
    gate, up = (torch.randn(2, *shape) * 8).to(dtype)
    for bounds in ({"beta": 3.3, "linear_beta": 7.7}, {"beta": 0}):
        a, b = (situ(gate, up, **bounds, backend=door) for door in DOORS)
        assert a.dtype == dtype and torch.equal(a, b)


def test_pieces_and_strides(monkeypatch):
    gate_up = torch.randn(7, 3, 20)
    whole = situ_glu(gate_up, beta=2.0, linear_beta=3.0)
    monkeypatch.setattr(eager, "PIECE", 16)
    assert torch.equal(situ_glu(gate_up, beta=2.0, linear_beta=3.0), whole)
    turned = gate_up.transpose(0, 1)
    assert torch.equal(situ_glu(turned, beta=2.0, linear_beta=3.0), whole.transpose(0, 1))


@pytest.mark.parametrize("piece", [1 << 16, 8])
@pytest.mark.parametrize("linear_beta", [None, 2.5])
def test_gradcheck(monkeypatch, piece, linear_beta):
    monkeypatch.setattr(eager, "PIECE", piece)
    gate, up = (torch.randn(2, 3, 5, 4, dtype=torch.float64) * 2).unbind(0)
    inputs = gate.requires_grad_(), up.requires_grad_()
    assert torch.autograd.gradcheck(lambda g, u: situ(g, u, beta=1.7, linear_beta=linear_beta), inputs)
    gate_up = torch.cat([gate, up], -1).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: situ_glu(x, beta=1.7, linear_beta=linear_beta), gate_up)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 2e-5), (torch.bfloat16, 0.25)])
def test_gradients_equal_the_reference(dtype, atol):
    gate_up = (torch.randn(40, 64) * 10).to(dtype).requires_grad_()
    cotangent = torch.randn(40, 32).to(dtype)
    grads = [
        torch.autograd.grad(situ_glu(gate_up, beta=4, linear_beta=25, backend=door), gate_up, cotangent)[0]
        for door in DOORS
    ]
    # bf16 gradients reach 80, where the two orders of rounding differ by at most one unit in the last place
    torch.testing.assert_close(grads[0], grads[1], rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=atol)


def test_gradient_stays_finite_at_the_ends():
    gate_up = torch.tensor([[-300.0, 300.0, 1e30, -1e30, 300.0, -300.0, 1e30, 1e30]], requires_grad=True)
    situ_glu(gate_up, beta=4, linear_beta=25).sum().backward()
    assert torch.isfinite(gate_up.grad).all()


def test_the_backward_keeps_only_the_inputs():
    gate, up = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        situ(gate, up, beta=4, linear_beta=25)
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


def test_traces_into_one_graph():
    gate_up = torch.randn(6, 16, requires_grad=True)
    compiled = torch.compile(lambda x: situ_glu(x, beta=4, linear_beta=25), backend="aot_eager", fullgraph=True)
    out = compiled(gate_up)
    torch.testing.assert_close(out, situ_glu(gate_up, beta=4, linear_beta=25))
    out.sum().backward()
    assert torch.isfinite(gate_up.grad).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: situ(x, x[:, :2]), "up has shape"),
        (lambda x: situ(x, x.bfloat16()), "up is torch.bfloat16"),
        (lambda x: situ(x.long(), x.long()), "expected a floating dtype"),
        (lambda x: situ(x, x, beta=-1.0), "beta is -1.0"),
        (lambda x: situ(x, x, linear_beta=0.0), "linear_beta is 0.0"),
        (lambda x: situ_glu(x[:, :3]), "even last dimension"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ShapeError, match=message):
        call(torch.randn(2, 4))
