"""Every kernel compiles for GPUs that are not there, uses matrix instructions where it multiplies, and spills nothing.

One compilation a kernel and NVIDIA target, at Kimi K3's sizes in bf16. `benchmarks/kernel_report.py` compiles all cases;
what it wrote must be of the launches of today.
"""

import importlib
import json
import pkgutil

import pytest

from kimi_hf.ops.dispatch import importable, triton_interprets

if not importable("triton") or triton_interprets():
    pytest.skip("needs triton, compiling", allow_module_level=True)

import torch
from triton.runtime.jit import JITFunction

import kimi_hf.ops
from benchmarks.kernel_cases import CASES, MAIN
from benchmarks.kernel_report import RESULTS, TARGETS, compile_launch, recorded
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


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles(name, target):
    row = compile_launch(LAUNCHES[name], target)
    assert row.spills == 0
    assert (row.matrix_instructions > 0) == (name in MULTIPLY)


def test_compiles_for_amd():
    launch = next(launch for launch in recorded(CASES["kda"], "gfx942") if launch.name == "chunk_output_kernel")
    row = compile_launch(launch, "gfx942")
    assert row.spills == 0 and row.matrix_instructions > 0


def test_the_report_is_of_what_is_launched():
    """A kernel, a case or a default configuration that changed wants `python -m benchmarks.kernel_report` run again."""
    lines = (RESULTS / "kernel_report.jsonl").read_text().splitlines()[1:]
    reported = [json.loads(line) for line in lines]
    launched = {
        (case, launch.name, launch.config.name, target)
        for case in CASES
        for target in TARGETS
        for launch in recorded(CASES[case], target)
    }
    assert {(row["case"], row["kernel"], row["config"], row["target"]) for row in reported} == launched
    spilling = {
        (row["case"], row["kernel"], row["target"]) for row in reported if row["spills"] and row["case"] in MAIN
    }
    assert not spilling
    assert all(row["matrix_instructions"] > 0 for row in reported if row["kernel"] in MULTIPLY)


def test_recording_runs_nothing():
    assert all(isinstance(t, torch.Tensor) and t.is_meta for t in LAUNCHES["situ_forward_kernel"].arguments.values()
               if isinstance(t, torch.Tensor))  # fmt: skip
