"""`from_pretrained(..., expert_storage="disk")`: the same model, with experts read as they are routed to."""

import copy
import pickle
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kimi_hf import KimiMxfp4Config
from kimi_hf.checkpoint.shards import open_checkpoint
from kimi_hf.conversion.convert import convert
from kimi_hf.conversion.verify import compare
from kimi_hf.errors import ConfigError
from kimi_hf.modeling.disk_experts import KimiDiskExperts, expert_store
from kimi_hf.modeling.moe import KimiExperts
from kimi_hf.quantization import KimiPackedExperts, dequantize, quantize
from kimi_hf.training.adapters import lora_config

from ..conftest import fixture_path
from ..conversion.helpers import copy_checkpoint
from ..modeling.golden import K3, K3_PACKED, K3_RELEASE, KIMI_LINEAR, fresh_model, golden_model

IDS = torch.arange(5, 25)[None]
DISK = {"expert_storage": "disk"}


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, KimiDiskExperts)]


def read_all(folder):
    return {name: x for path in Path(folder).glob("model*.safetensors") for name, x in load_file(path).items()}


@pytest.mark.parametrize("case", [K3_PACKED, K3, KIMI_LINEAR])
def test_logits_are_those_of_experts_in_memory(case):
    """Packed: the same products in the same order. Plain: torch's grouped product adds in another order."""
    disk = fresh_model(case, **DISK)
    assert experts_of(disk) and not any(isinstance(m, (KimiExperts, KimiPackedExperts)) for m in disk.modules())
    with torch.no_grad():
        found, expected = disk(IDS).logits, golden_model(case)(IDS).logits
        one, expected_one = disk(IDS[:, :1]).logits, golden_model(case)(IDS[:, :1]).logits
    if case == K3_PACKED:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    torch.testing.assert_close(one, expected_one, rtol=0, atol=2e-4)


@pytest.mark.parametrize("case, layout", [(K3, "fused"), (K3_PACKED, "fused-packed"), (K3_PACKED, "bf16")])
def test_every_layout_on_disk(case, layout, tmp_path):
    convert(fixture_path(case), tmp_path / "converted", layout, dtype="float32" if layout == "bf16" else None)
    memory, disk = fresh_model(tmp_path / "converted"), fresh_model(tmp_path / "converted", **DISK)
    with torch.no_grad():
        torch.testing.assert_close(disk(IDS).logits, memory(IDS).logits, rtol=0, atol=2e-4)
    disk.save_pretrained(tmp_path / "saved")
    assert not compare(tmp_path / "saved", tmp_path / "converted").count
    assert "block_sparse_moe.experts.0.w1.weight" in (tmp_path / "saved" / "model.safetensors.index.json").read_text()


def test_the_composite_model_and_the_other_spelling():
    ours = AutoModelForCausalLM.from_pretrained(fixture_path(K3_RELEASE), expert_storage="mmap")
    theirs = AutoModelForCausalLM.from_pretrained(fixture_path(K3_RELEASE))
    with torch.no_grad():
        assert torch.equal(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)


def test_only_routed_experts_are_read_and_counted():
    model = fresh_model(K3_PACKED, **DISK)
    opened = model.expert_storage_report()
    assert opened.misses == opened.hits == opened.bytes_read == opened.cached_bytes == 0
    chosen, k = model.config.num_experts_per_token, len(experts_of(model))
    with torch.no_grad():
        model(IDS[:, :1])
        first = model.expert_storage_report()
        assert (first.hits, first.misses) == (0, k * chosen)
        assert first.bytes_read == first.cached_bytes == k * chosen * first.expert_bytes
        model(IDS[:, :1])
    second = model.expert_storage_report(reset=True)
    assert (second.hits, second.misses, second.hit_rate) == (k * chosen, k * chosen, 0.5)
    assert second.bytes_on_disk == sum(
        entry.nbytes for name, entry in open_checkpoint(fixture_path(K3_PACKED)).entries.items() if ".experts." in name
    )
    assert "hit rate 50.0%" in str(second)
    assert model.expert_storage_report().hits == 0
    assert golden_model(K3_PACKED).expert_storage_report() is None


@pytest.mark.parametrize("room", [0, 1, 5])
def test_the_cache_is_bounded_and_changes_nothing(room):
    size = fresh_model(K3_PACKED, **DISK).expert_storage_report().expert_bytes
    model = fresh_model(K3_PACKED, expert_cache_bytes=room * size + size // 2, **DISK)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, golden_model(K3_PACKED)(IDS).logits)
    report = model.expert_storage_report()
    assert report.cached_experts == room and report.cached_bytes <= report.cache_limit
    assert report.misses > room


def test_opening_reads_everything_but_the_experts(tmp_path):
    """By the process's own count of bytes read: the file has 30 MB of experts."""
    folder = fixture_path("k3_mxfp4_tiny")
    model = fresh_model(folder, **DISK)  # whatever is imported on the way is imported now
    total = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    experts = model.expert_storage_report().bytes_on_disk
    before = _bytes_read()
    fresh_model(folder, **DISK)
    light = _bytes_read() - before
    before = _bytes_read()
    with torch.no_grad():
        model(IDS)
    assert _bytes_read() - before >= model.expert_storage_report().bytes_read > 0
    assert light < 2 * (total - experts) + 1_000_000


def _bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def test_inputs_and_adapters_get_the_same_gradients():
    peft = pytest.importorskip("peft")
    found = []
    for kwargs in ({}, {"expert_cache_bytes": 0, **DISK}):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "routed_expert_down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(fresh_model(K3_PACKED, **kwargs), config).train()
        model.base_model.model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert (gradient - found[1][name]).abs().max() <= 1e-4 * gradient.abs().max() + 1e-9, name


def test_plain_experts_pass_gradients_in_another_dtype_and_under_autocast():
    inputs = []
    for kwargs in ({}, DISK):
        model = fresh_model(K3, **kwargs).bfloat16()
        hidden = model.model.embed_tokens(IDS).detach().requires_grad_()
        model(inputs_embeds=hidden, labels=IDS).loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.isfinite(fresh_model(K3, **kwargs)(IDS).logits).all()
        inputs.append(hidden.grad.float())
    assert (inputs[0] - inputs[1]).abs().max() <= 0.05 * inputs[0].abs().max()


def test_generation_with_a_small_cache_and_from_two_threads():
    expected = golden_model(K3_PACKED).generate(IDS, max_new_tokens=8, do_sample=False)
    model = fresh_model(K3_PACKED, expert_cache_bytes=20_000, **DISK)
    results = [None, None]

    def work(at):
        results[at] = model.generate(IDS, max_new_tokens=8, do_sample=False)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results)
    report = model.expert_storage_report()
    assert report.hits > 0 and report.cached_bytes <= 20_000


