"""Conversion between layouts: contents by hand, and byte-equal files on the way back."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open

from kimi_hf.checkpoint.geometry import is_packed, load_config
from kimi_hf.checkpoint.shards import open_checkpoint
from kimi_hf.conversion import convert as convert_module
from kimi_hf.conversion import writer
from kimi_hf.conversion.convert import convert
from kimi_hf.conversion.original import FOLDER
from kimi_hf.conversion.recipes import exact_codes
from kimi_hf.conversion.verify import compare
from kimi_hf.errors import CheckpointError, ConfigError
from kimi_hf.ops import mxfp4

from .helpers import Killer, command, copy_checkpoint, edit_tensors, hashes, in_child, read_all

CHAINS = {
    "k3_text_tiny": [("fused",), ("bf16", "fused")],
    "kimi_linear_tiny": [("fused",), ("bf16", "fused")],
    "k3_multimodal_tiny": [("fused",)],
    "k3_mxfp4_tiny": [("fused-packed",), ("bf16",)],
    "k3_release_tiny": [
        ("fused-packed",),
        ("bf16",),
        ("fused",),
        ("fused-packed", "fused", "bf16"),
        ("bf16", "fused", "fused-packed"),
        ("packed",),
    ],
}
CASES = [(case, chain) for case, chains in CHAINS.items() for chain in chains]


@pytest.fixture
def release(goldens):
    return goldens("k3_release_tiny/config.json").parent


@pytest.mark.parametrize(("case", "chain"), CASES, ids=lambda value: "-".join(value) if type(value) is tuple else value)
def test_round_trip_is_byte_equal(goldens, tmp_path, case, chain):
    """Whatever it went through, `--to released` gives every file of the source back, header and index included."""
    source = goldens(f"{case}/config.json").parent
    before = hashes(source)
    at = source
    for step, to in enumerate((*chain, "released")):
        at = convert(at, tmp_path / f"{step}-{to}", to)
    assert hashes(at) == before
    assert hashes(source) == before, "the source is untouched"


def test_fused_layout(release, tmp_path):
    """gate_up_proj is [w1; w3] expert by expert, down_proj the w2, as the plugin's modules hold them."""
    plain, fused = convert(release, tmp_path / "plain", "bf16"), convert(release, tmp_path / "fused", "fused")
    one, other = read_all(plain), read_all(fused)
    for layer in range(1, 5):
        stem = f"language_model.model.layers.{layer}.block_sparse_moe.experts."
        gate_up, down = other.pop(f"{stem}gate_up_proj"), other.pop(f"{stem}down_proj")
        assert gate_up.shape == (8, 64, 96) and down.shape == (8, 96, 32)
        for e in range(8):
            parts = [one.pop(f"{stem}{e}.{which}.weight") for which in ("w1", "w3", "w2")]
            assert torch.equal(gate_up[e], torch.cat(parts[:2])) and torch.equal(down[e], parts[2])
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not is_packed(load_config(plain)) and not is_packed(load_config(fused))


def test_decoded_experts_equal_the_golden(goldens, tmp_path):
    folder = goldens("k3_mxfp4_tiny/config.json").parent
    out = read_all(convert(folder, tmp_path / "out", "bf16", dtype="float32"))
    with safe_open(goldens("k3_mxfp4_tiny/golden.safetensors"), "pt") as golden:
        names = [name for name in golden.keys() if name.startswith("dequantised.")]
        assert names
        for name in names:
            ours = out[name.replace("dequantised.", "language_model.model.")]
            assert ours.dtype == torch.float32 and torch.equal(ours, golden.get_tensor(name))


def test_decoding_matches_the_operation(release, tmp_path):
    source, out = read_all(release), read_all(convert(release, tmp_path / "out", "bf16"))
    for name, packed in source.items():
        if name.endswith("weight_packed"):
            stem = name.removesuffix("_packed")
            expected = mxfp4.unpack(packed, source[f"{stem}_scale"], torch.bfloat16)
            assert torch.equal(out[stem].view(torch.int16), expected.view(torch.int16))


def test_fused_packed_layout(release, tmp_path):
    source, out = read_all(release), read_all(convert(release, tmp_path / "out", "fused-packed"))
    stem = "language_model.model.layers.3.block_sparse_moe.experts."
    for part in ("packed", "scale"):
        gate_up, down = out[f"{stem}gate_up_proj_{part}"], out[f"{stem}down_proj_{part}"]
        assert torch.equal(gate_up[5, :32], source[f"{stem}5.w1.weight_{part}"])
        assert torch.equal(gate_up[5, 32:], source[f"{stem}5.w3.weight_{part}"])
        assert torch.equal(down[5], source[f"{stem}5.w2.weight_{part}"])
    assert is_packed(load_config(tmp_path / "out"))


