"""What `save_pretrained` writes: the released names, shapes, dtypes and bytes, whole or in shards, and what loads it."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import kimi_hf
from kimi_hf import KimiLinearForCausalLM, KimiLinearModel
from kimi_hf.conversion.slice import slice_checkpoint
from kimi_hf.errors import CheckpointError
from kimi_hf.modeling.modeling_kimi_linear import FLOAT32_NAMES

from ..conftest import fixture_path
from ..modeling.golden import K3, K3_PACKED, K3_RELEASE, KIMI_LINEAR, fresh_model, golden_model

MULTIMODAL = "k3_multimodal_tiny"
# K3 and K3_PACKED name the composite class but hold no tower, so they load with the text class.
LOADERS = [
    (K3, KimiLinearForCausalLM),
    (K3_PACKED, KimiLinearForCausalLM),
    (K3_RELEASE, AutoModelForCausalLM),
    (MULTIMODAL, AutoModelForCausalLM),
    (KIMI_LINEAR, AutoModelForCausalLM),
]


def tensors(folder):
    """All tensors of a checkpoint folder by name."""
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        found.update(load_file(path))
    return found


def assert_same_bytes(ours, theirs):
    """Equal names, and per tensor equal dtype, shape and bytes (so that -0 and NaN count)."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name


def _load(cls, folder, **kwargs):
    """In the dtype of the file, with a report that must be clean."""
    first = next(x for n, x in tensors(folder).items() if n.endswith("embed_tokens.weight"))
    model, report = cls.from_pretrained(folder, dtype=first.dtype, output_loading_info=True, **kwargs)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not report[kind], (kind, report[kind])
    return model


@pytest.mark.parametrize(("case", "cls"), LOADERS, ids=lambda x: getattr(x, "__name__", x))
def test_load_save_load_is_byte_equal(case, cls, tmp_path):
    original = tensors(fixture_path(case))
    model = _load(cls, fixture_path(case))
    model.save_pretrained(tmp_path / "whole")
    assert_same_bytes(tensors(tmp_path / "whole"), original)
    if len(list(fixture_path(case).glob("model*.safetensors"))) == 1:
        saved, given = (folder / "model.safetensors" for folder in (tmp_path / "whole", fixture_path(case)))
        assert saved.read_bytes() == given.read_bytes()


@pytest.mark.parametrize(("case", "cls"), LOADERS[2:], ids=lambda x: getattr(x, "__name__", x))
def test_shards_hold_the_same_bytes_and_load_again(case, cls, tmp_path):
    """From two shards or one file to many, with an index that names each tensor's shard."""
    original = tensors(fixture_path(case))
    model = _load(cls, fixture_path(case))
    model.save_pretrained(tmp_path / "shards", max_shard_size="300KB")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == original.keys() and len(set(index.values())) > 2
    assert {path.name for path in (tmp_path / "shards").glob("*.safetensors")} == set(index.values())
    assert_same_bytes(tensors(tmp_path / "shards"), original)
    last = _load(cls, tmp_path / "shards")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, last.state_dict()[name]), name


