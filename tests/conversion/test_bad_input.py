"""Every kind of damage against everything that reads a checkpoint: file and tensor are named, the source is untouched."""

import json
import os
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import kimi_hf
from kimi_hf.checkpoint.shards import read_header
from kimi_hf.conversion import verify
from kimi_hf.conversion.convert import convert
from kimi_hf.conversion.info import describe_folder
from kimi_hf.conversion.slice import slice_checkpoint
from kimi_hf.errors import KimiHfError

from .helpers import INDEX, command, copy_checkpoint, edit_config, hashes, read_all, write_raw

FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.5"


def shard_of(folder, name):
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def change(folder, name, tensor):
    """Put `tensor` in the place of the one called `name` (None: take it out), index and all; returns the shard's name."""
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].get(name, FIRST)
    tensors = {
        key: value.clone() for key, value in read_all(folder).items() if key in read_header(folder / file).entries
    }
    tensors.pop(name, None)
    index["weight_map"].pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
        index["weight_map"][name] = file
    write_raw(folder / file, tensors)
    (folder / INDEX).write_text(json.dumps(index))
    return file


def truncated(folder):
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1000)
    return [SECOND, "tensor "]


def wrong_shape(folder):
    file = change(folder, f"{EXPERT}.w2.weight_packed", torch.zeros(8, 8, dtype=torch.uint8))
    return [f"{EXPERT}.w2.weight_packed", file, "[8, 8]"]


def swapped(folder):
    for here, there in ((FIRST, "x"), (SECOND, FIRST), ("x", SECOND)):
        (folder / here).rename(folder / there)
    return ["swapped", FIRST, SECOND]


def absent_shard(folder):
    (folder / SECOND).unlink()
    return [SECOND, "absent"]


def absent_expert(folder):
    for which in ("w1", "w2", "w3"):
        for part in ("packed", "scale"):
            change(folder, f"{EXPERT}.{which}.weight_{part}", None)
    return [f"{EXPERT}.w1.weight_packed", "missing"]


def extra_expert(folder):
    name = EXPERT.removesuffix("5") + "8.w1.weight_packed"
    return [name, change(folder, name, torch.zeros(32, 16, dtype=torch.uint8))]


def nan_scale(folder):
    for expert in range(8):
        name = f"{EXPERT[:-1]}{expert}.w2.weight_scale"
        scale = read_all(folder)[name].clone()
        scale[1, 0] = 255
        file = change(folder, name, scale)
    return [".w2.weight_scale", file, "255"]


def disagreeing_index(folder):
    index = json.loads((folder / INDEX).read_text())
    name = f"{EXPERT}.w1.weight_scale"
    other = {FIRST: SECOND, SECOND: FIRST}[index["weight_map"][name]]
    index["weight_map"][name] = other
    (folder / INDEX).write_text(json.dumps(index))
    return [name, FIRST, SECOND]


def mixed(folder):
    file = change(folder, f"{EXPERT}.w1.weight", torch.zeros(32, 32, dtype=torch.bfloat16))
    return [f"{EXPERT}.w1.weight", file, "packed and plain"]


def nvfp4(folder):
    file = change(folder, f"{EXPERT}.w1.weight_global_scale", torch.ones(1))
    return [f"{EXPERT}.w1.weight_global_scale", file, "nvfp4"]


def int4(folder):
    file = change(folder, f"{EXPERT}.w1.weight_packed", torch.zeros(32, 4, dtype=torch.int32))
    return [f"{EXPERT}.w1.weight_packed", file, "int4"]


def int4_by_config(folder):
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    edit_config(folder, lambda config: config["text_config"].update(quantization_config=block))
    return ["pack-quantized", "quantization_config"]


def int4_by_group(folder):
    """The format's name is right, its group asks for integers: they would be read as floats."""

    def edit(config):
        config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "int"

    edit_config(folder, edit)
    return ["config_groups.group_0.weights", "'int'"]


DAMAGES = [
    truncated, wrong_shape, swapped, absent_shard, absent_expert, extra_expert, nan_scale, disagreeing_index, mixed, nvfp4,
    int4, int4_by_config, int4_by_group,
]  # fmt: skip


def _verified(folder, out):
    if command(verify, folder, "--deep"):
        raise KimiHfError("told on the console")


READERS = {
    "convert": lambda folder, out: convert(folder, out, "bf16"),
    "move": lambda folder, out: convert(folder, out, "fused-packed"),
    "slice": lambda folder, out: slice_checkpoint(folder, out, layers=[0, 1, 2, 3]),
    "quantize": lambda folder, out: kimi_hf.quantize(folder, out),
    "verify": _verified,
    "memory": lambda folder, out: AutoModelForCausalLM.from_pretrained(folder),
    "disk": lambda folder, out: AutoModelForCausalLM.from_pretrained(folder, expert_storage="disk")(
        input_ids=torch.arange(40)[None]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_refused_by_every_reader(goldens, tmp_path, damage, capsys):
    folder = copy_checkpoint(goldens("k3_release_tiny/config.json").parent, tmp_path / "source")
    told = damage(folder)
    before = hashes(folder)
    for reader, read in READERS.items():
        with pytest.raises(KimiHfError) as caught:
            read(folder, tmp_path / reader)
        message = str(caught.value) + capsys.readouterr().out
        for fragment in told:
            assert re.search(re.escape(fragment), message), f"{reader} does not tell {fragment!r}: {message}"
        assert not (tmp_path / reader).exists(), f"{reader} left a folder that looks complete"
        assert hashes(folder) == before, f"{reader} touched its source"


def test_packed_experts_that_the_config_does_not_name(goldens, tmp_path, capsys):
    """Loading refuses such a folder: `verify` and `info` must not call it right, nor a slice inherit it."""
    folder = copy_checkpoint(goldens("k3_release_tiny/config.json").parent, tmp_path / "source")
    edit_config(folder, lambda config: config["text_config"].pop("quantization_config"))
    assert command(verify, folder) == 1
    assert "does not name the MXFP4 format" in capsys.readouterr().out
    assert any("does not name the MXFP4 format" in line for line in describe_folder(folder))
    with pytest.raises(KimiHfError, match="does not name the MXFP4 format"):
        slice_checkpoint(folder, tmp_path / "slice", layers=[0])
    convert(folder, tmp_path / "plain", "bf16")
    assert not verify.verify_config(tmp_path / "plain")[1]
