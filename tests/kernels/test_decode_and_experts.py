"""Latent attention over the cache, the fused KDA step, and MXFP4 products against their definitions."""

import json

import pytest
import torch

from benchmarks.gpu_cases import CASES
from benchmarks.gpu_check import main
from kimi_hf.errors import BackendError
from kimi_hf.ops import set_backend
from kimi_hf.ops.grouped_experts import grouped_experts
from kimi_hf.ops.kda_decode import kda_decode
from kimi_hf.ops.latent_attention import latent_attention
from kimi_hf.ops.mxfp4 import packed_matmul, unpack
from kimi_hf.ops.mxfp4.packed import PackedWeight
from kimi_hf.ops.situ import situ_glu
from tests.kernels.guards import agree, close, guarded, poisoned_outputs

pytestmark = pytest.mark.interpreted


def latent_tensors(B, T, A, S, n=8, r=4, v=12, R=20):
    """A cache that is a slice of a longer buffer whose other slots are NaN."""
    buffer = torch.full((B, S + 5, R + r), float("nan"))
    buffer[:, :S] = torch.randn(B, S, R + r)
    return {
        "q_nope": torch.randn(B, T, A, n),
        "q_rope": torch.randn(B, T, A, r),
        "latent": buffer[:, :S, :R],
        "k_rope": buffer[:, :S, R:],
        "kv_b_weight": torch.randn(A * (n + v), R),
    }, {"v_head_dim": v, "scale": 0.3}


def latent_masks(B, T, S):
    padding = torch.ones(B, 1, 1, S, dtype=torch.bool)
    padding[0, ..., :3] = False
    closed = padding.clone()
    closed[-1] = False
    additive = torch.randn(1, 1, T, S)
    additive[..., 2:5] = torch.finfo(torch.float32).min
    return {"causal": None, "padding": padding, "a closed row": closed, "additive": additive}


@pytest.mark.parametrize("kind", ["causal", "padding", "a closed row", "additive", "everything"])
@pytest.mark.parametrize("T", [1, 3])
def test_latent_attention(kind, T, monkeypatch):
    monkeypatch.setattr("kimi_hf.ops.latent_attention.kernels.LEAST_KEYS", 32)  # several ranges of keys
    monkeypatch.setattr("kimi_hf.ops.latent_attention.kernels.SLICE", 16 if T == 1 else 64)  # scores in slices, or not
    B, A, S = 2, 3, 71
    tensors, options = latent_tensors(B, T, A, S)
    options |= {"mask": latent_masks(B, T, S).get(kind), "is_causal": kind != "everything"}
    with poisoned_outputs(), torch.no_grad():
        context, weights = latent_attention(**tensors, **options, backend="triton")
        context = context.clone()
    wide = {name: t.double() for name, t in tensors.items()}
    if kind == "additive":
        options["mask"] = options["mask"].double().masked_fill(options["mask"] < -1e30, torch.finfo(torch.float64).min)
    expected, _ = latent_attention(**wide, **options, form="absorbed", backend="reference")
    assert weights is None
    close(context, expected, 3e-6, "context")


def test_latent_attention_without_shared_key_and_with_few_keys():
    tensors, options = latent_tensors(1, 2, 17, 2, r=0)
    with torch.no_grad():
        context, _ = latent_attention(**tensors, **options, backend="triton")
    expected, _ = latent_attention(**{n: t.double() for n, t in tensors.items()}, **options, backend="reference")
    close(context, expected, 3e-6, "context")


def test_latent_attention_declines_what_needs_gradients_or_weights():
    tensors, options = latent_tensors(1, 1, 2, 4)
    with pytest.raises(BackendError, match="without the probabilities"):
        latent_attention(**tensors, **options, need_weights=True, backend="triton")
    tensors["q_nope"].requires_grad_()
    with pytest.raises(BackendError, match="no gradients"):
        latent_attention(**tensors, **options, backend="triton")
    tensors, options = latent_tensors(1, 17, 2, 20)
    with pytest.raises(BackendError, match="17 queries"):
        latent_attention(**tensors, **options, backend="triton")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("form", ["whole", "cut"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.float16, 2e-3)])
