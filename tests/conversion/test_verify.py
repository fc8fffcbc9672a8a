"""`verify` and `info`: first differences in any pair of layouts, and sizes from headers."""

import json

import pytest
import torch

from kimi_hf.checkpoint.geometry import TextGeometry, load_config
from kimi_hf.checkpoint.shards import open_checkpoint
from kimi_hf.configuration import census, preset
from kimi_hf.conversion import info as info_module
from kimi_hf.conversion import verify as verify_module
from kimi_hf.conversion.convert import convert
from kimi_hf.conversion.info import describe_folder, stored_parts
from kimi_hf.conversion.make_tiny import make_tiny, shrink_config
from kimi_hf.conversion.slice import slice_checkpoint
from kimi_hf.conversion.verify import compare, verify_config
from kimi_hf.errors import CheckpointError

from .helpers import command, copy_checkpoint, edit_tensors

LAYER = "model.layers.2"


@pytest.fixture
def release(goldens):
    return goldens("k3_release_tiny/config.json").parent


@pytest.mark.parametrize("layout", ["fused", "fused-packed", "bf16"])
def test_layouts_compare_equal(release, tmp_path, layout):
    out = convert(release, tmp_path / "out", layout)
    for pair in ((release, out), (out, release)):
        result = compare(*pair)
        assert result.count == 0 and result.compared == 338 - 192 + 96
    assert command(verify_module, release, out) == 0


@pytest.mark.parametrize("layout", ["fused", "bf16"])
def test_one_changed_weight_is_found(release, tmp_path, layout, capsys):
    out = convert(release, tmp_path / "out", layout)
    fused = layout == "fused"
    stem = f"language_{LAYER}".replace("language_", "language_model.") + ".block_sparse_moe.experts."
    name = f"{stem}gate_up_proj" if fused else f"{stem}3.w3.weight"
    edit_tensors(out, lambda t: (t[name][3, 32 + 4] if fused else t[name][4])[17].fill_(9))
    assert command(verify_module, release, out) == 1
    printed = capsys.readouterr().out
    assert f"{LAYER}.block_sparse_moe.experts.3.w3.weight[4, 17]:" in printed and "against 9.0" in printed
    assert "1 differences" in printed


def test_signed_zero_is_a_difference(goldens, tmp_path):
    source = convert(goldens("k3_mxfp4_tiny/config.json").parent, tmp_path / "a", "bf16")
    other = copy_checkpoint(source, tmp_path / "b")
    name = f"language_model.{LAYER}.block_sparse_moe.experts.0.w1.weight"

    def flip(tensors):
        zero = (tensors[name] == 0).nonzero()[0]
        tensors[name][tuple(zero)] = -tensors[name][tuple(zero)]

    edit_tensors(other, flip)
    result = compare(source, other)
    assert result.count == 1 and "0.0 against" in result.differences[0]


def test_packed_bytes_and_common_tensors(release, tmp_path):
    other = convert(release, tmp_path / "b", "packed", max_shard_bytes=10**9)

    def edit(tensors):
        tensors[f"language_model.{LAYER}.block_sparse_moe.experts.7.w2.weight_scale"][1, 0] += 1
        tensors["language_model.model.norm.weight"][5] = 3
        tensors["language_model.model.layers.0.self_attn.A_log"][1] = 7

    edit_tensors(other, edit)
    lines = compare(release, other).differences
    assert len(lines) == 3
    assert any(line.startswith(f"{LAYER}.block_sparse_moe.experts.7.w2.weight_scale: byte 1 is") for line in lines)
    assert any(line.startswith("model.norm.weight[5]:") and "against 3.0" in line for line in lines)
    assert any(line.startswith("model.layers.0.self_attn.A_log[1]:") for line in lines)


def test_dtypes_compare_by_value(goldens, tmp_path):
    source = goldens("kimi_linear_tiny/config.json").parent
    other = copy_checkpoint(source, tmp_path / "b")
    edit_tensors(other, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].double()}))
    assert not compare(source, other).count
    edit_tensors(other, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].bfloat16()}))
    assert "(F32 against BF16)" in compare(source, other).differences[0]


def test_prefixes_and_decay_shapes_do_not_count(release, tmp_path):
    text = slice_checkpoint(release, tmp_path / "text", text_only=True)[0]
    lines = compare(release, text, shown=100).differences
    assert len(lines) == 18 and all("vision_tower." in line or "mm_projector." in line for line in lines)


