"""A checkpoint against its configuration, from headers: what is missing, foreign or mixed is named with its file."""

import random

import pytest
import torch

from kimi_hf.checkpoint.check import check_checkpoint, check_decay_tails, check_scales, find_problems
from kimi_hf.checkpoint.geometry import load_config
from kimi_hf.checkpoint.shards import open_checkpoint
from kimi_hf.errors import CheckpointError, KimiHfError

from .helpers import copy_checkpoint, edit_config, edit_tensors

LAYER = "language_model.model.layers.1.block_sparse_moe"


@pytest.fixture
def packed(goldens, tmp_path):
    return copy_checkpoint(goldens("k3_mxfp4_tiny/config.json").parent, tmp_path / "packed")


@pytest.fixture
def plain(goldens, tmp_path):
    return copy_checkpoint(goldens("kimi_linear_tiny/config.json").parent, tmp_path / "plain")


def check(folder, **options):
    return check_checkpoint(folder, load_config(folder), vision=options.pop("vision", False), **options)


def test_fixtures_pass(goldens):
    for case in ("k3_text_tiny", "k3_mxfp4_tiny", "kimi_linear_tiny"):
        check(goldens(f"{case}/config.json").parent)
    folder = goldens("k3_release_tiny/config.json").parent
    checkpoint = check(folder, vision=None, strict_dtypes=True)
    check_decay_tails(checkpoint, load_config(folder))
    check_scales(checkpoint)


def test_text_config_on_a_composite_repository(goldens):
    folder = goldens("k3_release_tiny/config.json").parent
    check_checkpoint(folder, load_config(folder)["text_config"])


def test_vision_required_when_the_config_has_it(goldens):
    folder = goldens("k3_mxfp4_tiny/config.json").parent
    with pytest.raises(CheckpointError, match="missing: vision_tower.patch_embed.proj.weight"):
        check(folder, vision=None)


def test_absent_expert(packed):
    edit_tensors(packed, lambda t: [t.pop(n) for n in list(t) if n.startswith(f"{LAYER}.experts.5.")])
    with pytest.raises(CheckpointError, match=rf"missing: {LAYER}.experts.5.w1.weight_packed U8 \[32, 16\]"):
        check(packed)


def test_all_down_projections_absent(plain):
    edit_tensors(plain, lambda t: [t.pop(n) for n in list(t) if ".layers.2." in n and n.endswith("w2.weight")])
    problems = find_problems(open_checkpoint(plain), load_config(plain))
    assert len(problems.missing) == 16 and not problems.unexpected
    assert len(problems.lines()) == 9 and "8 more" in problems.lines()[-1]


def test_extra_expert(packed):
    edit_config(packed, lambda c: c["text_config"].update(num_experts=15))
    with pytest.raises(CheckpointError) as caught:
        check(packed)
    assert f"unexpected: {LAYER}.experts.15.w1.weight_packed U8 [32, 16] in model.safetensors" in str(caught.value)
    assert f"shape: {LAYER}.gate.weight in model.safetensors is [16, 64], the config gives [15, 64]" in str(
        caught.value
    )


def test_wrong_shape_and_dtype(plain):
    def edit(tensors):
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(65)
        tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)

    edit_tensors(plain, edit)
    with pytest.raises(CheckpointError) as caught:
        check(plain)
    assert "shape: model.layers.0.input_layernorm.weight in model.safetensors is [65]" in str(caught.value)
    assert "dtype: model.norm.weight in model.safetensors is I32, expected F32" in str(caught.value)


def test_strict_dtypes(goldens, tmp_path):
    folder = copy_checkpoint(goldens("k3_text_tiny/config.json").parent, tmp_path / "text")
    check(folder)
    with pytest.raises(CheckpointError, match="embed_tokens.weight in model.safetensors is F32, expected BF16"):
        check(folder, strict_dtypes=True)


def test_mixed_experts(packed):
    edit_tensors(packed, lambda t: t.update({f"{LAYER}.experts.3.w1.weight": torch.zeros(32, 32)}))
    with pytest.raises(
        CheckpointError, match=rf"mixes experts stored as packed and plain .*{LAYER}.experts.3.w1.weight"
    ):
        check(packed)


