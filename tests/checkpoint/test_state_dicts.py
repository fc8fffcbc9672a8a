"""`load_state_dict` takes what `save_pretrained` wrote, whole or shard by shard, and refuses what cannot be this model."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import load_sharded_checkpoint

from kimi_hf.errors import CheckpointError
from kimi_hf.quantization import dequantize, quantize

from .small import small_model

EXPERTS = "model.layers.1.block_sparse_moe.experts"


def _zeroed(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model


def _same(one, other):
    theirs = other.state_dict()
    return all(torch.equal(x, theirs[name]) for name, x in one.state_dict().items())


@pytest.fixture(params=["kimi-linear-tiny", "kimi-k3-tiny", "packed"])
def model(request):
    return quantize(small_model("kimi-k3-tiny")) if request.param == "packed" else small_model(request.param)


@pytest.fixture
def released(model, tmp_path):
    """The names and tensors that the model is saved with."""
    model.save_pretrained(tmp_path)
    return load_file(tmp_path / "model.safetensors")


def test_shard_by_shard_though_a_layer_is_spread_over_many(model, released, tmp_path):
    """As Trainer resumes from a checkpoint in shards; each comes alone, with some of a layer's experts."""
    names = sorted(released)
    files = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
    for file, part in files.items():
        save_file({name: released[name] for name in part}, tmp_path / file)
        assert sum(EXPERTS in name for name in part) > 2
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    empty = _zeroed(model)
    load_sharded_checkpoint(empty, tmp_path, strict=False)
    assert _same(empty, model)


def test_half_of_the_experts_leaves_the_others_and_names_them(model, released):
    some = {name: x for name, x in released.items() if f"{EXPERTS}.0." in name or f"{EXPERTS}.2.w2." in name}
    other = _zeroed(model)
    result = other.load_state_dict(some, strict=False)
    assert not result.unexpected_keys
    absent = {name for name in released if EXPERTS in name} - set(some)
    assert absent <= set(result.missing_keys) and not set(some) & set(result.missing_keys)
    for name, x in other.state_dict().items():
        if ".experts." in name:
            expected = torch.zeros_like(x)
            expected[0] = model.state_dict()[name][0]
            if "down_proj" in name:
                expected[2] = model.state_dict()[name][2]
            assert torch.equal(x, expected), name
    with pytest.raises(RuntimeError, match=rf"Missing key.*{EXPERTS}\.1\."):
        other.load_state_dict(some)


@pytest.mark.parametrize("strict", [True, False])
def test_one_expert_absent_from_a_whole_state_dict(strict, model, released):
    name = next(name for name in released if f"{EXPERTS}.3.w1" in name)
    del released[name]
    with pytest.raises(CheckpointError, match=rf"lacks {name}"):
        model.load_state_dict(released, strict=strict)


def test_one_expert_too_many(model, released):
    for name in [name for name in released if f"{EXPERTS}.3." in name]:
        released[name.replace("experts.3.", "experts.4.")] = released[name]
    with pytest.raises(CheckpointError, match=rf"holds {EXPERTS}\.4\.w1.*has 4 experts"):
        model.load_state_dict(released, strict=False)


def test_an_expert_of_another_shape(model, released):
    name = next(name for name in released if f"{EXPERTS}.2.w2" in name)
    released[name] = released[name][:-1]
    with pytest.raises(CheckpointError, match=rf"{name} is \[31, \d+\], but other experts are \[32"):
        model.load_state_dict(released, strict=False)
    partial = {key: x for key, x in released.items() if key != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=rf"{name} is \[31"):
        model.load_state_dict({name: partial[name]}, strict=False)


@pytest.mark.parametrize("names", ["released", "own"])
@pytest.mark.parametrize("stored", ["packed", "plain"])
def test_experts_of_another_form_are_refused(stored, names, tmp_path):
    """Trainer resumes with strict=False, where they would be two warnings and random experts."""
    plain = small_model("kimi-k3-tiny")
    packed = quantize(copy.deepcopy(plain))
    source, model = (packed, plain) if stored == "packed" else (plain, packed)
    state_dict = source.state_dict()
    if names == "released":
        source.save_pretrained(tmp_path)
        state_dict = load_file(tmp_path / "model.safetensors")
    remedy = "quantize" if stored == "packed" else "dequantize"
    with pytest.raises(
        CheckpointError, match=rf"{EXPERTS}\..* is {'' if stored == 'packed' else 'not '}packed.*\.{remedy}\("
    ):
        model.load_state_dict(state_dict, strict=False)
    (quantize if stored == "packed" else dequantize)(model)
    assert not any(model.load_state_dict(state_dict)) and _same(model, source)