@pytest.mark.parametrize(("case", "cls"), [LOADERS[2], LOADERS[4]], ids=lambda x: getattr(x, "__name__", x))
def test_a_saved_config_differs_from_the_released_one_by_its_stamp_only(case, cls, tmp_path):
    _load(cls, fixture_path(case)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.pop("transformers_version")
    assert saved == json.loads((fixture_path(case) / "config.json").read_text())


def test_text_taken_out_of_a_composite_repository_keeps_its_names(tmp_path):
    """What was loaded is given back, byte for byte; the tower's tensors are left behind, and said to be nowhere missing."""
    model = _load(KimiLinearForCausalLM, fixture_path(MULTIMODAL))
    model.save_pretrained(tmp_path / "text")
    original = tensors(fixture_path(MULTIMODAL))
    expected = {n: x for n, x in original.items() if n.startswith("language_model.")}
    assert 0 < len(expected) < len(original)
    assert_same_bytes(tensors(tmp_path / "text"), expected)
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["model_type"] == "kimi_linear" and config["architectures"] == ["KimiLinearForCausalLM"]
    for cls in (KimiLinearForCausalLM, AutoModelForCausalLM):
        again = _load(cls, tmp_path / "text")
        assert type(again) is KimiLinearForCausalLM
        assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    assert type(AutoModel.from_pretrained(tmp_path / "text")) is KimiLinearModel
    # Without the prefix, as a server that reads a flat config looks for them:
    slice_checkpoint(tmp_path / "text", tmp_path / "flat", text_only=True)
    bare = {name.removeprefix("language_model."): x for name, x in expected.items()}
    assert_same_bytes(tensors(tmp_path / "flat"), bare)
    again = _load(AutoModelForCausalLM, tmp_path / "flat")
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


def test_a_model_made_from_scratch_saves_the_released_layout(tmp_path):
    """Zero-padded `A_log` for the bounded gate, (1, 1, H, 1) for the softplus one, experts apart, fp32 where released."""
    for name, shape in (("kimi-k3-tiny", (32,)), ("kimi-linear-tiny", (1, 1, 4, 1))):
        config = kimi_hf.preset(name).get_text_config()
        KimiLinearForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / name)
        saved = tensors(tmp_path / name)
        decay = saved["model.layers.0.self_attn.A_log"]
        assert decay.shape == shape
        assert (decay.flatten()[:4] != 0).all() and not decay.flatten()[4:].any()
        assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in saved
        assert not any("gate_up_proj" in key for key in saved)


# FR-5.


def _is_float32(name):
    return any(part in FLOAT32_NAMES for part in name.split("."))


@pytest.mark.parametrize("case", [K3, KIMI_LINEAR, K3_RELEASE])
def test_bf16_loading_keeps_the_fp32_tensors_bit_for_bit(case, tmp_path):
    original = tensors(fixture_path(case))
    model = fresh_model(case, dtype=torch.bfloat16)
    kept = 0
    for name, tensor in model.state_dict().items():
        if _is_float32(name):
            stored = next(x for n, x in original.items() if n.removeprefix("language_model.") == name)
            assert tensor.dtype == torch.float32, name
            stored = stored.flatten()[: tensor.numel()].view_as(tensor)
            assert torch.equal(tensor, stored), name
            kept += 1
        elif tensor.dtype != torch.uint8:
            assert tensor.dtype == torch.bfloat16, name
    assert kept > 10
    model.save_pretrained(tmp_path)
    for name, tensor in tensors(tmp_path).items():
        if _is_float32(name):
            stored = next(x for n, x in original.items() if n.removeprefix("language_model.") in (name, name[15:]))
            assert tensor.dtype == torch.float32 and torch.equal(tensor, stored), name
        else:
            assert tensor.dtype in (torch.bfloat16, torch.uint8), name


def test_a_correction_bias_in_a_narrow_band_around_an_offset_survives(tmp_path):
    """bf16 would merge these values, and the choice of experts with them."""
    stored = tensors(fixture_path(KIMI_LINEAR))
    name = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    stored[name] = 7.0 + torch.linspace(0, 0.01, stored[name].numel())
    (tmp_path / "config.json").write_text((fixture_path(KIMI_LINEAR) / "config.json").read_text())
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model = fresh_model(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(model.state_dict()[name], stored[name])
    assert stored[name].bfloat16().unique().numel() < stored[name].numel() / 2


# FR-2.


@pytest.mark.parametrize(("case", "shape"), [(K3, (16,)), (K3_RELEASE, (16,)), (KIMI_LINEAR, (1, 1, 4, 1))])
def test_each_head_gets_its_own_decay_entry(case, shape):
    model, original = golden_model(case), tensors(fixture_path(case))
    for i, kind in enumerate(model.config.layer_types):
        if kind == "linear_attention":
            stored = next(x for n, x in original.items() if n.endswith(f"layers.{i}.self_attn.A_log"))
            assert stored.shape == shape
            heads = model.config.linear_attn_config["num_heads"]
            assert torch.equal(model.model.layers[i].self_attn.A_log, stored.flatten()[:heads])


@pytest.mark.parametrize("shape", [(4,), (16,), (1, 1, 4, 1)])
def test_every_released_shape_of_the_decay_loads_and_is_given_back(shape, tmp_path):
    stored = tensors(fixture_path(KIMI_LINEAR))
    for name in [name for name in stored if name.endswith("A_log")]:
        padded = torch.zeros(torch.Size(shape).numel())
        padded[:4] = stored[name].flatten()
        stored[name] = padded.view(shape)
    (tmp_path / "config.json").write_text((fixture_path(KIMI_LINEAR) / "config.json").read_text())
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model = fresh_model(tmp_path)
    expected = golden_model(KIMI_LINEAR).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    model.save_pretrained(tmp_path / "again")
    assert_same_bytes(tensors(tmp_path / "again"), stored)


# Heads, bodies, state dicts.


@pytest.mark.parametrize("case", [KIMI_LINEAR, MULTIMODAL])
def test_the_body_of_a_head_checkpoint_and_back(case, tmp_path):
    head = fresh_model(case)
    body = KimiLinearModel.from_pretrained(fixture_path(case), dtype=torch.float32).eval()
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        hidden = body(ids).last_hidden_state
        torch.testing.assert_close(head.lm_head(hidden), head(ids).logits, rtol=0, atol=1e-6)
    body.save_pretrained(tmp_path)
    again, report = KimiLinearForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert report["missing_keys"] == {"lm_head.weight"} and not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again.eval().model(ids).last_hidden_state, hidden)


