"""Weights that come from disk or another memory only when their module runs: the same tokens, nothing read too early."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import AlignDevicesHook

from kimi_hf import KimiK3ForConditionalGeneration

from ..contract.tiny import TINY
from .models import MODELS, build, greedy, ids

NEW = 5


def _prompt():
    """Long enough for single tokens to take the absorbed form against the cache."""
    return ids(1, 40)


def _offloaded_modules(model):
    """Modules whose hook brings weights of their own."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "_hf_hook", None), AlignDevicesHook)
    ]


def _children(model, prefix):
    return [f"{prefix}{name}" for name, _ in model.get_submodule(prefix.rstrip(".")).named_children()]


def _device_map(model, where):
    """Every module below the top once: layers (or their mixers) on disk, the rest on the CPU."""
    device_map = dict.fromkeys([*_children(model, "model."), "lm_head"], "cpu")
    del device_map["model.layers"]
    for i in range(model.config.num_hidden_layers):
        if where == "mixers":
            device_map.update(dict.fromkeys(_children(model, f"model.layers.{i}."), "cpu"))
            device_map[f"model.layers.{i}.self_attn"] = "disk"
        else:
            device_map[f"model.layers.{i}"] = "disk" if where == "all layers" or i % 2 == 0 else "cpu"
    return device_map


@pytest.mark.parametrize("where", ["all layers", "every other layer", "mixers"])
def test_layers_on_disk_give_the_same_tokens(model, where, tmp_path):
    model.save_pretrained(tmp_path / "model")
    device_map = _device_map(model, where)
    loaded = type(model).from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload", attn_implementation="sdpa"
    )
    assert _offloaded_modules(loaded)
    on_disk = [name for name, x in loaded.named_parameters() if x.device.type == "meta"]
    assert any("self_attn" in name for name in on_disk)
    if "linear_attention" in model.config.layer_types and hasattr(loaded.model.layers[0].self_attn, "A_log"):
        assert "model.layers.0.self_attn.A_log" in on_disk
    mask = torch.ones_like(_prompt())
    mask[0, :3] = 0
    options = {"attention_mask": mask, "num_beams": 2 if where == "mixers" else 1}
    assert torch.equal(greedy(loaded, _prompt(), NEW, **options), greedy(model, _prompt(), NEW, **options))


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_every_module_fetches_its_own_weights(offload, tmp_path):
    """The finest grain: each module that holds parameters has its own hook, and its weights exist only while it runs."""
    for name in MODELS:
        model, expected = build(name), greedy(build(name), _prompt(), NEW)
        if offload == "cpu":
            cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            disk_offload(model, tmp_path / name, execution_device=torch.device("cpu"))
        assert all(x.device.type == "meta" for x in model.parameters())
        assert torch.equal(greedy(model, _prompt(), NEW), expected)


def test_images_with_the_tower_on_disk(tmp_path):
    tiny = next(tiny for tiny in TINY if tiny.vision)
    model, inputs = tiny.build(attention="sdpa"), tiny.images()
    model.save_pretrained(tmp_path / "model")
    device_map = dict.fromkeys([*_children(model, "language_model.model."), "language_model.lm_head"], "cpu")
    device_map |= dict.fromkeys(["vision_tower", "mm_projector", "language_model.model.layers"], "disk")
    loaded = KimiK3ForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload", attn_implementation="sdpa"
    )
    loaded.generation_config = model.generation_config
    assert torch.equal(
        loaded.generate(**inputs, max_new_tokens=NEW, do_sample=False),
        model.generate(**inputs, max_new_tokens=NEW, do_sample=False),
    )