def test_config_follows(release, tmp_path):
    source = json.loads((release / "config.json").read_text())
    dense = load_config(convert(release, tmp_path / "dense", "bf16"))
    block = source["text_config"].pop("quantization_config")
    assert dense == source
    packed = load_config(convert(tmp_path / "dense", tmp_path / "packed", "fused-packed"))
    assert packed["text_config"].pop("quantization_config") == block and packed == source


def test_packing_a_plain_checkpoint(goldens, tmp_path):
    """Experts that were never packed are rounded to nearest, and the config says so."""
    text = goldens("k3_text_tiny/config.json").parent
    packed = convert(text, tmp_path / "packed", "packed", keep_original=False)
    assert load_config(packed)["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    source, out = read_all(text), read_all(packed)
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"
    expected = mxfp4.pack(source[name])
    assert torch.equal(out[f"{name}_packed"], expected[0]) and torch.equal(out[f"{name}_scale"], expected[1])


def test_trained_experts_are_packed_anew(release, tmp_path):
    """A changed group gets a fresh scale, its neighbours keep their bytes."""
    dense = convert(release, tmp_path / "dense", "bf16")
    name = "language_model.model.layers.2.block_sparse_moe.experts.1.w2.weight"
    edit_tensors(dense, lambda tensors: tensors[name][7].copy_(torch.linspace(-1, 1, 32)))
    source, out = read_all(release), read_all(convert(dense, tmp_path / "packed", "released"))
    changed = {key for key in source if not torch.equal(source[key], out[key])}
    assert changed <= {f"{name}_packed", f"{name}_scale"} and changed
    rows = (source[f"{name}_packed"] != out[f"{name}_packed"]).any(-1).nonzero().flatten()
    assert rows.tolist() == [7]


def test_without_the_original_scales(release, tmp_path):
    """Values survive even then; only the choice between 3 x 2^0 and 1.5 x 2^1 is lost."""
    dense = convert(release, tmp_path / "dense", "bf16", keep_original=False)
    assert not (dense / FOLDER).exists()
    packed = convert(dense, tmp_path / "packed", "packed")
    again = convert(packed, tmp_path / "again", "bf16", keep_original=False)
    assert not compare(dense, again).count


def test_bare_decay_gets_its_padding_back(release, tmp_path):
    """A model saved with (H,) `A_log` goes back to the released shape, from the kept headers or the config."""
    fused = convert(release, tmp_path / "fused", "fused")

    def narrow(tensors):
        for name in list(tensors):
            if name.endswith("A_log"):
                tensors[name] = tensors[name][:3].clone()

    edit_tensors(fused, narrow)
    assert hashes(convert(fused, tmp_path / "back", "released")) == hashes(release)
    shutil.rmtree(fused / FOLDER)
    out = read_all(convert(fused, tmp_path / "plain", "bf16"))
    name = "language_model.model.layers.0.self_attn.A_log"
    assert torch.equal(out[name], read_all(release)[name])


def test_re_export_without_inner_model_is_repaired(goldens, tmp_path):
    folder = copy_checkpoint(goldens("k3_text_tiny/config.json").parent, tmp_path / "m")

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("language_model.model.", "language_model.")] = tensors.pop(name)

    edit_tensors(folder, rename)
    out = convert(folder, tmp_path / "out", "bf16")
    assert read_all(out).keys() == read_all(goldens("k3_text_tiny/config.json").parent).keys()


def test_side_files_and_shard_size(release, tmp_path):
    source = copy_checkpoint(release, tmp_path / "source")
    for name in ("tiktoken.model", "modeling_kimi_k3.py", "tokenizer_config.json", "LICENSE"):
        (source / name).write_text(name)
    (source / "optimizer.pt").write_text("no")
    out = tmp_path / "out"
    assert command(convert_module, source, out, "--to", "fused", "--max-shard-size", "0.2MB", "--no-verify") == 0
    names = {path.name for path in out.iterdir()}
    assert {
        "tiktoken.model",
        "modeling_kimi_k3.py",
        "tokenizer_config.json",
        "LICENSE",
    } <= names and "optimizer.pt" not in names
    assert len([name for name in names if name.endswith(".safetensors")]) > 4
    assert hashes(convert(out, tmp_path / "back", "released")).items() >= hashes(release).items()


