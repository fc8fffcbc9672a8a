"""Two processes over gloo equal one process after three steps, under every kind of parallelism.

All scenarios run in one pair of processes (`distributed_worker.py`), since starting them costs more than the steps.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file

import kimi_hf
from kimi_hf.cli import main as command_line
from kimi_hf.errors import ConfigError
from kimi_hf.quantization import quantize

from . import distributed_worker
from .models import tiny_model

# scenario: what one process did that it must equal
EQUALS = {
    "ddp": "one_trainer",
    "accelerate": "one_trainer",
    "tensor": "one",
    "expert": "one",
    "sharded_data": "one",
    "expert_over_data": "one",
    "packed_tensor": "one_packed",
    "packed_expert": "one_packed",
    "packed_data": "one_packed",
}
REFUSED = {"uneven_groups": "moe_intermediate_size is 32"}
SPLIT = [name for name in EQUALS if name != "ddp"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Every scenario's folder: model.safetensors, result.json, and released/ where the weights were split."""
    folder = tmp_path_factory.mktemp("processes")
    tiny_model(moe_intermediate_size=64).save_pretrained(folder / "model")
    quantize(tiny_model(moe_intermediate_size=64)).save_pretrained(folder / "packed")
    quantize(tiny_model(moe_intermediate_size=32)).save_pretrained(folder / "narrow")
    for name in sorted(set(EQUALS.values())):
        distributed_worker.run(folder, name)
    module = ["-m", "tests.training.distributed_worker", str(folder), *EQUALS, *REFUSED]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *module],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(kimi_hf.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def outcome(folder, name):
    return json.loads((folder / name / "result.json").read_text()), load_file(folder / name / "model.safetensors")


@pytest.mark.parametrize("name", EQUALS)
def test_two_processes_equal_one(name, outcomes):
    result, tensors = outcome(outcomes, name)
    assert "error" not in result, result["error"]
    expected_result, expected = outcome(outcomes, EQUALS[name])
    start = load_file(outcomes / "model" / "model.safetensors")
    assert set(tensors) == set(expected)
    differences = {key: float((tensors[key].double() - value.double()).abs().max()) for key, value in expected.items()}
    worst = max(differences, key=differences.get)
    print(f"{name}: largest difference {differences[worst]:.1e}, in {worst}")  # for the documentation; shown with -s
    assert differences[worst] < 1e-4, worst
    assert (expected["lm_head.weight"] - start["lm_head.weight"]).abs().max() > 1e-2
    biases = [value for key, value in tensors.items() if key.endswith("e_score_correction_bias")]
    assert all(bias.abs().sum() > 0 for bias in biases), "router balance moved the biases, alike in both"
    if name == "ddp":
        assert result["wrapped"] == "DistributedDataParallel"
    if name == "accelerate":
        assert "FSDPModule" in result["wrapped"] and "DistributedDataParallel" not in result["wrapped"]
    if EQUALS[name] == "one_trainer":
        assert result["loads"] == pytest.approx(expected_result["loads"], abs=1e-6)
    if "data" not in name:  # those log each process's own share
        assert result["losses"] == pytest.approx(expected_result["losses"], abs=1e-4)


@pytest.mark.parametrize("name", SPLIT)
def test_split_weights_are_saved_whole_in_the_released_layout(name, outcomes):
    result, tensors = outcome(outcomes, name)
    assert result["sharded"] >= 20
    source = "packed" if "packed" in name else "model"
    written = load_file(outcomes / name / "released" / "model.safetensors")
    original = load_file(outcomes / source / "model.safetensors")
    assert {k: (v.shape, v.dtype) for k, v in written.items()} == {k: (v.shape, v.dtype) for k, v in original.items()}
    model = kimi_hf.KimiLinearForCausalLM.from_pretrained(outcomes / name / "released", dtype=torch.float32)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, tensors[key], atol=0, rtol=0, msg=key)


def test_a_sharded_checkpoint_of_accelerate_is_consolidated_into_the_released_layout(outcomes, tmp_path):
    checkpoint = outcomes / "accelerate" / "checkpoint-3"
    merge_fsdp_weights(str(checkpoint / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    shutil.copy(outcomes / "model" / "config.json", tmp_path / "merged")
    assert command_line(["convert", str(tmp_path / "merged"), str(tmp_path / "released"), "--to", "released"]) == 0
    written = load_file(tmp_path / "released" / "model.safetensors")
    whole = load_file(outcomes / "accelerate" / "released" / "model.safetensors")
    assert set(written) == set(whole)
    for key, value in whole.items():
        torch.testing.assert_close(written[key], value, atol=0, rtol=0, msg=key)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused(name, outcomes):
    result, _ = outcome(outcomes, name)
    assert ConfigError.__name__ in result["error"] and REFUSED[name] in result["error"], result["error"]
