"""The Auto classes find our classes, whatever remote code a repository names, and give `kimi_linear` back when asked."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

import kimi_hf
from kimi_hf import KimiK3Config, KimiK3ForConditionalGeneration, KimiLinearConfig, KimiLinearForCausalLM

from ..conftest import fixture_path
from ..modeling.golden import KIMI_LINEAR, golden, golden_model

MULTIMODAL = "k3_multimodal_tiny"


@pytest.fixture
def repository(tmp_path):
    """The multimodal fixture with the remote code its `auto_map` names, which must never run."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(fixture_path(MULTIMODAL) / name, tmp_path)
    for name in ("configuration_kimi_k3.py", "modeling_kimi_k3.py", "modeling_kimi_linear.py"):
        (tmp_path / name).write_text("raise RuntimeError('remote code was run')\n")
    return tmp_path


@pytest.mark.parametrize("trust", [None, True, False])
@pytest.mark.parametrize("code", ["absent", "present"])
def test_remote_code_is_neither_needed_nor_run(code, trust, repository):
    folder = repository if code == "present" else fixture_path(MULTIMODAL)
    kwargs = {} if trust is None else {"trust_remote_code": trust}
    assert type(AutoConfig.from_pretrained(folder, **kwargs)) is KimiK3Config
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    assert type(model) is KimiK3ForConditionalGeneration
    for auto_class in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
        assert type(auto_class.from_pretrained(folder, **kwargs)) is KimiK3ForConditionalGeneration
    assert isinstance(AutoModel.from_pretrained(folder, **kwargs), kimi_hf.KimiK3Model | KimiK3ForConditionalGeneration)
    assert model.config.auto_map == AutoConfig.from_pretrained(folder).auto_map
    assert model.config.auto_map["AutoConfig"] == "configuration_kimi_k3.KimiK3Config"


def test_text_checkpoints_and_their_bodies():
    for cls, expected in ((AutoModelForCausalLM, "KimiLinearForCausalLM"), (AutoModel, "KimiLinearModel")):
        model = cls.from_pretrained(fixture_path(KIMI_LINEAR))
        assert type(model).__name__ == expected and type(model).__module__.startswith("kimi_hf.")
    assert type(AutoConfig.from_pretrained(fixture_path("k3_text_tiny"))) is KimiK3Config
    text = AutoConfig.from_pretrained(fixture_path("k3_text_tiny")).text_config
    assert type(text) is KimiLinearConfig
    assert type(AutoModelForCausalLM.from_config(text)) is KimiLinearForCausalLM


def test_the_tower_alone_by_its_own_config():
    config = AutoConfig.from_pretrained(fixture_path(MULTIMODAL)).vision_config
    assert type(AutoModel.from_config(config)) is kimi_hf.KimiK3VisionModel


def test_saving_copies_no_source_code(tmp_path):
    AutoModelForCausalLM.from_pretrained(fixture_path(KIMI_LINEAR)).save_pretrained(tmp_path)
    assert not list(tmp_path.rglob("*.py"))


def test_the_native_class_comes_back_and_leaves_again(tmp_path):
    """Class and key map change together, both ways; our own class keeps working while the native one is in place.

    The configuration that the native class saves, with derived fields in it, is one that ours reads.
    """
    ids = golden(f"{KIMI_LINEAR}/golden.safetensors")["plain.input_ids"]
    expected = golden_model(KIMI_LINEAR)(ids).logits
    try:
        for _ in range(2):
            kimi_hf.register(take_over_kimi_linear=False)
            config = AutoConfig.from_pretrained(fixture_path(KIMI_LINEAR))
            native = AutoModelForCausalLM.from_pretrained(fixture_path(KIMI_LINEAR), dtype=torch.float32).eval()
            ours = KimiLinearForCausalLM.from_pretrained(fixture_path(KIMI_LINEAR), dtype=torch.float32).eval()
            assert type(config).__module__.startswith("transformers.")
            assert type(native).__module__.startswith("transformers.")
            with torch.no_grad():
                assert (native(ids).logits - expected).abs().max() < 1e-4
                torch.testing.assert_close(ours(ids).logits, expected, rtol=0, atol=1e-5)
            native.save_pretrained(tmp_path)
            assert "qk_head_dim" in json.loads((tmp_path / "config.json").read_text())
            kimi_hf.register(take_over_kimi_linear=True)
            assert type(AutoModelForCausalLM.from_pretrained(fixture_path(KIMI_LINEAR))) is KimiLinearForCausalLM
            saved = AutoConfig.from_pretrained(tmp_path)
            assert type(saved) is KimiLinearConfig and "qk_head_dim" not in saved.to_dict()
            assert saved.layer_types == config.layer_types
    finally:
        kimi_hf.register(take_over_kimi_linear=True)


