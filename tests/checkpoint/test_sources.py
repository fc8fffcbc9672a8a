"""Whatever weights are loaded from, they give the same model or are refused by name: no way in goes round the checks."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kimi_hf import KimiLinearForCausalLM
from kimi_hf.errors import CheckpointError

from ..conftest import fixture_path
from ..modeling.golden import K3_PACKED, K3_RELEASE, KIMI_LINEAR, golden_model

LOST = "model.layers.2.block_sparse_moe.experts.0.w2.weight"


def _load(folder, **kwargs):
    return KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)


def _stored(complete=True):
    stored = load_file(fixture_path(KIMI_LINEAR) / "model.safetensors")
    return stored if complete else {name: x for name, x in stored.items() if name != LOST}


def _is_golden(model):
    expected = golden_model(KIMI_LINEAR).state_dict()
    return all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


# Folders, and files under other names. Each function writes `stored` into `folder` and returns what loads it.


def _plain(folder, stored):
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return {}


def _variant(folder, stored):
    save_file(stored, folder / "model.fp32.safetensors", {"format": "pt"})
    return {"variant": "fp32"}


def _named_in_config(folder, stored):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "weights.safetensors"}))
    save_file(stored, folder / "weights.safetensors", {"format": "pt"})
    return {}


def _pickled(folder, stored):
    torch.save(stored, folder / "pytorch_model.bin")
    return {}


def _pickled_long_ago(folder, stored):
    torch.save(stored, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return {}


def _pickled_shards(folder, stored):
    names = sorted(stored)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, part in parts.items():
        torch.save({name: stored[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return {}


def _other_names(folder, stored):
    _plain(folder, {name.replace("model.layers.", "model.h."): x for name, x in stored.items()})
    return {"key_mapping": {r"^model\.h\.": "model.layers."}}


WAYS = [_plain, _variant, _named_in_config, _pickled, _pickled_long_ago, _pickled_shards, _other_names]


@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__.strip("_"))
def test_a_folder(write, tmp_path):
    shutil.copy(fixture_path(KIMI_LINEAR) / "config.json", tmp_path)
    assert _is_golden(_load(tmp_path, **write(tmp_path, _stored())))


@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__.strip("_"))
def test_a_folder_that_lacks_an_expert(write, tmp_path):
    shutil.copy(fixture_path(KIMI_LINEAR) / "config.json", tmp_path)
    arguments = write(tmp_path, _stored(complete=False))
    with pytest.raises(CheckpointError, match=rf"missing: {LOST}"):
        _load(tmp_path, **arguments)


@pytest.mark.parametrize("write", [_variant, _pickled, _pickled_long_ago, _pickled_shards])
def test_a_file_that_is_cut_short(write, tmp_path):
    shutil.copy(fixture_path(KIMI_LINEAR) / "config.json", tmp_path)
    arguments = write(tmp_path, _stored())
    path = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:70_000])
    with pytest.raises(CheckpointError, match=path.name):
        _load(tmp_path, **arguments)


def test_a_pickled_shard_that_is_absent(tmp_path):
    shutil.copy(fixture_path(KIMI_LINEAR) / "config.json", tmp_path)
    _pickled_shards(tmp_path, _stored())
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin is absent"):
        _load(tmp_path)


def test_a_pickle_that_would_run_code_is_not_run(tmp_path):
    shutil.copy(fixture_path(KIMI_LINEAR) / "config.json", tmp_path)

    class Runs:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'was run')!r}, 'w')",))

    torch.save(_stored() | {"x": Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .* no file of plain tensors"):
        _load(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_a_subfolder(tmp_path):
    for case, name in ((KIMI_LINEAR, "good"), (KIMI_LINEAR, "cut")):
        (tmp_path / name).mkdir()
        shutil.copy(fixture_path(case) / "config.json", tmp_path / name)
        _plain(tmp_path / name, _stored(complete=name == "good"))
    assert _is_golden(_load(tmp_path, subfolder="good"))
    assert _is_golden(AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="good", dtype=torch.float32))
    with pytest.raises(CheckpointError, match=rf"missing: {LOST}"):
        _load(tmp_path, subfolder="cut")


# State dicts.


def _from_state_dict(state_dict, **kwargs):
    config = copy.deepcopy(golden_model(KIMI_LINEAR).config)
    return KimiLinearForCausalLM.from_pretrained(
        None, config=config, state_dict=state_dict, dtype=torch.float32, **kwargs
    )


def test_a_state_dict_with_either_names():
    own = {name: x.clone() for name, x in golden_model(KIMI_LINEAR).state_dict().items()}
    assert _is_golden(_from_state_dict(_stored())) and _is_golden(_from_state_dict(own))


@pytest.mark.parametrize("name", [LOST, "model.norm.weight", "model.layers.3.block_sparse_moe.experts.down_proj"])
def test_a_state_dict_that_lacks_a_tensor(name):
    state_dict = _stored() if "experts.down" not in name else dict(golden_model(KIMI_LINEAR).state_dict())
    del state_dict[name]
    with pytest.raises(CheckpointError, match=rf"given state_dict does not hold .*\s*missing: {name}"):
        _from_state_dict(state_dict)


def test_a_state_dict_with_a_nonzero_decay_tail_and_one_of_another_shape():
    name = "model.layers.2.self_attn.A_log"
    padded = torch.cat([_stored()[name].flatten(), torch.ones(12)])
    for tensor, told in ((padded, "num_heads"), (torch.zeros(5), r"is \[5\]")):
        with pytest.raises(CheckpointError, match=rf"{name} in the given state_dict.*{told}"):
            _from_state_dict(_stored() | {name: tensor})


# Arguments that must not change the weights.


@pytest.mark.parametrize(
    "arguments",
    [{"device_map": "auto"}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}, {"torch_dtype": "float32"}],
    ids=str,
)
def test_ways_of_loading_give_the_same_weights(arguments):
    assert _is_golden(KimiLinearForCausalLM.from_pretrained(fixture_path(KIMI_LINEAR), **arguments))


@pytest.mark.parametrize(
    ("asked", "given"), [("auto", torch.float32), ("float16", torch.float16), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_dtypes(asked, given):
    model = KimiLinearForCausalLM.from_pretrained(fixture_path(KIMI_LINEAR), dtype=asked)
    assert model.dtype == given and model.model.layers[0].self_attn.A_log.dtype == torch.float32


def test_other_shapes_are_random_only_when_that_is_asked_for():
    source = fixture_path(KIMI_LINEAR)
    with pytest.raises(CheckpointError, match="expert too many"):
        _load(source, num_experts=8)
    _, report = _load(source, num_experts=8, ignore_mismatched_sizes=True, output_loading_info=True)
    names = {name for name, *_ in report["mismatched_keys"]}
    assert "model.layers.2.block_sparse_moe.experts.down_proj" in names
    assert all("block_sparse_moe" in name for name in names) and not report["missing_keys"]


# Repositories by name, as the download cache holds them: a snapshot of links to files that are named by their content.


@pytest.fixture
def repository(tmp_path):
    """A function that puts a fixture, with bytes changed, into a download cache and loads it by its name."""

    def load(case=KIMI_LINEAR, change=lambda name, content: content, **arguments):
        repository = tmp_path / "cache" / "models--someone--kimi"
        snapshot = repository / "snapshots" / ("0" * 40)
        for folder in (snapshot, repository / "blobs", repository / "refs"):
            folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        for path in fixture_path(case).iterdir():
            if "golden" not in path.name:
                (repository / "blobs" / f"of {path.name}").write_bytes(change(path.name, path.read_bytes()))
                (snapshot / path.name).symlink_to(f"../../blobs/of {path.name}")
        arguments = {"cache_dir": tmp_path / "cache", "local_files_only": True, "dtype": torch.float32} | arguments
        return KimiLinearForCausalLM.from_pretrained("someone/kimi", **arguments)

    return load


@pytest.mark.parametrize("case", [KIMI_LINEAR, K3_RELEASE])
def test_a_repository_loads_by_name(case, repository):
    expected = golden_model(case).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in repository(case).state_dict().items())


def _cut(which):
    return lambda name, content: content[: len(content) // 2] if which in name else content


@pytest.mark.parametrize(
    ("case", "file"),
    [(KIMI_LINEAR, "model.safetensors"), (K3_RELEASE, "00002-of-000002"), (K3_RELEASE, "model.safetensors.index.json")],
)
def test_a_damaged_file_of_a_repository_is_named(case, file, repository):
    with pytest.raises(CheckpointError, match=file):
        repository(case, _cut(file))


def test_a_damaged_file_is_named_where_transformers_takes_the_dtype_from_it(repository):
    def change(name, content):
        if name == "config.json":
            config = json.loads(content)
            return json.dumps({key: value for key, value in config.items() if "dtype" not in key}).encode()
        return _cut("model.safetensors")(name, content)

    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* it is truncated"):
        repository(KIMI_LINEAR, change, dtype="auto")


@pytest.mark.parametrize("old", [b"2.input_layernorm", b"2.block_sparse_moe.experts.3.w2", b"model.norm"])
def test_a_lost_tensor_of_a_repository_is_named(old, repository):
    """Everywhere else this is a warning and random weights."""
    with pytest.raises(CheckpointError, match=rf"someone/kimi does not hold.*\s*missing: .*{old.decode()}"):
        repository(change=lambda name, content: content.replace(old, old[:-1] + b"_"))


def test_a_nan_scale_of_a_repository_is_named_by_its_file(repository):
    name = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight_scale"

    def change(file, content):
        if file == "model.safetensors":
            start = 8 + int.from_bytes(content[:8], "little")
            at = start + json.loads(content[8:start])[name]["data_offsets"][0] + 5
            content = content[:at] + b"\xff" + content[at + 1 :]
        return content

    with pytest.raises(CheckpointError, match=rf"{name} in model\.safetensors: the scale in row 5"):
        repository(K3_PACKED, change)
