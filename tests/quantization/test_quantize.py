"""`kimi_hf.quantize` on models and folders, and unpacking to a chosen dtype."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import kimi_hf
from kimi_hf.conversion import writer
from kimi_hf.conversion.convert import convert
from kimi_hf.conversion.verify import compare
from kimi_hf.errors import CheckpointError, ConfigError
from kimi_hf.modeling.moe import KimiExperts
from kimi_hf.quantization import KimiPackedExperts

from ..conftest import fixture_path
from ..conversion.helpers import copy_checkpoint, hashes
from ..modeling.golden import K3, K3_PACKED, fresh_model

IDS = torch.arange(5, 25)[None]


def test_a_model_and_its_folder_give_the_same_bytes(tmp_path):
    """Rounded as a model in memory and as a stream of files: the same tensors, and the same logits."""
    model = kimi_hf.quantize(fresh_model(K3))
    assert any(isinstance(module, KimiPackedExperts) for module in model.modules())
    model.save_pretrained(tmp_path / "model")
    assert kimi_hf.quantize(fixture_path(K3), tmp_path / "folder") == tmp_path / "folder"
    assert not compare(tmp_path / "model", tmp_path / "folder").count
    loaded = fresh_model(tmp_path / "folder")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert not (tmp_path / "folder" / "kimi_hf_original").exists()


def test_weights_on_the_grid_are_kept_exactly(tmp_path):
    """Decoded to bf16 without keeping the scales, then packed again: scales may differ, values do not."""
    convert(fixture_path(K3_PACKED), tmp_path / "bf16", "bf16", dtype="bfloat16", keep_original=False)
    kimi_hf.quantize(tmp_path / "bf16", tmp_path / "packed")
    assert not compare(tmp_path / "bf16", tmp_path / "packed").count


def test_a_folder_that_was_interrupted_is_taken_up(tmp_path, monkeypatch):
    finished, verify = [], writer._verify_tensors

    def stop(file, part, *rest):
        if len(finished) == 2:
            raise KeyboardInterrupt
        finished.append(part.name)
        verify(file, part, *rest)

    monkeypatch.setattr(writer, "_verify_tensors", stop)
    with pytest.raises(KeyboardInterrupt):
        kimi_hf.quantize(fixture_path(K3), tmp_path / "packed", max_shard_bytes=300_000)
    assert not (tmp_path / "packed").exists() and (tmp_path / "packed.partial").is_dir()
    monkeypatch.setattr(writer, "_verify_tensors", lambda file, part, *rest: finished.append(part.name))
    kimi_hf.quantize(fixture_path(K3), tmp_path / "packed", max_shard_bytes=300_000)
    assert len(finished) == len(set(finished)) > 2
    kimi_hf.quantize(fixture_path(K3), tmp_path / "at once", max_shard_bytes=300_000)
    assert hashes(tmp_path / "packed") == hashes(tmp_path / "at once")


def test_what_quantize_cannot_do(tmp_path):
    with pytest.raises(ConfigError, match="second argument"):
        kimi_hf.quantize(fixture_path(K3))
    with pytest.raises(ConfigError, match="in place"):
        kimi_hf.quantize(fresh_model(K3), tmp_path / "out")
    folder = copy_checkpoint(fixture_path(K3), tmp_path / "nan")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("experts.3.w2.weight"))
    tensors[name][4, 5] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name.removesuffix('.weight')} holds infinities or NaN in rows"):
        kimi_hf.quantize(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unpacked_to_the_dtype_asked_for(dtype):
    model = fresh_model(K3_PACKED, dtype=dtype, quantization_config=kimi_hf.KimiMxfp4Config(dequantize=True))
    experts = [module for module in model.modules() if isinstance(module, KimiExperts)]
    assert len(experts) == 12 and all(p.dtype == dtype and p.requires_grad for e in experts for p in e.parameters())
    exact = fresh_model(K3_PACKED, quantization_config=kimi_hf.KimiMxfp4Config(dequantize=True))
    first = next(module for module in exact.modules() if isinstance(module, KimiExperts))
    assert torch.equal(experts[0].gate_up_proj, first.gate_up_proj.to(dtype))
    assert not hasattr(model.config, "quantization_config")
