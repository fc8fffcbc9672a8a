"""Layers on disk: the numbers, dtypes and saved bytes of the model in memory, and files that stay the model's own."""

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM

from kimi_hf import KimiLinearForCausalLM
from kimi_hf.errors import CheckpointError

from ..conftest import fixture_path
from ..modeling.golden import K3_PACKED, K3_RELEASE
from .test_round_trip import assert_same_bytes, tensors

MULTIMODAL = "k3_multimodal_tiny"
IDS = torch.arange(5, 30)[None]


def _device_map(model):
    """Every second layer on disk, and the tower if there is one; the rest on the CPU."""
    prefix = "language_model." if hasattr(model, "language_model") else ""
    body = model.get_submodule(f"{prefix}model")
    device_map = {f"{prefix}model.{name}": "cpu" for name, _ in body.named_children() if name != "layers"}
    device_map |= {f"{prefix}lm_head": "cpu"}
    device_map |= {f"{prefix}model.layers.{i}": "disk" if i % 2 == 0 else "cpu" for i in range(len(body.layers))}
    return device_map | {name: "disk" for name in ("vision_tower", "mm_projector") if hasattr(model, name)}


def _placement(kind, model):
    if kind == "max_memory":
        return {"device_map": "auto", "max_memory": {"cpu": 400_000}}
    return {"device_map": _device_map(model), "offload_buffers": kind == "offload_buffers"}


@pytest.mark.parametrize(
    ("case", "cls", "kind", "dtype"),
    [
        (K3_RELEASE, AutoModelForCausalLM, "device_map", torch.bfloat16),
        (K3_RELEASE, AutoModelForCausalLM, "offload_buffers", torch.bfloat16),
        (K3_RELEASE, AutoModelForCausalLM, "max_memory", torch.bfloat16),
        (K3_RELEASE, KimiLinearForCausalLM, "device_map", torch.float16),
        (MULTIMODAL, AutoModelForCausalLM, "device_map", torch.bfloat16),
        (K3_PACKED, KimiLinearForCausalLM, "max_memory", torch.bfloat16),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)).removeprefix("torch."),
)
def test_a_model_on_disk_equals_the_one_in_memory(case, cls, kind, dtype, tmp_path):
    """transformers notes the dtype of a tensor on disk before it knows which ones stay in fp32."""
    model = cls.from_pretrained(fixture_path(case), dtype=dtype).eval()
    placement = _placement(kind, model)
    other = cls.from_pretrained(fixture_path(case), dtype=dtype, offload_folder=tmp_path / "offload", **placement)
    assert any(x.is_meta and "dt_bias" in name for name, x in other.named_parameters())
    assert {n: x.dtype for n, x in other.state_dict().items()} == {n: x.dtype for n, x in model.state_dict().items()}
    with torch.no_grad():
        torch.testing.assert_close(other(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "from memory")
    other.save_pretrained(tmp_path / "from disk", max_shard_size="300KB")
    assert_same_bytes(tensors(tmp_path / "from disk"), tensors(tmp_path / "from memory"))
    again = cls.from_pretrained(tmp_path / "from disk")
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.fixture
def on_disk(tmp_path):
    """A function that loads a copy of a fixture, in `tmp_path / "source"`, with layers on disk."""
    cls = KimiLinearForCausalLM
    cls.from_pretrained(fixture_path(K3_RELEASE)).save_pretrained(tmp_path / "source")
    placement = {"device_map": _device_map(cls.from_pretrained(tmp_path / "source"))}

    def load(dtype=torch.bfloat16):
        return cls.from_pretrained(tmp_path / "source", dtype=dtype, offload_folder=tmp_path / "o", **placement)

    return load


def test_two_models_do_not_share_an_offload_folder(on_disk):
    """The second would write its weights over those of the first, which would then compute with them."""
    model = on_disk()
    with pytest.raises(CheckpointError, match=r"offload_folder .*o holds the weights of another model.*bfloat16"):
        on_disk(torch.float32)
    expected = model(IDS).logits
    on_disk()
    assert torch.equal(model(IDS).logits, expected)
    del model
    gc.collect()
    assert on_disk(torch.float32).dtype == torch.float32


def test_files_that_layers_are_read_from_are_not_replaced(on_disk, tmp_path):
    model = on_disk()
    with pytest.raises(CheckpointError, match="is offloaded and read from .*save to another folder"):
        model.save_pretrained(tmp_path / "source")
    other = KimiLinearForCausalLM.from_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match="of a model that is in use"):
        other.save_pretrained(tmp_path / "source")
    del model
    other.save_pretrained(tmp_path / "source")


def test_a_nan_scale_in_a_layer_on_disk_is_found_before_it_is_computed_with(tmp_path):
    packed = KimiLinearForCausalLM.from_pretrained(fixture_path(K3_PACKED))
    placement = {"device_map": _device_map(packed)}
    packed.model.layers[2].block_sparse_moe.experts.down_proj_scale.data[3, 5, 0] = 255
    packed.save_pretrained(tmp_path / "model")
    with pytest.raises(
        CheckpointError, match=r"layers\.2\..*experts\.3\.w2\.weight_scale in model\.safetensors.* row 5"
    ):
        KimiLinearForCausalLM.from_pretrained(tmp_path / "model", offload_folder=tmp_path / "o", **placement)
