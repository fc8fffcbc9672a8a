"""Parameters, bytes and cache sizes: the published numbers, and every count against real tensors."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import kimi_hf
from kimi_hf import KimiCache, KimiLinearConfig, KimiLinearForCausalLM, census, preset

from ..conftest import fixture_path

# part -> (parameters of one, how many), kimi_k3.md 9.
K3_PARTS = {
    "embed_tokens": (1_174_405_120, 1),
    "lm_head": (1_174_405_120, 1),
    "KDA mixers": (443_740_416, 69),
    "MLA mixers": (232_196_096, 24),
    "dense MLP": (726_663_168, 1),
    "routed experts": (33_030_144, 92 * 896),
    "shared experts": (132_120_576, 92),
    "latent down + up + norm": (51_383_808, 92),
    "router weight + bias": (6_423_424, 92),
    "layer norms + final norm": (1_340_416, 1),
    "AttnRes": (2_680_832, 1),
    "vision tower": (401_214_464, 1),
    "projector": (46_144_512, 1),
}


def test_kimi_k3_has_the_published_numbers():
    counted = census(preset("kimi-k3"))
    assert {part.name: (part.parameters, part.count) for part in counted.parts} == K3_PARTS
    assert counted.text_total == 2_779_484_478_208
    assert counted.total == 2_779_931_837_184
    assert counted.activated == 104_189_614_848
    assert counted.stored_bytes == 1_560_860_324_864
    assert counted.cache_bytes_per_token == 27_648
    assert counted.expanded_cache_bytes_per_token == 1_474_560
    assert counted.state_bytes == 434_110_464
    assert counted.conv_state_bytes == 20_348_928  # windows of 4; servers keep 3 and need 15,261,696
    experts = next(part for part in counted.parts if part.name == "routed experts")
    assert experts.stored_bytes * experts.count == 1_446_456_066_048
    assert counted.stored_bytes - experts.stored_bytes * experts.count == 114_404_258_816


def test_the_released_file_counts_like_the_preset():
    config = kimi_hf.KimiK3Config.from_dict(json.loads(fixture_path("released/kimi_k3_config.json").read_text()))
    assert census(config) == census(preset("kimi-k3"))


def test_kimi_linear_48b_has_the_published_numbers():
    config = KimiLinearConfig.from_dict(json.loads(fixture_path("released/kimi_linear_48b_config.json").read_text()))
    for counted in (census(config), census(preset("kimi-linear-48b-a3b"))):
        parts = {part.name: (part.parameters, part.count) for part in counted.parts}
        assert parts["KDA mixers"] == (39_514_272, 20) and parts["MLA mixers"] == (29_114_880, 7)
        assert parts["dense MLP"] == (63_700_992, 1)
        names = ("routed experts", "shared experts", "router weight + bias")
        moe = sum(part.total for part in counted.parts if part.name in names)
        assert moe == 26 * 1_819_607_296
        assert counted.total == 49_122_681_728 and counted.vision_total == 0
        assert round(counted.activated / 1e9, 2) == 3.11
        assert round((counted.activated - parts["lm_head"][0]) / 1e9, 2) == 2.73
        assert counted.cache_bytes_per_token == 8_064
        assert counted.state_bytes == 41_943_040


def test_against_gpt2_small():
    """2.8 T over 124 M is 22,580, and 104.2 B over 124 M is 840."""
    counted = census(preset("kimi-k3"))
    assert int(round(counted.total / 1e12, 1) * 1e12 / 124e6) == 22_580
    assert int(round(counted.activated / 1e9, 1) * 1e9 / 124e6) == 840


@pytest.mark.parametrize(
    ("name", "millions"),
    [("kimi-k3-tiny", 10), ("kimi-linear-tiny", 10), ("kimi-k3-small", 100), ("kimi-linear-small", 100)],
)
def test_presets_are_about_as_large_as_they_say(name, millions):
    assert 0.7 * millions < census(preset(name)).total / 1e6 < 1.3 * millions


@pytest.mark.parametrize(
    "case", ["k3_text_tiny", "k3_mxfp4_tiny", "k3_release_tiny", "k3_multimodal_tiny", "kimi_linear_tiny"]
)
def test_counts_are_those_of_the_files(case):
    """Parameters and, for the released dtypes, bytes; packed weights count two a byte and their scales not at all."""
    folder, parameters, stored = fixture_path(case), 0, 0
    widths = {"F32": 4, "BF16": 2, "U8": 1}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                view = file.get_slice(name)
                count = torch.Size(view.get_shape()).numel()
                stored += count * widths[view.get_dtype()]
                parameters += 0 if name.endswith("_scale") else 2 * count if name.endswith("_packed") else count
    config = kimi_hf.KimiLinearConfig if case == "kimi_linear_tiny" else kimi_hf.KimiK3Config
    counted = census(config.from_pretrained(folder))
    has_tower = case in ("k3_release_tiny", "k3_multimodal_tiny")
    assert (counted.total if has_tower else counted.text_total) == parameters
    if case == "k3_release_tiny":
        assert counted.stored_bytes == stored


@st.composite
def _configs(draw):
    flag, small = st.booleans(), st.sampled_from([4, 8, 12])
    sparse, layers = draw(flag), draw(st.integers(1, 5))
    fields = {
        "num_hidden_layers": layers,
        "vocab_size": draw(st.integers(20, 40)),
        "hidden_size": draw(small),
        "intermediate_size": draw(small),
        "num_attention_heads": draw(st.integers(1, 3)),
        "q_lora_rank": draw(st.one_of(st.none(), small)),
        "kv_lora_rank": draw(small),
        "qk_nope_head_dim": draw(small),
        "qk_rope_head_dim": draw(small),
        "v_head_dim": draw(small),
        "mla_use_output_gate": draw(flag),
        "attn_res_block_size": draw(st.one_of(st.none(), st.integers(1, 4))),
        "tie_word_embeddings": draw(flag),
        "linear_attn_config": {
            "num_heads": draw(st.integers(1, 3)),
            "head_dim": draw(small),
            "short_conv_kernel_size": draw(st.integers(1, 4)),
            "use_full_rank_gate": draw(flag),
            "gate_lower_bound": draw(st.sampled_from([None, -5.0])),
        },
    }
    if sparse:
        latent = draw(st.one_of(st.none(), small))
        fields |= {
            "num_experts": 4,
            "num_experts_per_token": draw(st.integers(1, 4)),
            "moe_intermediate_size": draw(small),
            "num_shared_experts": draw(st.sampled_from([None, 0, 1, 2])),
            "routed_expert_hidden_size": latent,
            "latent_moe_use_norm": latent is not None and draw(flag),
            "first_k_dense_replace": draw(st.integers(0, min(2, layers))),
            "moe_layer_freq": draw(st.integers(1, 2)),
        }
    return KimiLinearConfig(**fields)


@settings(max_examples=40, deadline=None)
@given(_configs())
def test_any_model_holds_as_many_parameters_as_counted(config):
    with torch.device("meta"):
        model = KimiLinearForCausalLM(config)
    held = sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    linear = config.linear_attn_config
    padding = 0
    if linear["gate_lower_bound"] is not None:
        padding = max(0, linear["head_dim"] - linear["num_heads"]) * len(linear["kda_layers"])
    assert census(config).total == held + padding


@pytest.mark.parametrize("name", ["kimi-k3-tiny", "kimi-linear-tiny"])
def test_cache_bytes_are_those_that_a_cache_allocates(name):
    config = preset(name).get_text_config()
    model = KimiLinearForCausalLM(config).to(torch.bfloat16).eval()
    counted, cache = census(config), KimiCache(config)
    with torch.no_grad():
        model(torch.arange(64)[None], past_key_values=cache)
    report = cache.memory_report()
    assert report["by_kind"]["tokens"] == 64 * counted.cache_bytes_per_token
    assert report["by_kind"]["state"] == counted.state_bytes
    assert report["by_kind"]["window"] == counted.conv_state_bytes


def test_a_config_of_another_family_is_refused():
    from transformers import GPT2Config

    with pytest.raises(TypeError, match="GPT2Config"):
        census(GPT2Config())
