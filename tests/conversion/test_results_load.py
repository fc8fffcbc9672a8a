"""What the tools write, the models open: every layout gives the same logits, slices and tiny models run."""

import json

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from kimi_hf import KimiLinearForCausalLM
from kimi_hf.checkpoint.check import check_checkpoint
from kimi_hf.checkpoint.geometry import load_config
from kimi_hf.conversion.convert import convert
from kimi_hf.conversion.make_tiny import make_tiny, shrink_config
from kimi_hf.conversion.merge_lora import merge_lora
from kimi_hf.conversion.slice import slice_checkpoint
from kimi_hf.conversion.verify import compare
from kimi_hf.training.adapters import lora_config

from .helpers import read_all
from .test_merge_lora import ROOT, pair, write_adapter

IDS = torch.tensor([[1, 5, 9, 33, 2, 7]])


def logits(folder, **options):
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    with torch.no_grad():
        found = model.eval()(IDS).logits
    assert torch.isfinite(found).all()
    return found


@pytest.mark.parametrize("layout", ["bf16", "fused", "fused-packed"])
def test_every_layout_gives_the_same_logits(goldens, tmp_path, layout):
    source = goldens("k3_release_tiny/config.json").parent
    out = convert(source, tmp_path / "out", layout)
    torch.testing.assert_close(logits(out), logits(source), atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", ["fused", "bf16"])
def test_kimi_linear_layouts(goldens, tmp_path, layout):
    source = goldens("kimi_linear_tiny/config.json").parent
    assert torch.equal(logits(convert(source, tmp_path / "out", layout)), logits(source))


@pytest.mark.parametrize("text_only", [False, True])
def test_a_slice_runs(goldens, tmp_path, text_only):
    source = goldens("k3_release_tiny/config.json").parent
    cut = {"layers": [0, 1, 3], "experts": [0, 2, 5, 7], "rows": list(range(40)), "text_only": text_only}
    out, _ = slice_checkpoint(source, tmp_path / "out", **cut)
    assert logits(out).shape == (1, 6, 40)


def test_tiny_models_run(goldens, tmp_path):
    for name in ("kimi_k3_config.json", "kimi_linear_48b_config.json"):
        config = shrink_config(json.loads(goldens(f"released/{name}").read_text()), 5)
        assert logits(make_tiny(config, tmp_path / name)).shape == (1, 6, 256)


def test_merged_adapter_changes_what_it_should(goldens, tmp_path):
    """Merging by file equals adding the update to the loaded parameter."""
    source = goldens("kimi_linear_tiny/config.json").parent
    name = "model.layers.3.self_attn.o_proj"
    factors = pair(ROOT + name, 64, 64)
    out = merge_lora(source, write_adapter(tmp_path / "a", factors), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    a, b = factors.values()
    with torch.no_grad():
        model.get_submodule(name).weight += 2.0 * b @ a
        expected = model(IDS).logits
    torch.testing.assert_close(logits(out), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["kimi_linear_tiny", "k3_release_tiny"])
def test_saved_models_are_the_released_layout(goldens, tmp_path, case):
    """What `save_pretrained` writes passes the strict header check and holds the same tensors as the source."""
    source = goldens(f"{case}/config.json").parent
    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(tmp_path / "saved")
    check_checkpoint(tmp_path / "saved", load_config(source), strict_dtypes=True)
    before, after = read_all(source), read_all(tmp_path / "saved")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not compare(source, tmp_path / "saved").count


@pytest.mark.parametrize("case", ["k3_text_tiny", "k3_mxfp4_tiny"])
def test_expert_adapters_merge_to_the_same_logits(goldens, tmp_path, case):
    """Adapters on attention and all routed experts, plain and packed, as `lora_config` makes them and PEFT saves them."""
    source = goldens(f"{case}/config.json").parent
    model = KimiLinearForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(2)
    model = get_peft_model(model, lora_config(["attention", "experts"], model=model, r=2)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        expected = model(IDS).logits
        with model.disable_adapter():
            assert (model(IDS).logits - expected).abs().max() > 0.1
    model.save_pretrained(tmp_path / "adapter")
    out = merge_lora(source, tmp_path / "adapter", tmp_path / "out", experts="bf16", dtype="float32")
    merged = KimiLinearForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-3, rtol=0)
