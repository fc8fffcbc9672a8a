"""Which backend runs: order of the sources, reasons, and what is never touched without being chosen."""

import subprocess
import sys

import pytest
import torch

import kimi_hf.ops as ops
from kimi_hf.errors import BackendError
from kimi_hf.ops import dispatch
from kimi_hf.ops.dispatch import Backend, Operation, use_backend

HERE = __name__


def reference(*args):
    return "reference"


def eager(*args):
    return "eager"


def triton(*args):
    return "triton"


def only_wide(*, tensor, width, **facts):
    return None if width >= 16 else f"width is {width}, the kernel wants 16 or more"


@pytest.fixture
def operation():
    return Operation(
        "toy",
        Backend("reference", HERE, "reference"),
        Backend("eager", HERE, "eager"),
        Backend("triton", HERE, "triton", only_wide),
    )


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    monkeypatch.delenv("KIMI_HF_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield
    ops.set_backend(None)


X = torch.zeros(2)


def pick(operation, backend=None, width=32):
    return operation.pick(X, backend, width=width)()


def test_automatic_is_eager_on_cpu(operation):
    assert pick(operation) == "eager"


def test_order_of_sources(operation, monkeypatch):
    monkeypatch.setenv("KIMI_HF_BACKEND", "reference")
    assert pick(operation) == "reference"
    ops.set_backend("eager")
    assert pick(operation) == "eager"
    with use_backend("reference"):
        assert pick(operation) == "reference"
        assert pick(operation, "eager") == "eager"
    assert pick(operation) == "eager"
    ops.set_backend(None)
    assert pick(operation) == "reference"


def test_use_backend_restores_after_an_error(operation):
    with pytest.raises(RuntimeError), use_backend("reference"):
        raise RuntimeError
    assert pick(operation) == "eager"


def test_tables_by_operation(operation, monkeypatch):
    ops.set_backend({"toy": "reference"})
    assert pick(operation) == "reference"
    ops.set_backend({"kda": "reference"})
    assert pick(operation) == "eager"
    ops.set_backend(None)
    monkeypatch.setenv("KIMI_HF_BACKEND", "kda=eager, *=reference")
    assert pick(operation) == "reference"


def test_unknown_names(operation, monkeypatch):
    with pytest.raises(BackendError, match="no such backend"):
        pick(operation, "cuda")
    with pytest.raises(BackendError, match="'tritn' .* is no backend"):
        ops.set_backend("tritn")
    monkeypatch.setenv("KIMI_HF_BACKEND", "fast")
    with pytest.raises(BackendError, match="KIMI_HF_BACKEND"):
        pick(operation)


def test_a_named_backend_that_cannot_serve_says_why(operation, monkeypatch):
    monkeypatch.setattr(dispatch, "importable", lambda name: False)
    with pytest.raises(BackendError, match="toy: backend 'triton' .* not installed"):
        pick(operation, "triton")
    monkeypatch.setattr(dispatch, "importable", lambda name: True)
    with pytest.raises(BackendError, match="tensors are on cpu"):
        pick(operation, "triton")
    with pytest.raises(BackendError, match="has no such implementation"):
        pick(operation, "fla")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick(operation, "triton") == "triton"
    with pytest.raises(BackendError, match="width is 8"):
        pick(operation, "triton", width=8)
    assert pick(operation) == "eager", "the interpreter runs only when forced"


def test_automatic_on_a_gpu(operation, monkeypatch):
    """The device decides first, then what is importable, then what the backend accepts."""

    class OnGpu:
        device = torch.device("cuda")

    monkeypatch.setattr(dispatch, "importable", lambda name: True)
    assert operation.pick(OnGpu(), width=32)() == "triton"
    assert operation.pick(OnGpu(), width=8)() == "eager"
    monkeypatch.setattr(dispatch, "importable", lambda name: False)
    assert operation.pick(OnGpu(), width=32)() == "eager"


def test_importing_and_running_on_cpu_imports_no_kernel_library():
    code = (
        "import sys, torch\n"
        "from kimi_hf.ops.kda import kda\n"
        "x = torch.zeros(1, 3, 2, 4)\n"
        "kda(x, x, x, x, x[..., 0], A_log=torch.zeros(2), dt_bias=torch.zeros(8))\n"
        "assert not {'triton', 'fla'} & set(sys.modules), 'a kernel library was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
