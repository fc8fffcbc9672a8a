"""Files that are cut short, changed, swapped or doubled are refused by name before a weight is read."""

import json
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_hf import KimiLinearForCausalLM
from kimi_hf.errors import CheckpointError, KimiHfError

from ..conftest import fixture_path
from ..modeling.golden import K3_RELEASE, KIMI_LINEAR
from .small import small_model


def _load(folder, cls=KimiLinearForCausalLM, **kwargs):
    return cls.from_pretrained(folder, dtype=torch.float32, **kwargs)


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


@pytest.mark.parametrize("content", [{}, {"x": torch.zeros(2)}], ids=["nothing", "a tensor"])
def test_a_single_file_beside_shards_is_refused_not_chosen(content, shards):
    """transformers reads `model.safetensors` and passes over the index; one of them is left over from an earlier save."""
    save_file(content, shards / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors and also model\.safetensors\.index.*{FIRST}"):
        _load(shards)


def test_an_index_whose_shards_are_gone_does_not_stand_in_the_way_of_a_single_file(damaged, shards):
    (shards / FIRST).unlink()
    (shards / SECOND).unlink()
    damaged()
    assert torch.equal(_load(shards).lm_head.weight, load_file(shards / "model.safetensors")["lm_head.weight"])


def test_a_file_without_tensors(damaged):
    with pytest.raises(CheckpointError, match=r"model\.safetensors in .* holds no tensors at all"):
        _load(damaged(tensors=dict.clear))


def test_an_index_without_metadata(shards):
    _edit_index(shards, lambda index: index.pop("metadata"))
    with pytest.raises(CheckpointError, match=r'index\.json has no "metadata"'):
        _load(shards)


def test_a_tensor_in_two_shards(shards):
    name = "language_model.model.layers.0.input_layernorm.weight"
    index = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    other = SECOND if index[name] == FIRST else FIRST
    twice = load_file(shards / other) | {name: load_file(shards / index[name])[name]}
    save_file(twice, shards / other, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{other} holds {name}.*stands in both"):
        _load(shards)


def test_every_damage_to_headers_and_index_is_named_or_harmless(tmp_path):
    """Bits and bytes changed, put in, taken out, files cut short: the same model, or an error with the file's name."""
    model = small_model("kimi-k3-tiny")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    expected = KimiLinearForCausalLM.from_pretrained(tmp_path).state_dict()
    files = sorted(path for path in tmp_path.iterdir() if "safetensors" in path.name)
    assert len(files) > 3
    original = {path: path.read_bytes() for path in files}
    rng, refused = random.Random(0), 0
    for round_ in range(400):
        path = files[round_ % len(files)]
        content = bytearray(original[path])
        header = len(content) if path.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
        at = rng.randrange(header)
        match rng.randrange(5):
            case 0 | 1:
                content[at] ^= 1 << rng.randrange(8)
            case 2:
                content.insert(at, rng.choice(b' 0123456789"[]{},:'))
            case 3:
                del content[at]
            case 4:
                del content[rng.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            state = KimiLinearForCausalLM.from_pretrained(tmp_path).state_dict()
        except KimiHfError as error:
            refused += 1
            assert any(file.name in str(error) for file in files), error
        else:
            assert all(torch.equal(x, state[name]) and x.dtype == state[name].dtype for name, x in expected.items())
        path.write_bytes(original[path])
    assert refused > 350
