"""The gated norm against the golden, its doors, its gradients."""

import pytest
import torch
from safetensors.torch import load_file

from kimi_hf.errors import ShapeError
from kimi_hf.ops.gated_norm import gated_norm


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_golden(goldens, backend):
    data = load_file(goldens("module_ops/golden.safetensors"))
    x, weight, gate = (data[f"gated_norm.{name}"] for name in ("x", "weight", "gate"))
    y = gated_norm(x, weight, gate, eps=1e-5, backend=backend)
    torch.testing.assert_close(y, data["gated_norm.out"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("gated", [True, False])
def test_gradcheck_and_doors(activation, gated):
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) if gated else None
    leaves = (x, weight, gate) if gated else (x, weight)

    def function(x, weight, gate=None, backend="eager"):
        return gated_norm(x, weight, gate, eps=1e-2, activation=activation, backend=backend)

    torch.testing.assert_close(function(*leaves), function(*leaves, backend="reference"))
    assert torch.autograd.gradcheck(function, leaves)


def test_bf16_rounds_once_and_keeps_gradient_dtypes():
    x = (torch.randn(4, 16) * 3).bfloat16().requires_grad_()
    gate = torch.randn(4, 16).bfloat16().requires_grad_()
    weight = torch.rand(16).requires_grad_()
    y = gated_norm(x, weight, gate, eps=1e-5)
    assert torch.equal(y, gated_norm(x.float(), weight, gate.float(), eps=1e-5).bfloat16())
    y.sum().backward()
    assert x.grad.dtype == gate.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32


def test_zero_rows_are_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    gated_norm(x, torch.ones(8), torch.zeros(2, 8), eps=1e-5).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_bad_input_is_named():
    x = torch.zeros(2, 8)
    with pytest.raises(ShapeError, match="weight has shape"):
        gated_norm(x, torch.ones(4), x, eps=1e-5)
    with pytest.raises(ShapeError, match="gate has shape"):
        gated_norm(x, torch.ones(8), x[0], eps=1e-5)
    with pytest.raises(ShapeError, match="activation is 'tanh'"):
        gated_norm(x, torch.ones(8), x, eps=1e-5, activation="tanh")
