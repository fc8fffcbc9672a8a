"""Damaged and unfitting checkpoints are refused before any forward, by file and tensor; nothing is silently random."""

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import kimi_hf
from kimi_hf import KimiK3ForConditionalGeneration, KimiLinearForCausalLM, KimiLinearModel
from kimi_hf.errors import CheckpointError, ConfigError, KimiHfError

from ..conftest import fixture_path
from ..contract.tiny import TINY
from ..modeling.golden import K3, KIMI_LINEAR

LAYER = "model.layers.2."
EXPERT = "model.layers.2.block_sparse_moe.experts.3."


def _load(folder, cls=KimiLinearForCausalLM, **kwargs):
    return cls.from_pretrained(folder, dtype=torch.float32, **kwargs)


# Tensors.


@pytest.mark.parametrize("which", ["w1", "w2", "w3"])
def test_an_absent_expert_is_named(damaged, which):
    folder = damaged(tensors=lambda stored: stored.pop(f"{EXPERT}{which}.weight"))
    with pytest.raises(CheckpointError, match=rf"experts\.3\.{which}\.weight"):
        _load(folder)


def test_all_of_one_matrix_of_a_layer_absent(damaged):
    """The case that would load as random experts with a warning."""

    def drop(stored):
        for name in [n for n in stored if n.startswith("model.layers.2.") and n.endswith("w2.weight")]:
            del stored[name]

    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.block_sparse_moe\.experts\.0\.w2\.weight"):
        _load(damaged(tensors=drop))


def test_the_last_expert_absent(damaged):
    """Stacking by order alone would give a smaller layer; the count comes from the config."""

    def drop(stored):
        for which in ("w1", "w2", "w3"):
            del stored[f"model.layers.2.block_sparse_moe.experts.15.{which}.weight"]

    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.block_sparse_moe\.experts\.15\."):
        _load(damaged(tensors=drop))


@pytest.mark.parametrize(
    "name",
    [
        "input_layernorm.weight",
        "self_attn.A_log",
        "self_attn.q_conv1d.weight",
        "self_attn.dt_bias",
        "block_sparse_moe.gate.e_score_correction_bias",
        "block_sparse_moe.gate.weight",
    ],
)
def test_an_absent_tensor_is_named(damaged, name):
    with pytest.raises(CheckpointError, match=LAYER + name):
        _load(damaged(tensors=lambda stored: stored.pop(LAYER + name)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("self_attn.q_proj.weight", (64, 65)),
        ("self_attn.q_proj.weight", (64 * 64,)),
        ("self_attn.A_log", (3,)),
        ("self_attn.A_log", (5,)),
        ("self_attn.dt_bias", (63,)),
        ("self_attn.q_conv1d.weight", (64, 4)),
        ("block_sparse_moe.experts.3.w1.weight", (32, 63)),
        ("block_sparse_moe.gate.weight", (15, 64)),
        ("block_sparse_moe.gate.e_score_correction_bias", (15,)),
    ],
)
def test_a_mis_shaped_tensor_is_named_with_both_shapes(damaged, name, shape):
    def reshape(stored):
        stored[LAYER + name] = torch.zeros(shape)

    with pytest.raises(CheckpointError) as error:
        _load(damaged(tensors=reshape))
    assert LAYER + name in str(error.value) and "model.safetensors" in str(error.value)
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "told"),
    [(torch.uint8, "U8"), (torch.int64, "I64"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")],
)
def test_a_tensor_of_another_kind_is_named(dtype, told, damaged):
    def change(stored):
        stored[LAYER + "self_attn.q_proj.weight"] = torch.zeros(64, 64, dtype=dtype)

    with pytest.raises(CheckpointError, match=LAYER + rf"self_attn\.q_proj\.weight in model\.safetensors is {told}"):
        _load(damaged(tensors=change))


def test_one_expert_too_many_is_named(damaged):
    """Stacking by order alone would give a larger layer."""

    def add(stored):
        for which in ("w1", "w2", "w3"):
            stored[f"{LAYER}block_sparse_moe.experts.16.{which}.weight"] = torch.zeros(2)

    with pytest.raises(
        CheckpointError, match=r"experts\.16\.w1\.weight .* in model\.safetensors is an expert too many"
    ):
        _load(damaged(tensors=add))


@pytest.mark.parametrize("cls", [KimiLinearForCausalLM, KimiLinearModel])
def test_a_head_of_another_vocabulary_is_named(cls, damaged):
    def cut(stored):
        stored["lm_head.weight"] = stored["lm_head.weight"][:-3].clone()

    folder = damaged(tensors=cut)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight in model\.safetensors is \[147, 64\], the config gives \[150"
    ):
        _load(folder, cls)
    assert _load(folder, cls, ignore_mismatched_sizes=True).config.vocab_size == 150


def test_a_missing_embedding_is_named(damaged):
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight"):
        _load(damaged(tensors=lambda stored: stored.pop("model.embed_tokens.weight")))


@pytest.mark.parametrize("value", [1e-3, float("nan"), float("-inf")])
def test_a_decay_tail_that_is_not_zero(damaged, value):
    name = "language_model.model.layers.2.self_attn.A_log"

    def spoil(stored):
        stored[name][9] = value

    with pytest.raises(CheckpointError, match=rf"{name} in model\.safetensors.*num_heads"):
        _load(damaged(K3, tensors=spoil))


def test_unknown_tensors_are_reported_with_their_file(damaged, caplog):
    names = {"model.layers.2.self_attn.mystery.weight", "model.layers.8.input_layernorm.weight"}
    folder = damaged(tensors=lambda stored: stored.update({name: torch.zeros(2) for name in names}))
    with caplog.at_level(logging.WARNING):
        model, report = _load(folder, output_loading_info=True)
    assert report["unexpected_keys"] == names and not report["missing_keys"]
    for name in names:
        assert f"unexpected: {name} F32 [2] in model.safetensors has no place in this model" in caplog.text


def test_a_missing_head_is_refused_where_the_model_with_the_head_was_saved(damaged):
    with pytest.raises(CheckpointError, match=r"holds no lm_head\.weight, which would be random"):
        _load(damaged(tensors=lambda stored: stored.pop("lm_head.weight")))


def test_a_text_checkpoint_is_no_multimodal_model():
    """The fixture names the composite class but holds no tower; its full-size `vision_config` does not fit either."""
    with pytest.raises(ConfigError, match=r"text_hidden_size is 7168.*KimiLinearForCausalLM"):
        _load(fixture_path(K3), KimiK3ForConditionalGeneration)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.encoder.blocks.1.wqkv.weight",
        "vision_tower.encoder.final_layernorm.weight",
        "mm_projector.proj.0.weight",
        "language_model.model.norm.weight",
        "language_model.model.output_attn_res_proj.weight",
    ],
)
def test_a_part_is_there_whole_or_not_at_all(damaged, name):
    folder = damaged("k3_multimodal_tiny", tensors=lambda stored: stored.pop(name))
    with pytest.raises(CheckpointError, match=rf"missing: {name}"):
        _load(folder, KimiK3ForConditionalGeneration)


