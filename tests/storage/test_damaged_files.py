"""Experts on disk whose files are damaged, change, or vanish: an error that names file and tensor, never a fault."""

import os
import pickle
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import kimi_hf
from kimi_hf.errors import CheckpointError
from kimi_hf.modeling.disk_experts import KimiDiskExperts

from ..conftest import fixture_path
from ..conversion.helpers import copy_checkpoint, hashes
from ..modeling.golden import K3_PACKED, KIMI_LINEAR, fresh_model, golden_model

IDS = torch.arange(5, 25)[None]
DISK = {"expert_storage": "disk"}
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3"


@pytest.fixture
def folder(tmp_path):
    return copy_checkpoint(fixture_path(K3_PACKED), tmp_path / "copy")


def rewrite(folder, change):
    """Pass the tensors of a one-file checkpoint through a function that changes them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_file_cut_short_while_open(folder):
    model = fresh_model(folder, **DISK)
    os.truncate(folder / "model.safetensors", 200_000)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: had \d+ bytes when it was opened and has 200000 now"
    ):
        model(IDS)


def test_a_file_that_ends_between_the_check_and_the_read(folder):
    """What a memory map answers with SIGBUS."""
    model = fresh_model(folder, **DISK)
    store = next(module.store for module in model.modules() if isinstance(module, KimiDiskExperts))
    os.truncate(folder / "model.safetensors", 200_000)
    store.files._check = lambda path, file: None
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends inside tensor .*block_sparse_moe\.experts\."):
        model(IDS)


def test_a_file_written_into_while_open(folder):
    model = fresh_model(folder, **DISK)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00")
    os.utime(folder / "model.safetensors", ns=(0, 0))
    with pytest.raises(CheckpointError, match="has been written to since it was opened"):
        model(IDS)


def test_files_deleted_or_replaced_while_open_are_still_read(folder):
    model = fresh_model(folder, **DISK)
    shutil.rmtree(folder)
    copy_checkpoint(fixture_path(KIMI_LINEAR), folder)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, golden_model(K3_PACKED)(IDS).logits)


def test_a_copy_for_another_process_does_not_take_other_files_for_its_own(folder):
    pickled = pickle.dumps(fresh_model(folder, **DISK))
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"reading tensor .*experts.*: No such file"):
        pickle.loads(pickled)(IDS)
    copy_checkpoint(fixture_path(KIMI_LINEAR), folder)
    with pytest.raises(CheckpointError, match="when it was opened"):
        pickle.loads(pickled)(IDS)


def test_a_nan_scale_is_refused_when_it_is_read(folder):
    def damage(tensors):
        for expert in range(16):
            tensors[f"{EXPERT[:-1]}{expert}.w2.weight_scale"][3, 0] = 255

    rewrite(folder, damage)
    model = fresh_model(folder, **DISK)
    with pytest.raises(
        CheckpointError, match=r"experts\.\d+\.w2\.weight_scale in model\.safetensors: .*row 3, group 0"
    ):
        model(IDS)


@pytest.mark.parametrize("part", ["w1.weight_packed", "w3.weight_scale", "w2.weight_packed"])
def test_an_absent_part_is_refused_on_opening(folder, part):
    rewrite(folder, lambda tensors: tensors.pop(f"{EXPERT}.{part}"))
    before = hashes(folder)
    with pytest.raises(CheckpointError, match=re.escape(f"missing: {EXPERT}.{part}")):
        fresh_model(folder, **DISK)
    assert hashes(folder) == before


def test_a_layer_without_experts_and_a_checkpoint_without_any(folder):
    def drop(tensors, pattern):
        for name in [name for name in tensors if pattern in name]:
            del tensors[name]

    rewrite(folder, lambda tensors: drop(tensors, "layers.2.block_sparse_moe.experts."))
    with pytest.raises(CheckpointError, match=r"layers\.2\.block_sparse_moe\.experts\.0"):
        fresh_model(folder, **DISK)
    rewrite(folder, lambda tensors: drop(tensors, ".layers."))
    with pytest.raises(CheckpointError, match="experts"):
        fresh_model(folder, **DISK)


def test_a_mis_shaped_expert_is_refused_whatever_is_ignored(folder):
    rewrite(
        folder, lambda tensors: tensors.update({f"{EXPERT}.w1.weight_packed": torch.zeros(4, 4, dtype=torch.uint8)})
    )
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(CheckpointError, match=r"experts\.3\.w1\.weight_packed in model\.safetensors"):
            fresh_model(folder, **DISK, **options)


def test_plain_experts_of_two_dtypes(tmp_path):
    folder = copy_checkpoint(fixture_path(KIMI_LINEAR), tmp_path / "copy")
    names = []

    def change(tensors):
        name = next(name for name in reversed(tensors) if ".experts." in name)
        tensors[name] = tensors[name].half()
        names.append(name)

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=re.escape(f"{names[0]} in model.safetensors is F16, others are F32")):
        fresh_model(folder, **DISK)


def test_a_repository_by_name(tmp_path, folder):
    """Found in the download cache; one without an expert is refused there as well."""

    def fetch(source):
        snapshot = tmp_path / "cache" / "models--someone--kimi" / "snapshots" / ("0" * 40)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        snapshot.mkdir(parents=True)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(source / name, snapshot)
        return kimi_hf.KimiLinearForCausalLM.from_pretrained(
            "someone/kimi", cache_dir=tmp_path / "cache", local_files_only=True, dtype=torch.float32, **DISK
        )

    with torch.no_grad():
        assert torch.equal(fetch(folder)(IDS).logits, golden_model(K3_PACKED)(IDS).logits)
    rewrite(folder, lambda tensors: tensors.pop(f"{EXPERT}.w2.weight_packed"))
    with pytest.raises(CheckpointError, match=r"experts\.3\.w2\.weight_packed"):
        fetch(folder)


def test_files_of_another_kind(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match='expert_storage="disk" reads safetensors files'):
        fresh_model(folder, **DISK)


def test_no_room_to_save(folder, tmp_path, monkeypatch):
    model = fresh_model(folder, **DISK)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("kimi_hf.storage.saving.shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="the disk to save on has 0.0 GB free"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists() and not list(tmp_path.glob(".saved*"))
