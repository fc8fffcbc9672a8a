"""`LadderConfig`: what it fills in, what it refuses, how it travels, and how large the rungs are."""

import pytest
import torch

import kimi_hf
from kimi_hf import LadderConfig, LadderForCausalLM, census, preset
from kimi_hf.configuration.rungs import RUNGS
from kimi_hf.errors import ConfigError

SIZES = [(rung, suffix, about) for rung in RUNGS for suffix, about in (("-small", 100e6), ("-tiny", 10e6))]


def test_gpt2_counts_its_published_parameters():
    config = preset("gpt2")
    assert census(config).total == 124_439_808
    with torch.device("meta"):
        model = LadderForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    config = LadderConfig.rung("gpt2", vocab_size=50304, bias=False)
    # nanoGPT reports its size without positions: 123.59M for this model.
    assert round((census(config).total - 1024 * 768) / 1e6, 2) == 123.59
    assert kimi_hf.census(preset("gpt2")).cache_bytes_per_token == 2 * 12 * 768 * 2


@pytest.mark.parametrize(("rung", "suffix", "about"), SIZES)
def test_rungs_have_about_their_size(rung, suffix, about):
    config = LadderConfig.rung(rung + suffix)
    with torch.device("meta"):
        model = LadderForCausalLM(config)
    stored = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    assert census(config).total == stored
    assert 0.9 * about < stored < 1.15 * about


def test_neighbours_differ_in_few_fields():
    names = list(RUNGS)
    changed = {}
    for lower, upper in zip(names, names[1:], strict=False):
        keys = set(RUNGS[lower]) | set(RUNGS[upper])
        changed[upper] = {key for key in keys if RUNGS[lower].get(key) != RUNGS[upper].get(key)}
    assert changed["linear-transformer"] == changed["delta-net"] == {"mixer"}
    assert changed["kimi-linear"] == {"mixer", "feed_forward"}


@pytest.mark.parametrize("rung", [*RUNGS, "gpt2-tiny", "kimi-k3-small"])
def test_configs_survive_a_file(rung, tmp_path):
    config = LadderConfig.rung(rung)
    config.save_pretrained(tmp_path)
    again = LadderConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict() | {"transformers_version": again.to_dict()["transformers_version"]}


def test_a_change_drops_what_nothing_reads_any_more():
    config = LadderConfig.rung("kimi-k3-tiny", mixer="softmax_attention", feed_forward="gelu_mlp", residual="sum")
    assert config.gate_lower_bound is None and config.num_experts is None and config.attn_res_block_size is None
    config = LadderConfig.rung("kimi-k3-tiny", feed_forward="moe")
    assert config.hidden_act == "situ" and config.routed_expert_hidden_size is None
    config = LadderConfig.rung("gated-delta-net-tiny", residual="block_attn_res", attn_res_block_size=2)
    assert config.residual == "block_attn_res" and config.mixers == ["gated_delta_net"] * 8
    config = LadderConfig.rung("kimi-linear-tiny", num_hidden_layers=4)
    assert config.feed_forwards == ["swiglu", "moe", "moe", "moe"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mixer": "rnn"}, "mixer must be one of 'softmax_attention'"),
        ({"mixer": []}, "mixer names 0 layers"),
        ({"mixer": ["delta_net"] * 13}, "mixer names 13 layers, but num_hidden_layers is 12"),
        ({"residual": "dense"}, "residual must be one of"),
        ({"positions": "rotary"}, "positions must be one of 'learned', 'none'"),
        ({"norm": "batch"}, "norm must be one of"),
        ({"kv_lora_rank": 32}, "kv_lora_rank is 32, but nothing reads it: it belongs to latent_attention"),
        ({"short_conv_kernel_size": 4}, "short_conv_kernel_size is 4, but nothing reads it"),
        ({"num_experts": 4}, "num_experts is 4, but nothing reads it: it belongs to moe, latent_moe"),
        ({"attn_res_block_size": 2}, "attn_res_block_size is 2, but nothing reads it"),
        ({"mixer": "delta_net", "attention_dropout": 0.1}, "attention_dropout is 0.1, but nothing reads it"),
        (
            {"mixer": "delta_net", "feed_forward": "swiglu", "norm": "rms_norm", "bias": True},
            "bias is True, but nothing",
        ),
        ({"num_attention_heads": 5}, "num_attention_heads .5. does not divide hidden_size"),
        ({"residual_dropout": 1.0}, "residual_dropout must be a number in"),
        ({"feed_forward": "moe", "num_experts_per_token": 9}, "num_experts_per_token .9. is more than num_experts .8."),
        ({"feed_forward": "moe", "num_expert_group": 3}, "num_expert_group .3. does not divide num_experts"),
        ({"feed_forward": "moe", "hidden_act": "relu"}, "hidden_act must be one of"),
        ({"feed_forward": "moe", "activation_situ_linear_beta": 3.0}, "activation_situ_linear_beta is set, but"),
        ({"mixer": "kimi_delta_attention", "short_conv_kernel_size": 0}, "kimi_delta_attention needs its convolutions"),
        ({"mixer": "kimi_delta_attention", "gate_lower_bound": 1.0}, "gate_lower_bound must lie in"),
        (
            {"mixer": ["kimi_delta_attention", "delta_net"], "linear_value_head_dim": 8},
            "linear_value_head_dim .8. must equal linear_head_dim .64.",
        ),
        ({"activation_function": "relu"}, "activation_function must be one of"),
        ({"norm_eps": 0.0}, "norm_eps must be a number above 0"),
    ],
)
def test_contradictions_are_told(fields, told):
    with pytest.raises(ConfigError, match=told):
        LadderConfig(**fields)


def test_unknown_names_are_told():
    with pytest.raises(ConfigError, match="known are gpt2, linear-transformer"):
        LadderConfig.rung("mamba")
    with pytest.raises(ConfigError, match="gated-delta-net-tiny"):
        preset("gpt3")


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (None, {}, "rung None is not known"),
        ("gpt2-tiny", {"residal": "full_attn_res"}, "residal is not a field of LadderConfig; did you mean residual"),
        ("gpt2-tiny", {"mixers": "delta_net"}, "mixers is not a field of LadderConfig; did you mean mixer"),
        ("gpt2-tiny", {"feed_forward": None}, "feed_forward must be a name or a list of names, got None"),
        ("gpt2-tiny", {"mixer": [["delta_net"]]}, "mixer must be one of"),
        ("gpt2-tiny", {"residual": ["sum"]}, "residual must be one of"),
        ("kimi-linear-tiny", {"num_hidden_layers": "8"}, "num_hidden_layers must be an integer"),
    ],
)
def test_changes_that_would_do_nothing_or_make_no_sense_are_told(name, changes, told):
    with pytest.raises(ConfigError, match=told):
        LadderConfig.rung(name, **changes)


def test_a_changed_tuple_is_repeated_as_a_list_is():
    for kind in (list, tuple):
        config = LadderConfig.rung("gpt2-tiny", feed_forward=kind(["swiglu", "moe"]), attn_implementation="eager")
        assert config.feed_forwards == ["swiglu", "moe"] * 4 and config.architectures == ["LadderForCausalLM"]
