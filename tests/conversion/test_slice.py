"""Slices hold exactly the chosen tensors and rows, their configs say so, and what is wrong is refused by field."""

import json

import pytest
import torch

from kimi_hf.checkpoint.check import check_checkpoint
from kimi_hf.checkpoint.geometry import is_packed, load_config
from kimi_hf.configuration import KimiK3Config, KimiLinearConfig
from kimi_hf.conversion import slice as slice_module
from kimi_hf.conversion.convert import convert
from kimi_hf.conversion.slice import parse_numbers, slice_checkpoint
from kimi_hf.errors import CheckpointError, ConfigError

from .helpers import command, copy_checkpoint, edit_config, hashes, read_all

TEXT = "language_model.model."


@pytest.fixture
def release(goldens):
    return goldens("k3_release_tiny/config.json").parent


@pytest.fixture
def linear(goldens):
    return goldens("kimi_linear_tiny/config.json").parent


def sliced(source, out, **options):
    out, notes = slice_checkpoint(source, out, **options)
    config = load_config(out)
    check_checkpoint(out, config)
    return read_all(out), config, notes


def test_chosen_layers(release, tmp_path):
    before, source = hashes(release), read_all(release)
    out, config, notes = sliced(release, tmp_path / "out", layers=[0, 3, 2])
    assert config["text_config"]["num_hidden_layers"] == 3 and not notes
    linear = config["text_config"]["linear_attn_config"]
    assert linear["kda_layers"] == [1, 3] and linear["full_attn_layers"] == [2]
    assert config["text_config"]["first_k_dense_replace"] == 1
    for name, tensor in out.items():
        old = name
        if ".layers." in name:
            at = int(name.split(".")[3])
            old = name.replace(f".layers.{at}.", f".layers.{[0, 3, 2][at]}.")
        assert torch.equal(tensor, source[old]), name
    assert "vision_tower.patch_embed.proj.weight" in out and hashes(release) == before
    KimiK3Config(**config)


def test_layers_without_the_dense_one(release, tmp_path):
    _, config, _ = sliced(release, tmp_path / "out", layers=[2, 4])
    assert config["text_config"]["first_k_dense_replace"] == 0


def test_dense_layer_behind_a_sparse_one(release, tmp_path):
    with pytest.raises(ConfigError, match="keep dense layers in front"):
        slice_checkpoint(release, tmp_path / "out", layers=[1, 0])


@pytest.mark.parametrize("layers", [[0, 5], [-1], [1, 1], []])
def test_impossible_layers(release, tmp_path, layers):
    with pytest.raises(ConfigError, match="choose distinct layers from 0 to 4"):
        slice_checkpoint(release, tmp_path / "out", layers=layers)


def test_chosen_experts(release, tmp_path):
    source = read_all(release)
    out, config, _ = sliced(release, tmp_path / "out", experts=[6, 1])
    assert config["text_config"]["num_experts"] == 2 and config["text_config"]["num_experts_per_token"] == 2
    stem = f"{TEXT}layers.3.block_sparse_moe."
    for name in ("gate.weight", "gate.e_score_correction_bias"):
        assert torch.equal(out[stem + name], source[stem + name][[6, 1]])
    for new, old in enumerate([6, 1]):
        for which in ("w1.weight_packed", "w2.weight_scale", "w3.weight_packed"):
            assert torch.equal(out[f"{stem}experts.{new}.{which}"], source[f"{stem}experts.{old}.{which}"])
    assert is_packed(config)


def test_experts_by_layer(linear, tmp_path):
    source = read_all(linear)
    choice = {layer: [layer, 15 - layer] for layer in (3, 5)}
    out, _, _ = sliced(linear, tmp_path / "out", layers=[0, 5, 3], experts=choice)
    for new, old in ((1, 5), (2, 3)):
        for place, expert in enumerate(choice[old]):
            found = out[f"model.layers.{new}.block_sparse_moe.experts.{place}.w2.weight"]
            assert torch.equal(found, source[f"model.layers.{old}.block_sparse_moe.experts.{expert}.w2.weight"])
        assert torch.equal(
            out[f"model.layers.{new}.block_sparse_moe.gate.weight"],
            source[f"model.layers.{old}.block_sparse_moe.gate.weight"][choice[old]],
        )


@pytest.mark.parametrize("experts", [[8], [0, 0], [], {1: [0], 2: [0, 1], 3: [0], 4: [0]}, {1: [0]}])
def test_impossible_experts(release, tmp_path, experts):
    with pytest.raises(ConfigError, match="experts of layer"):
        slice_checkpoint(release, tmp_path / "out", experts=experts)