def test_kda_decode(lower_bound, form, dtype, tolerance, monkeypatch):
    """With padding in one row where the gate is bounded."""
    if form == "whole":
        monkeypatch.setattr("kimi_hf.ops.kda_decode.kernels.ENOUGH_PROGRAMS", 1)
    N, H, K, V, W = 2, 2, 20, 40, 4
    P, channels = H * K, 2 * H * K + H * V
    tensors = [torch.randn(N, width).to(dtype) for width in (P, P, H * V, P, H, H * V)]
    tensors += [torch.randn(N, channels, W).to(dtype), torch.randn(N, H, K, V)]
    options = {
        "conv_weights": (torch.randn(P, 1, W), torch.randn(P, W), torch.randn(H * V, W)),
        "A_log": torch.rand(H),
        "dt_bias": torch.randn(P),
        "lower_bound": lower_bound,
        "norm_weight": torch.randn(V),
        "eps": 1e-5,
        "real": None if lower_bound is None else torch.tensor([False, True]),
    }
    results = {}
    for backend in ("reference", "triton"):
        with poisoned_outputs():
            inputs = [guarded(t) for t in tensors]
            y = kda_decode(*inputs, **options, backend=backend)
        results[backend] = y.clone(), inputs[6], inputs[7]
    for name, actual, expected in zip(("y", "window", "state"), results["triton"], results["reference"], strict=True):
        close(actual, expected, tolerance, name)
    assert torch.equal(results["triton"][1], results["reference"][1])


def packed_weight(E, out, width):
    scale = torch.randint(120, 130, (E, out, width // 32), dtype=torch.uint8)
    return PackedWeight(torch.randint(0, 256, (E, out, width // 2), dtype=torch.uint8), scale)


@pytest.mark.parametrize("rows", [1, 3, 37])
@pytest.mark.parametrize("out, width", [(37, 96), (130, 544)])
def test_packed_matmul(rows, out, width):
    weight = packed_weight(1, out, width)
    packed, scale = weight.packed[0], weight.scale[0]
    x = torch.randn(rows, width)
    with poisoned_outputs(), torch.no_grad():
        y = packed_matmul(guarded(x), guarded(packed), guarded(scale), backend="triton").clone()
    close(y, x.double() @ unpack(packed, scale, torch.float64).T, 2e-6, "y")


@pytest.mark.parametrize("rows", [2, 9])
def test_packed_matmul_decodes_every_byte_exactly(rows):
    """Unit vectors pick single weights: both codes of every byte, at the smallest, largest and middle scales."""
    packed = torch.randint(0, 256, (256, 16), dtype=torch.uint8)
    packed[:, 0] = torch.arange(256, dtype=torch.uint8)
    scale = torch.tensor([0, 1, 2, 64, 127, 200, 251], dtype=torch.uint8)[torch.randint(0, 7, (256, 1))]
    x = torch.zeros(rows, 32)
    x[0, 0] = x[1, 1] = 1.0
    with torch.no_grad():
        y = packed_matmul(x, packed, scale, backend="triton")
    assert torch.equal(y[:2], unpack(packed, scale, torch.float32)[:, :2].T)


@pytest.mark.parametrize("tokens", [2, 11])
def test_grouped_experts(tokens):
    E, D, F, k = 5, 96, 32, 3
    gate_up, down = packed_weight(E, 2 * F, D), packed_weight(E, D, F)
    indices = torch.stack([torch.randperm(E - 1)[:k] for _ in range(tokens)])  # the last expert gets nothing
    indices[0, 1], indices[-1, 0] = -1, E  # pairs of no expert
    weights = torch.rand(tokens, k)
    hidden = torch.randn(tokens, D)

    def call(backend):
        def run(hidden, weights):
            act = lambda x: situ_glu(x, beta=4.0, linear_beta=25.0, backend=backend)  # noqa: E731
            return grouped_experts(hidden, indices, weights, gate_up, down, act, backend=backend)

        return run

    agree(call("triton"), call("reference"), {"hidden": hidden, "weights": weights}, values=3e-6, gradients=1e-5)
    with poisoned_outputs(), torch.no_grad():
        y = call("triton")(guarded(hidden), guarded(weights)).clone()
    close(y, call("reference")(hidden.double(), weights.double()), 3e-6, "without gradients")


def test_dense_experts_are_declined():
    weight = torch.randn(2, 8, 4)
    with pytest.raises(BackendError, match="dense"):
        grouped_experts(
            torch.randn(1, 4), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), weight, torch.randn(2, 4, 4),
            situ_glu, backend="triton",
        )  # fmt: skip


def test_the_gpu_check_runs_dry(tmp_path):
    """All of `python -m benchmarks.gpu_check --dry-run --tune`: every operation, every kind of row, both files."""
    try:
        assert main(["--dry-run", "--tune", "--out", str(tmp_path)]) == 0
    finally:
        set_backend(None)
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {case.name for case in CASES} == {row["name"] for row in report["correctness"]}
    assert all(row["seconds"] > 0 for section in ("speed", "layers", "native") for row in report[section])
    assert {row["train"] for row in report["speed"]} == {True, False}
    assert len(report["layers"]) == 3 and report["layers"][-1]["replay_error"] == 0.0
    assert (tmp_path / "gpu_check.md").read_text().count("\n| ") > 20
