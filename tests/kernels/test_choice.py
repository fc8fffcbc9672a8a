"""Which kernels are chosen, and flash-linear-attention's behind our signature."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from kimi_hf.errors import BackendError
from kimi_hf.ops import dispatch, kda, situ, use_backend
from kimi_hf.ops.dispatch import Backend, Operation

HERE = __name__


def eager(*args):
    return "eager"


def test_a_name_for_everything_is_a_wish_not_a_demand(monkeypatch):
    """Operations without such an implementation, and calls it declines, choose by themselves."""
    monkeypatch.setattr(dispatch, "importable", lambda name: True)
    monkeypatch.setattr(dispatch, "triton_interprets", lambda: True)
    without = Operation("without", Backend("eager", HERE, "eager"))
    declining = Operation(
        "declining", Backend("eager", HERE, "eager"), Backend("triton", HERE, "eager", lambda **facts: "too wide")
    )
    x = torch.zeros(1)
    with use_backend("triton"):
        assert without.pick(x)() == declining.pick(x)() == "eager"
        with pytest.raises(BackendError, match="too wide"):
            declining.pick(x, "triton")
    with use_backend({"declining": "triton"}), pytest.raises(BackendError, match="too wide"):
        declining.pick(x)
    monkeypatch.setenv("KIMI_HF_BACKEND", "triton")
    assert declining.pick(x)() == "eager"
    monkeypatch.setenv("KIMI_HF_BACKEND", "declining=triton")
    with pytest.raises(BackendError, match="too wide"):
        declining.pick(x)
    monkeypatch.delenv("KIMI_HF_BACKEND")
    monkeypatch.setattr(dispatch, "triton_interprets", lambda: False)
    with use_backend("triton"), pytest.raises(BackendError, match="tensors are on cpu"):
        declining.pick(x)


def test_cpu_tensors_never_choose_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "importable", lambda name: True)
    for operation in (kda.OPERATION, situ.OPERATION):
        chosen = operation.pick(torch.zeros(1), head_dim=16, value_dim=16, tokens=1, lower_bound=None)
        assert chosen.__module__.endswith("eager")


def fake_fla(monkeypatch, drop=()):
    """A stand-in for fla.ops.kda that computes by our definition, with the signature of the version we know."""
    names = (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel safe_gate lower_bound cu_seqlens A_log dt_bias"
    ).split()
    calls = []

    def make(name):
        def run(q, k, v, g, beta, **options):
            calls.append((name, options))
            kept = ("A_log", "dt_bias", "lower_bound", "initial_state", "output_final_state", "cu_seqlens")
            return kda.kda(q, k, v, g, beta, **{n: options[n] for n in kept}, backend="reference")

        parameters = ", ".join(n for n in names if n not in drop)
        code = f"lambda {parameters.replace('scale', '*, scale')}: None"
        run.__signature__ = importlib.import_module("inspect").signature(eval(code))
        run.__name__ = name
        return run

    module = types.ModuleType("fla.ops.kda")
    module.chunk_kda, module.fused_recurrent_kda = make("chunk_kda"), make("fused_recurrent_kda")
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.kda", module)
    monkeypatch.delitem(sys.modules, "kimi_hf.ops.kda.fla", raising=False)
    return calls


@pytest.mark.parametrize("tokens, name", [(3, "fused_recurrent_kda"), (20, "chunk_kda")])
def test_fla_behind_our_signature(monkeypatch, tokens, name):
    calls = fake_fla(monkeypatch)
    adapter = importlib.import_module("kimi_hf.ops.kda.fla")
    inputs = [torch.randn(1, tokens, 2, 8) for _ in range(4)] + [torch.randn(1, tokens, 2)]
    options = {
        "A_log": torch.rand(2), "dt_bias": torch.randn(16), "lower_bound": -5.0,
        "initial_state": torch.randn(1, 2, 8, 8), "output_final_state": False, "cu_seqlens": None,
    }  # fmt: skip
    expected, state = kda.kda(*inputs, **{**options, "output_final_state": True}, backend="reference")
    o, final = adapter.kda_fla(*inputs, **options, inplace_state=True)
    assert torch.equal(o, expected) and torch.equal(final, state) and final is options["initial_state"]
    assert calls[0][0] == name and calls[0][1]["use_gate_in_kernel"] and calls[0][1]["lower_bound"] == -5.0
    assert ("safe_gate" in calls[0][1]) == (name == "chunk_kda")
    monkeypatch.delitem(sys.modules, "kimi_hf.ops.kda.fla")


def test_fla_of_another_signature_or_version_is_refused(monkeypatch):
    fake_fla(monkeypatch, drop=("use_beta_sigmoid_in_kernel",))
    with pytest.raises(BackendError, match="takes no .'use_beta_sigmoid_in_kernel'"):
        importlib.import_module("kimi_hf.ops.kda.fla")
    monkeypatch.setattr(dispatch, "importable", lambda name: True)
    monkeypatch.setattr(dispatch, "version_of", lambda name: "9.9.9")
    x = torch.randn(1, 2, 1, 8)
    gates = {"A_log": torch.rand(1), "dt_bias": torch.rand(8)}
    with pytest.raises(BackendError, match="9.9.9"):
        kda.kda(x, x, x, x, x[..., 0], **gates, backend="fla")
    with use_backend("fla"), pytest.raises(BackendError, match="9.9.9"):
        kda.kda(x, x, x, x, x[..., 0], **gates)


def test_configurations_come_from_the_shipped_table_of_the_device(monkeypatch):
    common = importlib.import_module("kimi_hf.ops.kernels_common")
    monkeypatch.setattr(common, "_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(common, "tuned_table", lambda: {"Some GPU": {"kernel/K128": "wide", "kernel/K64": "gone"}})
    kernel, gpu = types.SimpleNamespace(__name__="kernel"), torch.device("cuda", 0)
    configs = common.Config("first"), common.Config("wide"), common.Config("small", suits=("fp32",))
    assert common.choose(kernel, configs, "K128", gpu).name == "wide"
    assert common.choose(kernel, configs, "K256", gpu).name == "first"
    assert common.choose(kernel, configs, "K256", gpu, kind="fp32").name == "small"
    assert common.choose(kernel, configs, "K128", torch.device("cpu")).name == "first"
    with pytest.raises(BackendError, match="no configuration 'gone'; it has first, wide, small"):
        common.choose(kernel, configs, "K64", gpu)
    with common.force_config("kernel", "small"):
        assert common.choose(kernel, configs, "K64", gpu).name == "small"


def test_every_product_names_its_precision():
    """tl.dot's default would take tf32 for fp32 operands without a word."""
    for path in (Path(dispatch.__file__).parent).glob("*/kernels*.py"):
        for call in re.findall(r"tl\.dot\((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*\)", path.read_text()):
            assert "input_precision=" in call, f"{path}: {call}"