def test_different_sizes(release, tmp_path):
    smaller = slice_checkpoint(release, tmp_path / "s", experts=[0, 1])[0]
    result = compare(release, smaller)
    assert any("num_experts is 8 against 2" in line for line in result.differences)
    assert any("gate.weight: shape [8, 64] against [2, 64]" in line for line in result.differences)


def test_against_the_config(release, tmp_path, capsys):
    assert command(verify_module, release, "--deep") == 0
    assert "338 tensors, 747488 bytes: matches its config.json" in capsys.readouterr().out
    other = convert(release, tmp_path / "b", "packed", max_shard_bytes=10**9)
    names = {
        "language_model.model.layers.1.self_attn.A_log": lambda t: t[10:].fill_(1),
        f"language_model.{LAYER}.block_sparse_moe.experts.0.w1.weight_scale": lambda t: t[3].fill_(255),
    }
    edit_tensors(other, lambda t: [edit(t[name]) for name, edit in names.items()])
    assert "entry 10 is 1.0" in verify_config(other)[1][0]
    edit_tensors(other, lambda t: t["language_model.model.layers.1.self_attn.A_log"][10:].fill_(0))
    assert not verify_config(other)[1] and "is 255" in verify_config(other, deep=True)[1][0]
    edit_tensors(other, lambda t: t.pop("language_model.model.norm.weight"))
    assert command(verify_module, other) == 1
    assert "missing: language_model.model.norm.weight" in capsys.readouterr().out


def test_text_only_and_any_float(goldens, capsys):
    folder = goldens("k3_text_tiny/config.json").parent
    assert command(verify_module, folder) == 1
    assert command(verify_module, folder, "--text-only") == 1
    assert command(verify_module, folder, "--text-only", "--any-float") == 0
    assert "is F32, expected BF16" in capsys.readouterr().out


def test_more_differences_than_shown(release, tmp_path, capsys):
    other = convert(release, tmp_path / "b", "packed", max_shard_bytes=10**9)
    edit_tensors(other, lambda t: [t[name].add_(1) for name in t if name.endswith("layernorm.weight")])
    command(verify_module, release, other, "--show", 2)
    assert "... and 13 more differences" in capsys.readouterr().out


def test_info(release, goldens, capsys):
    assert command(info_module, release) == 0
    printed = capsys.readouterr().out
    assert "kimi_k3: 5 layers (3 KDA, 2 MLA)" in printed and "names, shapes and dtypes match" in printed
    text = describe_folder(goldens("k3_text_tiny/config.json").parent)
    assert any("only the text model loads" in line for line in text)
    (other,) = describe_folder(goldens("gpt2_tiny/config.json").parent)
    assert other == "gpt2: 1 files, 40 tensors, 95,280 parameters, 381,120 bytes"


@pytest.mark.parametrize("name", ["kimi_k3_config.json", "kimi_linear_48b_config.json"])
def test_stored_parts_agree_with_the_census(goldens, tmp_path, name):
    """Headers of a tiny released model against the closed forms of the configuration side."""
    config = shrink_config(json.loads(goldens(f"released/{name}").read_text()))
    folder = make_tiny(config, tmp_path / "out")
    parts = stored_parts(open_checkpoint(folder), TextGeometry.from_config(load_config(folder)))
    kind = type(preset("kimi-k3" if "text_config" in config else "kimi-linear-48b-a3b"))
    counted = census(kind(**config))
    assert sum(part.parameters for part in parts.values()) == counted.total
    assert sum(part.nbytes for part in parts.values()) == counted.stored_bytes


def test_nan_is_told(goldens, tmp_path):
    source = goldens("kimi_linear_tiny/config.json").parent
    other = copy_checkpoint(source, tmp_path / "b")
    edit_tensors(other, lambda t: t["lm_head.weight"][0, 0].fill_(torch.nan))
    assert "lm_head.weight[0, 0]" in compare(source, other).differences[0]


def test_a_nanogpt_file_alone_has_nothing_to_be_held_to(goldens):
    with pytest.raises(CheckpointError, match="name a second one"):
        command(verify_module, goldens("nanogpt_tiny/golden.safetensors").parent / "ckpt.pt")
