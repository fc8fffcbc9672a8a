"""Every kernel compiles for GPUs that are not there, uses matrix instructions where it multiplies, and spills nothing.

One compilation a kernel, at Kimi K3's sizes in bf16; all configurations and targets are `benchmarks/kernel_report.py`.
"""

import importlib
import pkgutil

import pytest

from kimi_hf.ops.dispatch import importable, triton_interprets

if not importable("triton") or triton_interprets():
    pytest.skip("needs triton, compiling", allow_module_level=True)

import torch
from triton.runtime.jit import JITFunction

import kimi_hf.ops
from benchmarks.kernel_cases import CASES
from benchmarks.kernel_report import compile_launch, recorded
from kimi_hf.ops.kernels_common import Launch

MULTIPLY = {
    "chunk_intra_kernel",
    "chunk_state_kernel",
    "chunk_output_kernel",
    "chunk_state_grad_kernel",
    "chunk_value_grad_kernel",
    "chunk_key_grad_kernel",
    "chunk_score_grad_kernel",
    "latent_split_kernel",
    "grouped_product_kernel",
    "grouped_transposed_kernel",
}


def kernels() -> dict[str, Launch]:
    """The first launch of every kernel over all cases."""
    found: dict[str, Launch] = {}
    for case in CASES.values():
        for launch in recorded(case):
            found.setdefault(launch.name, launch)
    return found


LAUNCHES = kernels()


def test_the_cases_launch_every_kernel_there_is():
    defined = set()
    for module in pkgutil.walk_packages(kimi_hf.ops.__path__, "kimi_hf.ops."):
        if module.name.rpartition(".")[2].startswith("kernels"):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, JITFunction) and name.endswith("_kernel"):
                    defined.add(name)
    assert defined == set(LAUNCHES)


@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles_for_hopper(name):
    row = compile_launch(LAUNCHES[name], "sm_90")
    assert row.spills == 0
    assert (row.matrix_instructions > 0) == (name in MULTIPLY)


@pytest.mark.parametrize("name", ["chunk_state_kernel", "grouped_product_kernel", "latent_split_kernel"])
def test_compiles_for_blackwell(name):
    row = compile_launch(LAUNCHES[name], "sm_100")
    assert row.spills == 0 and row.matrix_instructions > 0


def test_compiles_for_amd():
    launch = next(launch for launch in recorded(CASES["kda"], "gfx942") if launch.name == "chunk_output_kernel")
    row = compile_launch(launch, "gfx942")
    assert row.spills == 0 and row.matrix_instructions > 0


def test_recording_runs_nothing():
    assert all(isinstance(t, torch.Tensor) and t.is_meta for t in LAUNCHES["situ_forward_kernel"].arguments.values()
               if isinstance(t, torch.Tensor))  # fmt: skip
