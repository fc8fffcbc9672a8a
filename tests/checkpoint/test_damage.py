"""Damaged and unfitting checkpoints are refused before any forward, by file and tensor; nothing is silently random."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import kimi_hf
from kimi_hf import KimiK3ForConditionalGeneration, KimiLinearForCausalLM, KimiLinearModel
from kimi_hf.errors import CheckpointError, ConfigError, KimiHfError

from ..conftest import fixture_path
from ..modeling.golden import K3, K3_RELEASE, KIMI_LINEAR

LAYER = "model.layers.2."
EXPERT = "model.layers.2.block_sparse_moe.experts.3."


def _load(folder, cls=KimiLinearForCausalLM, **kwargs):
    return cls.from_pretrained(folder, dtype=torch.float32, **kwargs)


@pytest.fixture
def damaged(tmp_path):
    """A function that writes a copy of a fixture with changed tensors and config, and gives its folder."""

    def make(case=KIMI_LINEAR, tensors=None, config=None):
        source = fixture_path(case)
        stored = load_file(source / "model.safetensors")
        fields = json.loads((source / "config.json").read_text())
        if tensors:
            tensors(stored)
        if config:
            config(fields)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return make


def _bytes_of(tmp_path, change, case=KIMI_LINEAR):
    """A copy of a one-file fixture whose bytes went through `change`."""
    shutil.copy(fixture_path(case) / "config.json", tmp_path)
    content = bytearray((fixture_path(case) / "model.safetensors").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(change(content))
    return tmp_path


# The file itself.


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 60_000, -1], ids=lambda n: f"{n} bytes")
def test_a_truncated_file(keep, tmp_path):
    folder = _bytes_of(tmp_path, lambda content: content[:keep])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        _load(folder)


def _flip_length(content):
    content[0:8] = struct.pack("<Q", 1 << 60)
    return content


def _break_json(content):
    content[20] = 0xFF
    return content


def _rename_a_tensor(content):
    """One flipped bit in a name: an absent tensor and an unknown one, in a layer that is otherwise there."""
    at = content.index(b"model.layers.2.input_layernorm")
    content[at + 15] ^= 0x01
    return content


def _flip_a_dtype(content):
    at = content.index(b'"dtype":"F32"')
    content[at + 9 : at + 12] = b"F3\x32".replace(b"3\x32", b"99")
    return content


def _flip_an_offset(content):
    at = content.index(b'"data_offsets":[') + 16
    content[at] = ord("9")
    return content


@pytest.mark.parametrize("flip", [_flip_length, _break_json, _rename_a_tensor, _flip_a_dtype, _flip_an_offset])
def test_a_flipped_bit_in_the_header(flip, tmp_path):
    with pytest.raises(CheckpointError, match="model.safetensors"):
        _load(_bytes_of(tmp_path, flip))


def test_bytes_behind_the_last_tensor(tmp_path):
    with pytest.raises(CheckpointError, match="model.safetensors"):
        _load(_bytes_of(tmp_path, lambda content: content + b"\0" * 64))


def test_an_empty_file_and_another_format(tmp_path):
    for content in (b"", b"PK\x03\x04" + b"\0" * 200, b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\n"):
        with pytest.raises(CheckpointError, match="model.safetensors"):
            _load(_bytes_of(tmp_path, lambda _, content=content: content))


# Shards and their index.


@pytest.fixture
def shards(tmp_path):
    for path in fixture_path(K3_RELEASE).glob("*[!l].*"):
        if "golden" not in path.name:
            shutil.copy(path, tmp_path)
    return tmp_path


def _edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


FIRST, SECOND = (f"model-0000{i}-of-000002.safetensors" for i in (1, 2))


def test_an_absent_shard_is_named(shards):
    (shards / SECOND).unlink()
    with pytest.raises(CheckpointError, match=SECOND):
        _load(shards)


def test_an_index_that_names_an_unknown_shard(shards):
    _edit_index(
        shards, lambda index: index["weight_map"].update({"language_model.lm_head.weight": "model-9.safetensors"})
    )
    with pytest.raises(CheckpointError, match="model-9.safetensors"):
        _load(shards)


def test_an_index_that_puts_a_tensor_into_the_wrong_shard(shards):
    def swap(index):
        name = next(name for name, shard in index["weight_map"].items() if shard == FIRST)
        index["weight_map"][name] = SECOND

    _edit_index(shards, swap)
    with pytest.raises(CheckpointError, match="model-0000[12]-of-000002"):
        _load(shards)


def test_swapped_shards(shards):
    (shards / FIRST).rename(shards / "other")
    (shards / SECOND).rename(shards / FIRST)
    (shards / "other").rename(shards / SECOND)
    with pytest.raises(CheckpointError, match="model-0000[12]-of-000002"):
        _load(shards)


def test_a_truncated_shard(shards):
    content = (shards / SECOND).read_bytes()
    (shards / SECOND).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=SECOND):
        _load(shards)


def test_an_index_that_is_no_json(shards):
    (shards / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        _load(shards)


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


def test_a_tensor_of_another_kind_is_named(damaged):
    def to_bytes(stored):
        stored[LAYER + "self_attn.q_proj.weight"] = torch.zeros(64, 64, dtype=torch.uint8)

    with pytest.raises(CheckpointError, match=LAYER + r"self_attn\.q_proj\.weight in model\.safetensors is U8"):
        _load(damaged(tensors=to_bytes))


@pytest.mark.parametrize("value", [1e-3, float("nan"), float("-inf")])
def test_a_decay_tail_that_is_not_zero(damaged, value):
    name = "language_model.model.layers.2.self_attn.A_log"

    def spoil(stored):
        stored[name][9] = value

    with pytest.raises(CheckpointError, match=rf"{name} in model\.safetensors.*num_heads"):
        _load(damaged(K3, tensors=spoil))


def test_an_unknown_tensor_is_reported_and_a_whole_unknown_layer_too(damaged):
    def add(stored):
        stored["model.layers.2.self_attn.mystery.weight"] = torch.zeros(2)

    model, report = _load(damaged(tensors=add), output_loading_info=True)
    assert report["unexpected_keys"] == {"model.layers.2.self_attn.mystery.weight"} and not report["missing_keys"]


def test_a_missing_head_is_reported(damaged):
    model, report = _load(damaged(tensors=lambda stored: stored.pop("lm_head.weight")), output_loading_info=True)
    assert report["missing_keys"] == {"lm_head.weight"}


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


# A repository by name: its files are there to be looked at once transformers has fetched them.


@pytest.fixture
def repository(tmp_path, damaged, monkeypatch):
    """A function that puts a damaged copy into a download cache as `someone/kimi` and loads it by that name."""

    def load(**changes):
        folder = damaged(**changes)
        snapshot = tmp_path / "cache" / "models--someone--kimi" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(folder / name, snapshot)
        refs = snapshot.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text("0" * 40)
        return _load("someone/kimi", cache_dir=tmp_path / "cache", local_files_only=True)

    return load


def test_a_repository_loads_by_name(repository):
    assert type(repository()) is KimiLinearForCausalLM


def test_a_repository_without_the_w2_of_a_layer(repository):
    """Everywhere else this is a warning and random experts."""

    def drop(stored):
        for name in [n for n in stored if n.startswith("model.layers.2.") and n.endswith("w2.weight")]:
            del stored[name]

    with pytest.raises(
        CheckpointError, match=r"someone/kimi does not.*\s*missing: model\.layers\.2\.block_sparse_moe\.experts\.0\.w2"
    ):
        repository(tensors=drop)


def test_a_repository_without_a_norm(repository):
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        repository(tensors=lambda stored: stored.pop("model.norm.weight"))
