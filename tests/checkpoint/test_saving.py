"""A save is there whole or not at all; an older one beside it survives every failure."""

import json

import pytest
import torch
from safetensors.torch import load_file

import kimi_hf
from kimi_hf import KimiLinearForCausalLM, preset

from ..conftest import fixture_path
from ..modeling.golden import KIMI_LINEAR, fresh_model, golden_model


@pytest.fixture(scope="module")
def small():
    """A few hundred thousand parameters in bf16, several shards of 100 KB."""
    torch.manual_seed(0)
    config = preset("kimi-linear-tiny")
    for name, value in {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_experts": 4}.items():
        setattr(config, name, value)
    config.linear_attn_config |= {"kda_layers": [1], "full_attn_layers": [2]}
    return KimiLinearForCausalLM(config).to(torch.bfloat16)


def _contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else None


def _fail_in_shard(monkeypatch, number):
    """The disk fills up while shard `number` is written, half of it already there."""
    import transformers.modeling_utils as utils

    original, calls = utils.safe_save_file, []

    def save(tensors, path, *args, **kwargs):
        calls.append(path)
        original(tensors, path, *args, **kwargs)
        if len(calls) == number:
            with open(path, "r+b") as file:
                file.truncate(100)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(utils, "safe_save_file", save)


def _fail_in_config(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kimi_hf.KimiLinearConfig, "to_json_file", fail)


@pytest.mark.parametrize("fail", [lambda m: _fail_in_shard(m, 1), lambda m: _fail_in_shard(m, 2), _fail_in_config])
@pytest.mark.parametrize("before", ["nothing", "an older save"])
def test_a_failed_save_leaves_what_was_there(fail, before, small, tmp_path, monkeypatch):
    target = tmp_path / "model"
    if before != "nothing":
        golden_model(KIMI_LINEAR).save_pretrained(target)
        (target / "notes.txt").write_text("mine")
    old = _contents(target)
    fail(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        small.save_pretrained(target, max_shard_size="50KB")
    assert _contents(target) == old
    assert list(tmp_path.iterdir()) == ([target] if old else [])
    if old:
        monkeypatch.undo()
        assert torch.equal(fresh_model(target).lm_head.weight, golden_model(KIMI_LINEAR).lm_head.weight)


def test_an_interrupted_save_leaves_what_was_there(small, tmp_path, monkeypatch):
    import transformers.modeling_utils as utils

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(utils, "safe_save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        small.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_new_layout_replaces_the_old_one_and_leaves_other_files(small, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    small.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    small.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    small.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = {path.name for path in tmp_path.glob("*.safetensors")}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert shards == set(index["weight_map"].values()) and "model.safetensors" not in shards
    assert (tmp_path / "tokenizer_config.json").read_text() == "{}"


def test_a_model_can_be_saved_where_it_was_loaded_from(small, tmp_path):
    small.save_pretrained(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    model = KimiLinearForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        model.lm_head.weight += 1
    model.save_pretrained(tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    for name, tensor in before.items():
        expected = tensor + 1 if name == "lm_head.weight" else tensor
        assert torch.equal(after[name], expected), name


def test_saving_onto_a_file_is_refused(small, tmp_path):
    (tmp_path / "model").write_text("a file")
    with pytest.raises(NotADirectoryError, match="name a folder"):
        small.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "a file"


def test_missing_parents_are_made_and_the_folder_is_an_ordinary_one(small, tmp_path):
    small.save_pretrained(tmp_path / "a" / "b")
    (tmp_path / "made_by_hand").mkdir()
    assert (tmp_path / "a" / "b").stat().st_mode == (tmp_path / "made_by_hand").stat().st_mode
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_only_the_main_process_writes(small, tmp_path):
    small.save_pretrained(tmp_path / "model", is_main_process=False)
    assert not list((tmp_path / "model").glob("*.json")) and not list((tmp_path / "model").glob("*.safetensors"))


def test_fused_names_on_request(small, tmp_path):
    """`save_original_format=False` writes the model's own names, and those load as well."""
    small.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.block_sparse_moe.experts.gate_up_proj" in names
    again = KimiLinearForCausalLM.from_pretrained(tmp_path)
    for name, tensor in small.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_an_explicit_state_dict_is_saved_in_the_released_layout(small, tmp_path):
    """What distributed trainers hand over: a gathered state dict with the model's own names."""
    state = {name: tensor + 1 for name, tensor in small.state_dict().items()}
    small.save_pretrained(tmp_path, state_dict=state)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    fused = state["model.layers.1.block_sparse_moe.experts.gate_up_proj"]
    assert torch.equal(stored[name], fused[2].chunk(2)[1])
    assert stored["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)


def test_the_fixture_is_untouched_by_loading_and_saving(tmp_path):
    before = (fixture_path(KIMI_LINEAR) / "model.safetensors").read_bytes()
    model = fresh_model(KIMI_LINEAR)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path)
    assert (fixture_path(KIMI_LINEAR) / "model.safetensors").read_bytes() == before