def test_grouped_router_keeps_its_experts(linear, tmp_path):
    source = copy_checkpoint(linear, tmp_path / "source")
    edit_config(source, lambda config: config.update(num_expert_group=4, topk_group=2))
    with pytest.raises(ConfigError, match="num_expert_group is 4"):
        slice_checkpoint(source, tmp_path / "out", experts=[0, 1])


def test_language_model_only(release, tmp_path):
    source = read_all(release)
    out, config, _ = sliced(release, tmp_path / "out", text_only=True)
    assert config["model_type"] == "kimi_linear" and config["architectures"] == ["KimiLinearForCausalLM"]
    assert "text_config" not in config and is_packed(config)
    expected = {name.removeprefix("language_model."): t for name, t in source.items() if name.startswith("language_")}
    assert out.keys() == expected.keys() and all(torch.equal(out[name], expected[name]) for name in out)
    KimiLinearConfig(**config)


def test_vocabulary_rows(linear, tmp_path):
    source = read_all(linear)
    rows = [5, 2, 0, None, 1, None, 149]
    out, config, notes = sliced(linear, tmp_path / "out", rows=rows, seed=3)
    assert config["vocab_size"] == 7
    assert (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]) == (2, 4, 1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kept = [at for at, row in enumerate(rows) if row is not None]
        assert torch.equal(out[name][kept], source[name][[row for row in rows if row is not None]])
        new = out[name][[3, 5]]
        assert 0.01 < new.std() < 0.03 and not torch.equal(new[0], new[1])
    assert not torch.equal(out["model.embed_tokens.weight"][3], out["lm_head.weight"][3])
    assert notes == ["tokenizer files were not copied: the vocabulary changed"]
    again, _, _ = sliced(linear, tmp_path / "again", rows=rows, seed=3)
    assert torch.equal(out["lm_head.weight"], again["lm_head.weight"])


def test_lost_special_tokens_are_told(release, tmp_path):
    _, config, notes = sliced(release, tmp_path / "out", rows=[0, 10, 20])
    assert config["text_config"]["eos_token_id"] is None and config["pad_token_id"] == 0
    assert config["media_placeholder_token_id"] is None
    assert "eos_token_id is now null: its token was cut" in notes


def test_row_that_does_not_exist(linear, tmp_path):
    with pytest.raises(ConfigError, match="has 150 rows, row 150 was asked for"):
        slice_checkpoint(linear, tmp_path / "out", rows=[150])


@pytest.mark.parametrize("layout", ["fused", "fused-packed", "bf16"])
def test_every_layout_is_kept(release, tmp_path, layout):
    """Slicing a converted folder equals converting the slice."""
    options = {"layers": [0, 1, 4], "experts": [7, 0, 3]}
    one = slice_checkpoint(convert(release, tmp_path / "a", layout), tmp_path / "b", **options)[0]
    other = convert(slice_checkpoint(release, tmp_path / "c", **options)[0], tmp_path / "d", layout)
    left, right = read_all(one), read_all(other)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_partly_fetched_source(release, tmp_path):
    """Layers 0 and 1 lie in the first shard but for the embeddings: the message says which shard to fetch."""
    source = copy_checkpoint(release, tmp_path / "source")
    (source / "model-00002-of-000002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tensor .*: model-00002-of-000002.safetensors, .* is absent"):
        slice_checkpoint(source, tmp_path / "out", layers=[0, 2])


def test_command(release, tmp_path, capsys):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([3, 1, 2]))
    arguments = ["--num-layers", 4, "--experts", "0-2,7", "--text-only", "--vocab-rows", rows, "--vocab-size", 8]
    assert command(slice_module, release, tmp_path / "out", *arguments) == 0
    assert "note: pad_token_id is now null" in capsys.readouterr().out
    config = load_config(tmp_path / "out")
    assert (config["num_hidden_layers"], config["num_experts"], config["vocab_size"]) == (4, 4, 8)
    by_layer = tmp_path / "experts.json"
    by_layer.write_text(json.dumps({"1": [0], "2": [5]}))
    command(slice_module, release, tmp_path / "more", "--layers", "1-2", "--experts", by_layer)
    assert load_config(tmp_path / "more")["text_config"]["num_experts"] == 1


def test_number_lists():
    assert parse_numbers("0-3,8, 10-11") == [0, 1, 2, 3, 8, 10, 11]
    for text in ("", "3-1", "a", "1,,2", "-1"):
        with pytest.raises(slice_module.argparse.ArgumentTypeError):
            parse_numbers(text)