def test_no_parameters_no_state_and_copies_share_the_files(tmp_path):
    model = fresh_model(K3_PACKED, **DISK)
    assert not any(".experts." in name for name in model.state_dict())
    assert not [p for module in experts_of(model) for p in module.parameters()]
    assert "experts on disk" in repr(model)
    twin = copy.deepcopy(model)
    assert expert_store(twin) is expert_store(model)
    with torch.no_grad():
        assert torch.equal(twin(IDS).logits, golden_model(K3_PACKED)(IDS).logits)
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(IDS).logits, golden_model(K3_PACKED)(IDS).logits)
    assert expert_store(again) is not expert_store(model) and again.expert_storage_report().cached_bytes > 0


@pytest.mark.parametrize("case, size", [(K3_PACKED, "50GB"), (KIMI_LINEAR, "100KB"), (K3_RELEASE, 60_000)])
def test_saving_streams_the_same_bytes(case, size, tmp_path):
    source = fixture_path(case)
    dtype = torch.float32 if case == K3_PACKED else "auto"
    fresh_model(case, dtype=dtype, **DISK).save_pretrained(tmp_path, max_shard_size=size)
    saved, stored = read_all(tmp_path), read_all(source)
    stored = {name: x for name, x in stored.items() if not name.startswith(("vision_tower.", "mm_projector."))}
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert saved[name].dtype == tensor.dtype and saved[name].equal(tensor), name
    open_checkpoint(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(fresh_model(tmp_path)(IDS).logits, golden_model(case)(IDS).logits, rtol=0, atol=2e-4)


def test_saving_over_its_own_source(tmp_path):
    """The old files are read until the last byte, and the open model goes on with them."""
    folder = copy_checkpoint(fixture_path(K3_PACKED), tmp_path / "own")
    model = fresh_model(folder, expert_cache_bytes=0, **DISK)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
        expected = model(IDS).logits
        model.save_pretrained(folder, max_shard_size="100KB")
        assert torch.equal(model(IDS).logits, expected)
        assert torch.equal(fresh_model(folder)(IDS).logits, expected)
    assert compare(folder, fixture_path(K3_PACKED)).count == 1


def test_wrong_arguments_are_refused(tmp_path):
    for kwargs, told in (
        ({"expert_storage": "tape"}, 'expert_storage is \'tape\'; expected "ram" or "disk"'),
        ({"expert_storage": None}, "expert_storage is None"),
        ({"expert_cache_bytes": 5}, "expert_cache_bytes is for"),
        ({"expert_cache_bytes": -1, **DISK}, "expert_cache_bytes is -1; expected a number of bytes"),
        ({"expert_cache_bytes": "4GB", **DISK}, "expert_cache_bytes is '4GB'"),
        ({"tp_size": 2, **DISK}, "leave tp_size out"),
        ({"key_mapping": {"a": "b"}, **DISK}, "leave key_mapping out"),
        (
            {"quantization_config": KimiMxfp4Config(dequantize=True), **DISK},
            "dequantize=True.* needs the experts in mem",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            fresh_model(K3_PACKED, **kwargs)


def test_what_needs_experts_in_memory_says_so(tmp_path):
    model = fresh_model(K3_PACKED, **DISK)
    for work in (
        lambda: quantize(model),
        lambda: dequantize(model),
        lambda: lora_config("experts", model=model),
        lambda: model.save_pretrained(tmp_path / "x", push_to_hub=True),
        lambda: model.save_pretrained(tmp_path / "x", variant="fp16"),
    ):
        with pytest.raises(ConfigError, match='expert_storage="ram"'):
            work()
    assert not (tmp_path / "x").exists()


def test_everything_on_disk(tmp_path):
    """Experts in their files, all other layers offloaded: opening reads next to nothing, and logits are the same."""
    pytest.importorskip("accelerate")
    folder = fixture_path(K3_PACKED)
    offloaded = {"device_map": {"": "disk"}, **DISK}
    fresh_model(folder, offload_folder=tmp_path / "first", **offloaded)
    before = _bytes_read()
    model = fresh_model(folder, offload_folder=tmp_path / "offload", **offloaded)
    rest = sum(
        entry.nbytes
        for name, entry in open_checkpoint(folder).entries.items()
        if name.endswith(("proj.weight", "head.w"))
    )
    assert _bytes_read() - before < rest
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, golden_model(K3_PACKED)(IDS).logits)
    assert all(parameter.is_meta for parameter in model.parameters())