def _run(code, **environment):
    """Run `code` in a fresh process; fails with its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    code = textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_off_switch_in_the_environment(tmp_path):
    """In a fresh process that saves by our class, too, while `kimi_linear` stays transformers' own.

    FR-23 on the way: triton is installed here, and a model on CPU trains and generates without one of its kernels.
    """
    out = _run(
        f"""
        import kimi_hf, torch
        from transformers import AutoModelForCausalLM
        folder = {str(fixture_path(KIMI_LINEAR))!r}
        native = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        print(type(native).__module__)
        ours = kimi_hf.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours.save_pretrained({str(tmp_path)!r})
        print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__module__)
        print(type(AutoModelForCausalLM.from_pretrained({str(fixture_path(MULTIMODAL))!r})).__name__)
        import sys
        ids = torch.arange(5, 15)[None]
        ours.train()(ids, labels=ids).loss.backward()
        ours.eval().generate(ids, max_new_tokens=2, do_sample=False)
        kernels = [name for name in sys.modules if name.startswith("kimi_hf.ops") and "kernels" in name]
        print(kernels)
        """,
        KIMI_HF_KEEP_NATIVE_KIMI_LINEAR="1",
    )
    native, again, composite, kernels = out.split()
    assert kernels == "[]"
    assert native.startswith("transformers.") and again.startswith("transformers.")
    assert composite == "KimiK3ForConditionalGeneration"
    saved = (tmp_path / "model.safetensors").read_bytes()
    assert saved == (fixture_path(KIMI_LINEAR) / "model.safetensors").read_bytes()


def test_nothing_optional_is_needed():
    """FR-4: import, load, forward, train and generate with every optional package out of reach, no trust asked for."""
    out = _run(
        f"""
        import sys
        from importlib.machinery import PathFinder

        ABSENT = ("triton", "fla", "flash_attn", "tiktoken", "PIL", "peft", "trl", "datasets", "matplotlib", "kernels",
                  "compressed_tensors", "causal_conv1d", "torchvision", "bitsandbytes", "deepspeed", "xformers")
        find = PathFinder.find_spec
        PathFinder.find_spec = staticmethod(lambda n, *a: None if n.split(".")[0] in ABSENT else find(n, *a))

        import kimi_hf
        from transformers import AutoConfig, AutoModelForCausalLM
        import torch

        for case in ("k3_multimodal_tiny", "k3_release_tiny", "kimi_linear_tiny"):
            folder = {str(fixture_path(MULTIMODAL).parent)!r} + "/" + case
            AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            ids = torch.arange(5, 15)[None]
            model.train()(ids, labels=ids).loss.backward()
            out = model.eval().generate(ids, max_new_tokens=2, do_sample=False)
            print(type(model).__name__, out.shape[1])
        print(sorted(set(ABSENT) & set(sys.modules)))
        """
    )
    assert out.splitlines() == [
        "KimiK3ForConditionalGeneration 12",
        "KimiK3ForConditionalGeneration 12",
        "KimiLinearForCausalLM 12",
        "[]",
    ]
