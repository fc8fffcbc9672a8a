"""Random checkpoints with a released configuration's shape."""

import json

import pytest
import torch

from kimi_hf.checkpoint.check import check_checkpoint, check_decay_tails, check_scales
from kimi_hf.checkpoint.geometry import TextGeometry, load_config
from kimi_hf.configuration import KimiK3Config, KimiLinearConfig
from kimi_hf.conversion import make_tiny as module
from kimi_hf.conversion.make_tiny import make_tiny, set_fields, shrink_config
from kimi_hf.errors import ConfigError
from kimi_hf.ops import mxfp4

from .helpers import command, hashes, read_all


@pytest.mark.parametrize("name", ["kimi_k3_config.json", "kimi_linear_48b_config.json"])
def test_released_shapes(goldens, tmp_path, name):
    source = goldens(f"released/{name}")
    assert command(module, source, tmp_path / "out", "--seed", 5) == 0
    config = load_config(tmp_path / "out")
    checkpoint = check_checkpoint(tmp_path / "out", config, strict_dtypes=True)
    check_decay_tails(checkpoint, config)
    check_scales(checkpoint)
    assert checkpoint.nbytes < 3_000_000
    (KimiK3Config if "text_config" in config else KimiLinearConfig)(**config)


def test_every_switch_survives(goldens):
    full = json.loads(goldens("released/kimi_k3_config.json").read_text())
    big, small = TextGeometry.from_config(full), TextGeometry.from_config(shrink_config(full))
    for switch in ("packed", "mla_gate", "full_rank_gate", "bounded_gate", "latent_norm", "attn_res", "tied", "dtype"):
        assert getattr(small, switch) == getattr(big, switch)
    assert small.num_layers == 9 and small.kda_layers == {0, 1, 2, 4, 5, 6} and small.first_dense == 1
    assert small.latent and small.q_rank and small.num_shared == 2


def test_values(goldens, tmp_path):
    config = set_fields(shrink_config(load_config(goldens("released/kimi_k3_config.json")), 5), ["dtype=float32"])
    tensors = read_all(make_tiny(config, tmp_path / "out", seed=1))
    text = "language_model.model."
    assert bool((tensors[f"{text}layers.0.input_layernorm.weight"] == 1).all())
    decay = tensors[f"{text}layers.0.self_attn.A_log"]
    assert decay.shape == (16,) and not decay[4:].any() and 0 <= decay[:4].min() <= decay[:4].max() < 2.8
    assert tensors[f"{text}embed_tokens.weight"].float().std() == pytest.approx(0.02, rel=0.05)
    stem = f"{text}layers.1.block_sparse_moe.experts.0.w1.weight"
    weight = mxfp4.unpack(tensors[f"{stem}_packed"], tensors[f"{stem}_scale"], torch.float32)
    assert 0.01 < weight.std() < 0.04
    one, two = (tensors[f"{text}layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    assert not torch.equal(one, two)


def test_seed_decides(goldens, tmp_path):
    config = shrink_config(load_config(goldens("released/kimi_linear_48b_config.json")), 4)
    runs = [hashes(make_tiny(config, tmp_path / f"{at}", seed=seed)) for at, seed in enumerate((1, 1, 2))]
    assert runs[0] == runs[1] != runs[2]


def test_command_options(tmp_path):
    arguments = ["--num-layers", 4, "--experts", "packed", "--set", "num_experts=6", "--max-shard-size", "100KB"]
    assert command(module, "kimi-linear-48b-a3b", tmp_path / "out", *arguments) == 0
    config = load_config(tmp_path / "out")
    assert config["num_experts"] == 6 and config["num_hidden_layers"] == 4
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    check_checkpoint(tmp_path / "out", config)
    command(module, tmp_path / "out", tmp_path / "same", "--keep-sizes", "--experts", "plain")
    assert load_config(tmp_path / "same")["hidden_size"] == config["hidden_size"]


def test_settings():
    config = {"text_config": {"a": 1}}
    set_fields(config, ["text_config.a=2", "text_config.b=word", "c=[1]"])
    assert config == {"text_config": {"a": 2, "b": "word"}, "c": [1]}
    for wrong in ("text_config.a", "nowhere.x=1"):
        with pytest.raises(ConfigError, match="expected FIELD=VALUE"):
            set_fields(config, [wrong])


def test_no_layers_are_refused(goldens):
    with pytest.raises(ConfigError, match="num_layers is 0"):
        shrink_config(load_config(goldens("released/kimi_linear_48b_config.json")), 0)
