"""A save is there whole or not at all; an older one beside it survives every failure."""

import copy
import json
import logging
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import kimi_hf
from kimi_hf import KimiLinearForCausalLM
from kimi_hf.checkpoint import saving
from kimi_hf.checkpoint.check import check_checkpoint
from kimi_hf.errors import CheckpointError

from ..conftest import fixture_path
from ..modeling.golden import K3, KIMI_LINEAR, fresh_model, golden_model
from .small import small_model


@pytest.fixture(scope="module")
def small():
    """A few ten thousand parameters in bf16, several shards of 50 KB."""
    return small_model("kimi-linear-tiny")


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
    small.save_pretrained(tmp_path, max_shard_size="60KB")
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


# A process that ends in the middle, by force.


def _killed(model, target, renames):
    """Exit code of a process that saves over `target` and dies before rename number `renames`."""

    def save():
        rename, done = Path.rename, iter(range(renames))

        def die_or_rename(self, there):
            if next(done, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(self, there)

        Path.rename = die_or_rename
        model.save_pretrained(target, max_shard_size="50KB")

    return _in_a_process(save)


def _in_a_process(target):
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join(timeout=120)
    return process.exitcode


@pytest.fixture
def changed(small):
    """The small model with a head of ones."""
    model = copy.deepcopy(small)
    with torch.no_grad():
        model.lm_head.weight.fill_(1)
    return model


def test_a_killed_save_leaves_the_old_folder(small, changed, tmp_path, caplog):
    small.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    old = _contents(tmp_path / "model")
    assert _killed(changed, tmp_path / "model", 0) == -9
    assert _contents(tmp_path / "model") == old
    (left,) = (path for path in tmp_path.iterdir() if path.name != "model")
    assert left.name.startswith(".model.partial-")
    small.save_pretrained(tmp_path / "model")
    assert f"{left} was left by a save that was interrupted" in caplog.text


def test_a_kill_between_two_renames_never_mixes_two_models(small, changed, tmp_path):
    """Either the old model is there, or the new one, or none that loads; nothing is lost in any case."""
    outcomes, codes = [], []
    for renames in range(20):
        target = tmp_path / str(renames)
        small.save_pretrained(target, max_shard_size="60KB")
        old = _contents(target)
        codes.append(_killed(changed, target, renames))
        if (target / "config.json").exists():
            head = KimiLinearForCausalLM.from_pretrained(target).lm_head.weight
            outcomes.append("old" if torch.equal(head, small.lm_head.weight) else "new")
            assert torch.equal(head, (small if outcomes[-1] == "old" else changed).lm_head.weight)
        else:
            outcomes.append("refused")
            (left,) = tmp_path.glob(f".{renames}.partial-*")
            kept = [path.read_bytes() for path in [*left.rglob("*"), *target.iterdir()] if path.is_file()]
            assert all(content in kept for content in old.values())
            with pytest.raises(CheckpointError, match=rf"no config\.json.*interrupted.*{left / 'old'}.*{left / 'new'}"):
                KimiLinearForCausalLM.from_pretrained(target)
        if codes[-1] == 0:
            break
    assert outcomes == ["old", *["refused"] * (len(outcomes) - 2), "new"] and len(outcomes) > 8
    assert codes == [-9] * (len(codes) - 1) + [0]


def test_an_error_between_two_renames_brings_everything_back(small, tmp_path, monkeypatch):
    small.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    old, rename, left = _contents(tmp_path / "model"), Path.rename, iter(range(6))

    def fail(self, target):
        if next(left, None) is None and "partial" in str(self):
            monkeypatch.undo()
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        small.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    assert _contents(tmp_path / "model") == old and list(tmp_path.iterdir()) == [tmp_path / "model"]


# Where it is saved.


def test_a_disk_that_is_really_full(small, tmp_path):
    """A limit on file sizes stands for it; the format's writer reports it in an exception of its own."""

    def save():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(OSError, match=rf"save_pretrained: {tmp_path / 'model'} was not written .*too large"):
            small.save_pretrained(tmp_path / "model")

    assert _in_a_process(save) == 0
    assert not list(tmp_path.iterdir())


def test_a_link_stays_a_link(small, tmp_path):
    for name in ("there", "not yet there"):
        place, link = tmp_path / "elsewhere" / name, tmp_path / f"link to {name}"
        place.parent.mkdir(exist_ok=True)
        if name == "there":
            place.mkdir()
        link.symlink_to(place)
        small.save_pretrained(link)
        assert link.is_symlink() and (place / "model.safetensors").exists()
        assert torch.equal(KimiLinearForCausalLM.from_pretrained(link).lm_head.weight, small.lm_head.weight)
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["not yet there", "there"]


def test_links_in_the_folder_are_replaced_not_followed(small, tmp_path):
    """As in the download cache, whose files are shared between snapshots."""
    small.save_pretrained(tmp_path / "blobs")
    before = _contents(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in before:
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    model = KimiLinearForCausalLM.from_pretrained(tmp_path / "snapshot")
    with torch.no_grad():
        model.lm_head.weight += 1
    model.save_pretrained(tmp_path / "snapshot")
    assert _contents(tmp_path / "blobs") == before
    assert not (tmp_path / "snapshot" / "model.safetensors").is_symlink()


@pytest.mark.parametrize("parent", ["on another disk", "read-only"])
def test_where_nothing_can_be_written_beside_the_folder(parent, small, tmp_path, monkeypatch):
    """Such as a volume mounted into a container: the unfinished files lie within the folder."""
    (tmp_path / "model").mkdir()
    access, seen = os.access, []
    if parent == "read-only":
        monkeypatch.setattr(saving.os, "access", lambda path, mode: Path(path) != tmp_path and access(path, mode))
    else:
        monkeypatch.setattr(saving, "_device", lambda path: -1 if path == tmp_path else 0)
    monkeypatch.setattr(saving, "_put", lambda *args, put=saving._put: (seen.append(args[0].parent.parent), put(*args)))
    small.save_pretrained(tmp_path / "model")
    assert seen == [tmp_path / "model"]
    assert "model.safetensors" in _contents(tmp_path / "model") and len(_contents(tmp_path / "model")) == 3


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(small, tmp_path, monkeypatch):
    monkeypatch.setattr(saving.os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(PermissionError, match="cannot be written to"):
        small.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


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
    assert stored["model.layers.0.self_attn.A_log"].shape == (1, 1, 2, 1)


def test_variants_lie_side_by_side(small, tmp_path):
    other = copy.deepcopy(small).half()
    for variant, size in ((None, "50KB"), ("fp16", "50KB"), (None, "50GB"), ("fp16", "60KB"), ("fp16", "50GB")):
        (other if variant else small).save_pretrained(tmp_path, variant=variant, max_shard_size=size)
    weights = {"model.safetensors", "model.fp16.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json"} | weights
    assert KimiLinearForCausalLM.from_pretrained(tmp_path, variant="fp16", dtype="float16").dtype == torch.float16
    assert torch.equal(
        KimiLinearForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").lm_head.weight, small.lm_head.weight
    )


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
@pytest.mark.parametrize("case", [KIMI_LINEAR, K3])
def test_a_model_that_was_cast_as_a_whole_is_saved_with_released_dtypes(case, given, tmp_path):
    model = fresh_model(case, dtype=torch.float32).to(torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    model.save_pretrained(tmp_path, state_dict=model.state_dict() if given else None)
    check_checkpoint(tmp_path, model.config, strict_dtypes=True)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    again = fresh_model(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor.to(again[name].dtype), again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_comes_back_with_its_fp32_tensors(dtype, tmp_path):
    model = fresh_model(KIMI_LINEAR, dtype=dtype)
    model.save_pretrained(tmp_path)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {dtype, torch.float32}
    again = KimiLinearForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == dtype
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("file", ["as saved", "with both", "with the head only"])
def test_tied_embeddings(file, tmp_path):
    model = small_model("kimi-linear-tiny", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    if file != "as saved":
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
        if file == "with the head only":
            del stored["model.embed_tokens.weight"]
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    again, report = KimiLinearForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not any(report.values())


def test_pickles_are_not_written(small, tmp_path, caplog):
    small.save_pretrained(tmp_path, safe_serialization=False)
    assert "safetensors files are written" in caplog.text and (tmp_path / "model.safetensors").exists()


def test_adapters(tmp_path, caplog):
    """They are saved alone or merged; a model with adapters inside is saved with a warning that it will not load."""
    ids = torch.arange(5, 15)[None]
    lora = peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(fresh_model(KIMI_LINEAR), lora)
    model.save_pretrained(tmp_path / "adapter")
    expected = model(ids).logits
    with caplog.at_level(logging.WARNING):
        model.get_base_model().save_pretrained(tmp_path / "torn")
    assert "will not load again" in caplog.text and "merge_and_unload" in caplog.text
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.weight"):
        KimiLinearForCausalLM.from_pretrained(tmp_path / "torn")
    again = peft.PeftModel.from_pretrained(fresh_model(KIMI_LINEAR), tmp_path / "adapter")
    torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=1e-4)
    loaded = fresh_model(KIMI_LINEAR)
    loaded.load_adapter(str(tmp_path / "adapter"))
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-4)
    loaded.save_pretrained(tmp_path / "by transformers")
    both = KimiLinearForCausalLM.from_pretrained(tmp_path / "by transformers", dtype=torch.float32).eval()
    torch.testing.assert_close(both(ids).logits, expected, rtol=0, atol=1e-4)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = KimiLinearForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=1e-4)


def test_the_fixture_is_untouched_by_loading_and_saving(tmp_path):
    before = (fixture_path(KIMI_LINEAR) / "model.safetensors").read_bytes()
    model = fresh_model(KIMI_LINEAR)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path)
    assert (fixture_path(KIMI_LINEAR) / "model.safetensors").read_bytes() == before