@pytest.mark.parametrize("case", [K3, K3_PACKED, KIMI_LINEAR])
def test_load_state_dict_takes_what_save_pretrained_wrote(case):
    """The released names, with their prefix, padding and shapes, straight into a model (what Trainer does on resume)."""
    model, released = fresh_model(case), tensors(fixture_path(case))
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        for x in model.state_dict().values():
            x.zero_()
    untouched = copy.copy(released)
    result = model.load_state_dict(released)
    assert not result.missing_keys and not result.unexpected_keys
    assert untouched.keys() == released.keys(), "the caller's dictionary was changed"
    for name, x in model.state_dict().items():
        assert torch.equal(x, expected[name]), name
    model.load_state_dict(expected)


def test_load_state_dict_names_an_absent_expert():
    released = tensors(fixture_path(KIMI_LINEAR))
    del released["model.layers.3.block_sparse_moe.experts.5.w3.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.3\.block_sparse_moe\.experts\.5\.w3\.weight"):
        fresh_model(KIMI_LINEAR).load_state_dict(released)


def test_load_state_dict_still_reports_what_is_missing():
    released = tensors(fixture_path(KIMI_LINEAR))
    del released["model.layers.3.input_layernorm.weight"]
    result = fresh_model(KIMI_LINEAR).load_state_dict(released, strict=False)
    assert result.missing_keys == ["model.layers.3.input_layernorm.weight"] and not result.unexpected_keys
    with pytest.raises(RuntimeError, match=r"layers\.3\.input_layernorm"):
        fresh_model(KIMI_LINEAR).load_state_dict(released)


def test_a_released_state_dict_can_be_given_to_from_pretrained():
    config = golden_model(KIMI_LINEAR).config
    model = KimiLinearForCausalLM.from_pretrained(
        None, config=copy.deepcopy(config), state_dict=tensors(fixture_path(KIMI_LINEAR)), dtype=torch.float32
    )
    expected = golden_model(KIMI_LINEAR).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


def test_load_state_dict_of_the_composite_model_and_of_its_text_part():
    released = tensors(fixture_path(MULTIMODAL))
    whole = _load(AutoModelForCausalLM, fixture_path(MULTIMODAL))
    expected = {name: x.clone() for name, x in whole.state_dict().items()}
    text = KimiLinearForCausalLM(copy.deepcopy(whole.config.text_config))
    for model, prefix in ((whole, ""), (text, "language_model.")):
        with torch.no_grad():
            for x in model.state_dict().values():
                x.zero_()
        result = model.load_state_dict({n: x for n, x in released.items() if n.startswith(prefix)})
        assert not result.missing_keys and not result.unexpected_keys
        for name, x in model.state_dict().items():
            assert torch.equal(x, expected[prefix + name]), name
