"""Damaged headers, indices and shards: refused by file and tensor name, before any data is read."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_hf.checkpoint.shards import MAX_HEADER, Checkpoint, hole_length, open_checkpoint, read_header
from kimi_hf.errors import CheckpointError

from .helpers import INDEX, copy_checkpoint, read_all, write_checkpoint, write_raw

A, B = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2, 3, 4], dtype=torch.uint8)


def write_header(path, table, data=b"", length=None):
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin, end, dtype="U8", shape=(4,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_reads_what_safetensors_writes(tmp_path):
    tensors = {"b": B, "a": A, "half": A.to(torch.bfloat16), "none": torch.empty(0, 3), "scalar": torch.tensor(7)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "note": "ü"})
    header = read_header(tmp_path / "model.safetensors")
    assert header.metadata == {"format": "pt", "note": "ü"}
    found = read_all(tmp_path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_our_files_are_read_by_safetensors(tmp_path):
    write_raw(tmp_path / "x.safetensors", {"a": A, "half": A.to(torch.bfloat16), "b": B})
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["a"], A) and torch.equal(found["b"], B)


@pytest.mark.parametrize(
    ("table", "data", "length", "message"),
    [
        (b"{}", b"", 1 << 40, "claims"),
        (b"{}", b"", MAX_HEADER + 1, "claims"),
        (b"{", b"", None, "not JSON"),
        (b"[]", b"", None, "list"),
        ({"t": entry(0, 4)}, b"12", None, "t ends at byte"),
        ({"t": entry(0, 9)}, b"123456789", None, "t: byte range"),
        ({"t": entry(4, 0)}, b"1234", None, "t: byte range"),
        ({"t": entry(-4, 0)}, b"1234", None, "t: byte range"),
        ({"t": entry(0, 4, shape=(-4,))}, b"1234", None, "t: byte range"),
        ({"t": entry(0, 4, "F5")}, b"1234", None, "t: unreadable"),
        ({"t": {"dtype": "U8"}}, b"", None, "t: unreadable"),
        ({"t": entry(0, 4), "u": entry(2, 6)}, b"123456", None, "u at byte .* overlaps t"),
        ({"t": entry(0, 4), "u": entry(5, 9)}, b"123456789", None, "u at byte .* gap after t"),
        ({"t": entry(0, 4)}, b"123456", None, "2 bytes after the last tensor"),
        (b'{"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
         b"", None, "names t twice"),
    ],
)  # fmt: skip
def test_damaged_headers(tmp_path, table, data, length, message):
    path = write_header(tmp_path / "bad.safetensors", table, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)


def test_empty_and_absent_files(tmp_path):
    (tmp_path / "e.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="too short"):
        read_header(tmp_path / "e.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "absent.safetensors")


def two_shards(folder):
    return write_checkpoint(folder, [{"a": A, "b": B}, {"c": A * 2, "d": B}])


def first(folder):
    return folder / "model-00001-of-000002.safetensors"


def second(folder):
    return folder / "model-00002-of-000002.safetensors"


def test_index_and_shards(tmp_path):
    folder = two_shards(tmp_path / "m")
    for path in (folder, folder / INDEX):
        checkpoint = open_checkpoint(path)
        assert set(checkpoint.entries) == {"a", "b", "c", "d"} and checkpoint.nbytes == 56
        assert torch.equal(checkpoint.read("c"), A * 2)
        checkpoint.close()
    assert len(open_checkpoint(first(folder))) == 2


def test_truncated_shard(tmp_path):
    folder = two_shards(tmp_path / "m")
    data = second(folder).read_bytes()
    second(folder).write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-000002.safetensors: tensor d ends at byte .*truncated"):
        open_checkpoint(folder)


def test_swapped_shards(tmp_path):
    folder = two_shards(tmp_path / "m")
    first(folder).rename(tmp_path / "x")
    second(folder).rename(first(folder))
    (tmp_path / "x").rename(second(folder))
    with pytest.raises(CheckpointError, match=r"00001.* holds c, which .* places in model-00002.*swapped"):
        open_checkpoint(folder)


def test_absent_shard(tmp_path):
    folder = two_shards(tmp_path / "m")
    second(folder).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-000002.safetensors is absent .* expects c"):
        open_checkpoint(folder)
    partial = open_checkpoint(folder, allow_absent=True)
    assert partial.absent == ("model-00002-of-000002.safetensors",)
    with pytest.raises(CheckpointError, match=r"no tensor c: model-00002-of-000002.safetensors.* is absent"):
        partial.read("c")


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_index_disagrees(tmp_path):
    folder = two_shards(tmp_path / "m")
    edit_index(folder, lambda names: names.update(ghost="model-00001-of-000002.safetensors"))
    with pytest.raises(CheckpointError, match="model-00001-of-000002.safetensors lacks ghost"):
        open_checkpoint(folder)
    edit_index(folder, lambda names: (names.pop("ghost"), names.pop("d")))
    with pytest.raises(CheckpointError, match="holds d, which .* does not list"):
        open_checkpoint(folder)
    edit_index(folder, lambda names: names.update(d="../elsewhere.safetensors"))
    with pytest.raises(CheckpointError, match="must lie beside"):
        open_checkpoint(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(CheckpointError, match="names a twice"):
        open_checkpoint(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable index"):
        open_checkpoint(folder)


def test_tensor_in_both_shards(tmp_path):
    folder = write_checkpoint(tmp_path / "m", [{"a": A, "c": B}, {"a": A, "b": B}])
    with pytest.raises(CheckpointError, match="it stands in both"):
        open_checkpoint(folder)


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="nothing to read"):
        open_checkpoint(tmp_path)
    write_raw(tmp_path / "model-00001-of-000009.safetensors", {"a": A})
    with pytest.raises(CheckpointError, match="restore the index"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_file_shrinks_after_opening(tmp_path, goldens):
    folder = copy_checkpoint(goldens("k3_release_tiny/config.json").parent, tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    name = max(checkpoint.entries.values(), key=lambda one: one.offset).name
    path = checkpoint.entries[name].path
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"ends inside tensor {name}"):
        checkpoint.read(name)


def test_ranges_and_holes(tmp_path):
    path = write_raw(tmp_path / "model.safetensors", {"t": torch.zeros(1 << 20)})
    header = read_header(path)
    with path.open("r+b") as file:
        file.truncate(header.data_start)
        file.truncate(header.file_size)
    with Checkpoint(tmp_path, {path.name: read_header(path)}, None) as checkpoint:
        one = checkpoint.entries["t"]
        assert checkpoint.read_range(one, 4096, 8) == bytes(8)
        assert checkpoint.hole(one, 1 << 20, 1 << 21) in (0, 1 << 21)
    with path.open("rb") as file:
        assert hole_length(file.fileno(), 0, 8) == 0