def test_a_whole_layer_absent(damaged):
    def drop(stored):
        for name in [name for name in stored if name.startswith("model.layers.7.")]:
            del stored[name]

    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.7\.input_layernorm\.weight"):
        _load(damaged(tensors=drop))


def test_a_config_for_another_size(damaged):
    def widen(config):
        config["moe_intermediate_size"] *= 2

    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight in model\.safetensors is \[24, 64\]"):
        _load(damaged(config=widen))


def test_a_config_that_calls_a_kda_layer_full_attention(damaged):
    def swap(config):
        config["linear_attn_config"]["kda_layers"].remove(3)
        config["linear_attn_config"]["full_attn_layers"].append(3)

    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.kv_a_proj_with_mqa"):
        _load(damaged(config=swap))


# The ladder's models, which have no released layout: their own empty modules say what must be there.


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda stored: stored.pop("model.layers.1.block_sparse_moe.experts.1.w2.weight"),
            r"missing: .*experts\.1\.w2",
        ),
        (lambda stored: stored.pop("model.embed_tokens.weight"), r"missing: embed_tokens\.weight"),
        (lambda stored: stored.pop("model.norm.weight"), r"missing: norm\.weight"),
        (
            lambda stored: stored.update({"model.layers.1.block_sparse_moe.experts.99.w1.weight": torch.zeros(2)}),
            r"unexpected: model\.layers\.1\..*experts\.99\.w1\.weight .* in model\.safetensors",
        ),
        (
            lambda stored: stored.update({"model.norm.weight": stored["model.norm.weight"].int()}),
            r"model\.norm\.weight in model\.safetensors is I32",
        ),
        (
            lambda stored: stored.update({"model.norm.weight": torch.ones(3)}),
            r"model\.norm\.weight in model\.safetensors is \[3\]",
        ),
    ],
)
def test_a_ladder_model(change, told, tmp_path):
    next(tiny for tiny in TINY if tiny.name == "ladder-mixture").build().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=told):
        kimi_hf.LadderForCausalLM.from_pretrained(tmp_path)


# The folder and its config.


@pytest.mark.parametrize("cls", [KimiLinearForCausalLM, KimiLinearModel, AutoModelForCausalLM, AutoModel])
def test_a_folder_without_config(tmp_path, cls):
    shutil.copy(fixture_path(KIMI_LINEAR) / "model.safetensors", tmp_path)
    with pytest.raises((OSError, ValueError)) as error:
        _load(tmp_path, cls)
    assert "config.json" in str(error.value) and str(tmp_path) in str(error.value)


def test_a_folder_without_weights(tmp_path):
    shutil.copy(fixture_path(KIMI_LINEAR) / "config.json", tmp_path)
    with pytest.raises(OSError, match="model.safetensors"):
        _load(tmp_path)


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        _load(tmp_path / "nowhere")


def test_an_unknown_model_type(damaged):
    folder = damaged(config=lambda config: config.update(model_type="kimi_k9"))
    with pytest.raises(ValueError, match="kimi_k9"):
        AutoConfig.from_pretrained(folder)
    with pytest.raises(ValueError, match="kimi_k9"):
        _load(folder, AutoModelForCausalLM)


def test_a_config_that_is_no_json(damaged):
    folder = damaged()
    (folder / "config.json").write_text('{"model_type": "kimi_linear",')
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        _load(folder)


def test_a_contradicting_config_is_refused_before_weights(damaged):
    folder = damaged(config=lambda config: config.update(num_experts_per_token=17))
    with pytest.raises(ConfigError, match="num_experts_per_token"):
        _load(folder)


def test_every_refusal_is_of_one_family():
    assert issubclass(CheckpointError, KimiHfError) and issubclass(KimiHfError, ValueError)
    assert kimi_hf.KimiHfError is KimiHfError
