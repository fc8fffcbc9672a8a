"""Under torch.compile each kernel is one operator of a whole graph, with the same numbers as called eagerly."""

import pytest
import torch

from kimi_hf.ops.delta_rule import delta_rule
from kimi_hf.ops.grouped_experts import grouped_experts
from kimi_hf.ops.kda import kda
from kimi_hf.ops.kda_decode import kda_decode
from kimi_hf.ops.latent_attention import latent_attention
from kimi_hf.ops.mxfp4.packed import PackedWeight
from kimi_hf.ops.situ import situ_glu
from tests.kernels.guards import close

pytestmark = pytest.mark.interpreted


def whole_graph(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def kda_call():
    H, K, V = 1, 16, 12
    tensors = [torch.randn(1, 17, H, d) for d in (K, K, V, K)] + [torch.randn(1, 17, H)]
    tensors += [torch.rand(H), torch.randn(H * K), torch.randn(1, H, K, V)]

    def run(q, k, v, g, beta, A_log, dt_bias, state):
        options = {"lower_bound": -5.0, "initial_state": state, "output_final_state": True, "backend": "triton"}
        return kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **options)

    return run, tensors


def packed(E, out, width):
    scale = torch.randint(120, 130, (E, out, width // 32), dtype=torch.uint8)
    return torch.randint(0, 256, (E, out, width // 2), dtype=torch.uint8), scale


def experts_call():
    up, down = packed(3, 64, 64), packed(3, 64, 32)
    indices = torch.tensor([[0, 2], [2, 1], [1, -1]])

    def run(hidden, weights):
        act = lambda x: situ_glu(x, beta=4.0, linear_beta=25.0, backend="triton")  # noqa: E731
        weight = PackedWeight(*up), PackedWeight(*down)
        return grouped_experts(hidden, indices, weights, *weight, act, backend="triton")

    return run, [torch.randn(3, 64), torch.rand(3, 2)]


@pytest.mark.parametrize("make", [kda_call, experts_call])
def test_with_gradients(make, monkeypatch):
    monkeypatch.setattr("kimi_hf.ops.kda.kernels.FP32_CHUNK", 16)
    run, tensors = make()
    results = []
    for call in (whole_graph(run), run):
        leaves = [t.clone().requires_grad_() for t in tensors]
        outputs = call(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results.append([*outputs, *torch.autograd.grad([o.square().sum() for o in outputs], leaves)])
    for compiled, eager in zip(*results, strict=True):
        close(compiled, eager, 1e-5, "compiled")


def few_tokens_call():
    tensors = [torch.randn(1, 2, 1, 8) for _ in range(3)] + [torch.rand(1, 2, 1), torch.randn(1, 1, 8, 8)]

    def run(q, k, v, beta, state):
        return delta_rule(q, k, v, beta, initial_state=state, inplace_state=True, backend="triton")[0]

    return run, tensors


def decode_call():
    N, H, K, V, W = 2, 1, 8, 8, 4
    tensors = [torch.randn(N, H * K) for _ in range(4)] + [torch.randn(N, H), torch.randn(N, H * V)]
    tensors += [torch.randn(N, 3 * H * K, W), torch.randn(N, H, K, V)]
    weights = {"conv_weights": tuple(torch.randn(H * K, W) for _ in range(3)), "A_log": torch.rand(H),
               "dt_bias": torch.randn(H * K), "norm_weight": torch.randn(V)}  # fmt: skip
    real = torch.tensor([True, False])
    return lambda *t: kda_decode(*t, **weights, eps=1e-5, real=real, backend="triton"), tensors


def latent_call():
    tensors = [torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 4), torch.randn(1, 9, 16), torch.randn(1, 9, 4)]
    tensors += [torch.randn(2 * 16, 16)]
    return lambda *t: latent_attention(*t, v_head_dim=8, scale=0.3, backend="triton")[0], tensors


@pytest.mark.parametrize("make", [few_tokens_call, decode_call, latent_call, experts_call])
def test_without_gradients_and_in_place(make):
    run, tensors = make()
    results = []
    for call in (whole_graph(run), run):
        copies = [t.clone() for t in tensors]
        with torch.no_grad():
            results.append([call(*copies), *copies])
    for compiled, eager in zip(*results, strict=True):
        close(compiled, eager, 1e-5, "compiled")