def test_kill_and_resume(release, tmp_path):
    """kill -9 spread over the whole conversion; the same command goes on and the result is the same to the byte."""
    options = {"to": "fused-packed", "max_shard_bytes": 100_000}
    reference = hashes(convert(release, tmp_path / "reference", **options))
    log, before = tmp_path / "log", hashes(release)

    def count():
        counter = Killer().install()
        convert(release, tmp_path / "counted", **options)
        log.write_text(str(len(counter.names)))

    assert in_child(count) == 0
    steps = int(log.read_text())
    out = tmp_path / "out"
    for at in range(5, steps, max(1, steps // 10)):
        killed = in_child(lambda: (Killer(at, half=True).install(), convert(release, out, **options)))  # noqa: B023
        assert killed == -9 and not out.exists()
        # Three more attempts die further on, each from where the last one stopped.
        assert in_child(lambda: (Killer(40).install(), convert(release, out, **options))) in (-9, 0)
        if not out.exists():
            convert(release, out, **options)
        assert hashes(out) == reference and hashes(release) == before
        shutil.rmtree(out)


def test_nan_scale_names_tensor_and_file(release, tmp_path):
    source = copy_checkpoint(release, tmp_path / "source")
    name = "language_model.model.layers.4.block_sparse_moe.experts.6.w1"
    with open(source / "model-00002-of-000002.safetensors", "r+b") as file:
        file.seek(open_checkpoint(source).entries[f"{name}.weight_scale"].offset + 4)
        file.write(b"\xff")
    before = hashes(source)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-000002.safetensors: {name}.weight_scale holds.*255"):
        convert(source, tmp_path / "out", "bf16")
    assert hashes(source) == before and not (tmp_path / "out").exists()


def test_infinite_expert_cannot_be_packed(goldens, tmp_path):
    folder = copy_checkpoint(goldens("kimi_linear_tiny/config.json").parent, tmp_path / "m")
    # hidden 64, experts of 24 columns: not divisible into groups
    with pytest.raises(ConfigError, match="multiples of 32"):
        convert(folder, tmp_path / "out", "packed")
    text = copy_checkpoint(goldens("k3_text_tiny/config.json").parent, tmp_path / "t")
    name = "language_model.model.layers.3.block_sparse_moe.experts.2.w3.weight"
    edit_tensors(text, lambda tensors: tensors[name][5, 5].fill_(float("inf")))
    with pytest.raises(CheckpointError, match="layers.3.block_sparse_moe.experts.2.w3 holds infinities"):
        convert(text, tmp_path / "out", "packed")


def test_damaged_source_is_refused_before_anything_is_written(release, tmp_path):
    source = copy_checkpoint(release, tmp_path / "source")
    path = source / "model-00001-of-000002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model-00001-of-000002.safetensors: tensor .* truncated"):
        convert(source, tmp_path / "out", "bf16")
    assert [item.name for item in tmp_path.iterdir()] == ["source"]


def test_disk_error_during_reading_is_told(release, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer.os, "pwrite", broken)
    with pytest.raises(CheckpointError, match="Input/output error.*continues it"):
        convert(release, tmp_path / "out", "bf16")


def test_unknown_target(release, tmp_path):
    with pytest.raises(ConfigError, match="expected one of packed, bf16"):
        convert(release, tmp_path / "out", "int3")


def test_other_models_are_refused(goldens, tmp_path):
    with pytest.raises(CheckpointError, match="model_type is 'gpt2'; expected kimi_k3 or kimi_linear"):
        convert(goldens("gpt2_tiny/config.json").parent, tmp_path / "out", "fused")


def test_sizes():
    assert convert_module.parse_size("16GB") == 16_000_000_000
    assert convert_module.parse_size("1.5 mb") == 1_500_000
    assert convert_module.parse_size("2e9") == 2_000_000_000
    for text in ("", "many", "-1GB", "GB"):
        with pytest.raises(convert_module.argparse.ArgumentTypeError):
            convert_module.parse_size(text)


def test_every_scale_survives(release, tmp_path):
    """All scale bytes that decode to finite bf16 values, subnormals and signed zeros included."""
    source = convert(release, tmp_path / "source", "packed", max_shard_bytes=10**9)
    torch.manual_seed(4)

    def randomise(tensors):
        for name, tensor in tensors.items():
            if name.endswith(("weight_packed", "weight_scale")):
                tensor.copy_(torch.randint(0, 256 if name.endswith("packed") else 252, tensor.shape))

    edit_tensors(source, randomise)
    dense = convert(source, tmp_path / "dense", "bf16")
    assert hashes(convert(dense, tmp_path / "back", "released")) == hashes(source)


def test_exact_codes():
    """The fast way back agrees with the operation for every code, at scales where bf16 is normal."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(250 * 16 // 256 + 16)[: 250 * 16].reshape(250, 16)
    packed = torch.cat([packed, packed.flip(-1)])
    scale = torch.arange(2, 252, dtype=torch.uint8).repeat(2).reshape(-1, 1)
    weight = mxfp4.unpack(packed, scale, torch.bfloat16)
    assert torch.equal(exact_codes(weight, scale), mxfp4.pack(weight, scale=scale)[0])
    assert torch.equal(exact_codes(weight, scale), packed)