@pytest.mark.parametrize(
    ("name", "tensor", "scheme"),
    [
        ("experts.0.w1.weight_scale", torch.zeros(32, 2, dtype=torch.float8_e4m3fn), "nvfp4 or int4"),
        ("experts.0.w1.weight_packed", torch.zeros(32, 4, dtype=torch.int32), "nvfp4 or int4"),
        ("experts.0.w1.weight_global_scale", torch.zeros(1), "nvfp4"),
        ("experts.0.w1.weight_shape", torch.zeros(2, dtype=torch.int64), "int4"),
        ("experts.0.w1.qweight", torch.zeros(4, 4, dtype=torch.int32), "GPTQ or AWQ"),
        ("experts.gate_up_proj_blocks", torch.zeros(2, 2, dtype=torch.uint8), "gpt-oss"),
    ],
)
def test_other_schemes_by_tensor(packed, name, tensor, scheme):
    edit_tensors(packed, lambda t: t.update({f"{LAYER}.{name}": tensor}))
    with pytest.raises(CheckpointError, match=rf"{LAYER}.{name} in model.safetensors .*{scheme}"):
        check(packed)


@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes"},
    ],
)
def test_other_schemes_by_config(packed, block):
    edit_config(packed, lambda c: c["text_config"].update(quantization_config=block))
    with pytest.raises(CheckpointError, match=block.get("format", block["quant_method"])):
        check(packed)


@pytest.mark.parametrize("inner", ["", "model."])
def test_prefixes_of_re_exports(goldens, tmp_path, inner):
    """A re-export without the inner `model.` and a base model's names are known by themselves."""
    folder = copy_checkpoint(goldens("k3_text_tiny/config.json").parent, tmp_path / "m")

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("language_model.model.", f"language_model.{inner}")] = tensors.pop(name)

    edit_tensors(folder, rename)
    check(folder)


def test_base_model_names(plain):
    def rename(tensors):
        tensors.pop("lm_head.weight")
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(plain, rename)
    check(plain)


def test_fused_names(goldens, tmp_path):
    folder = copy_checkpoint(goldens("kimi_linear_tiny/config.json").parent, tmp_path / "m")

    def fuse(tensors):
        for layer in range(1, 8):
            stem = f"model.layers.{layer}.block_sparse_moe.experts."
            w = {k: [tensors.pop(f"{stem}{e}.{k}.weight") for e in range(16)] for k in ("w1", "w2", "w3")}
            pairs = zip(w["w1"], w["w3"], strict=True)
            tensors[f"{stem}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            tensors[f"{stem}down_proj"] = torch.stack(w["w2"])

    edit_tensors(folder, fuse)
    check(folder)


@pytest.mark.parametrize("shape", [(4,), (16,), (1, 1, 4, 1)])
def test_decay_shapes(plain, shape):
    def reshape(tensors):
        for name in list(tensors):
            if name.endswith("A_log"):
                flat = torch.zeros(16) if shape == (16,) else torch.zeros(4)
                flat[:4] = tensors[name].reshape(-1)
                tensors[name] = flat.reshape(shape)

    edit_tensors(plain, reshape)
    check_decay_tails(check(plain), load_config(plain))


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_decay_tail_is_not_zero(packed, value):
    name = "language_model.model.layers.2.self_attn.A_log"
    edit_tensors(packed, lambda t: t[name][7:8].fill_(value))
    with pytest.raises(CheckpointError, match=rf"{name} in model.safetensors: entry 7 is {value}"):
        check_decay_tails(check(packed), load_config(packed))


def test_nan_scale(packed):
    name = f"{LAYER}.experts.2.w3.weight_scale"
    edit_tensors(packed, lambda t: t[name][9].fill_(255))
    with pytest.raises(CheckpointError, match=rf"{name} in model.safetensors: .*row 9, group 0 is 255"):
        check_scales(check(packed))


def test_damage_anywhere_is_our_error(goldens, tmp_path):
    """Bytes changed, lost or inserted in headers, index and config: refused with our errors, or harmless."""
    folder = copy_checkpoint(goldens("k3_release_tiny/config.json").parent, tmp_path / "m")
    generator = random.Random(0)
    files = sorted(folder.iterdir())
    refused = 0
    for _ in range(300):
        path = generator.choice(files)
        kept = path.read_bytes()
        data, at = bytearray(kept), generator.randrange(min(len(kept), 30_000))
        match generator.randrange(3):
            case 0:
                data[at] = generator.randrange(256)
            case 1:
                del data[at : at + generator.randrange(1, 20)]
            case 2:
                data[at:at] = generator.choice([b"0", b"-", b'"', b"null", b"[", b"1e9", b"{}"])
        path.write_bytes(data)
        try:
            check(folder, vision=None)
        except KimiHfError as error:
            refused += bool(str(error))
        path.write_bytes(kept)
    assert refused > 200


def test_absurd_sizes_end(packed):
    edit_config(packed, lambda config: config["text_config"].update(num_experts=10**9))
    with pytest.raises(CheckpointError, match="and 499992 more of this kind"):
        check(packed)
