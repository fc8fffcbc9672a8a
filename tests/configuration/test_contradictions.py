"""What a configuration cannot be: every contradiction raises `ConfigError` and names its field."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_hf import KimiK3Config, KimiLinearConfig
from kimi_hf.configuration.layer_plan import complement
from kimi_hf.errors import ConfigError, KimiHfError

QUICK = settings(max_examples=60, deadline=None)


def _config(linear=None, **fields):
    experts = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 8}
    base = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 2, **experts, **fields}
    return KimiLinearConfig(linear_attn_config={"num_heads": 2, "head_dim": 8, **(linear or {})}, **base)


# (fields that contradict, the field whose name the message holds)
FIELDS = [
    ({"vocab_size": 0}, "vocab_size"),
    ({"hidden_size": -8}, "hidden_size"),
    ({"hidden_size": 16.0}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"intermediate_size": 0}, "intermediate_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": "four"}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 1}, "num_key_value_heads"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ({"hidden_act": "mystery"}, "hidden_act"),
    ({"activation_situ_beta": 4.0}, "activation_situ_beta"),
    ({"activation_situ_linear_beta": 25.0}, "activation_situ_linear_beta"),
    ({"hidden_act": "situ", "activation_situ_beta": -1.0}, "activation_situ_beta"),
    ({"hidden_act": "situ", "activation_situ_linear_beta": 0.0}, "activation_situ_linear_beta"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
    ({"initializer_range": -0.1}, "initializer_range"),
    ({"attention_dropout": 1.5}, "attention_dropout"),
    ({"q_lora_rank": 0}, "q_lora_rank"),
    ({"kv_lora_rank": None}, "kv_lora_rank"),
    ({"kv_lora_rank": 0}, "kv_lora_rank"),
    ({"qk_nope_head_dim": 0}, "qk_nope_head_dim"),
    ({"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
    ({"v_head_dim": 0}, "v_head_dim"),
    ({"mla_use_nope": False}, "mla_use_nope"),
    ({"attn_res_block_size": 0}, "attn_res_block_size"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ({"num_experts": 0}, "num_experts"),
    ({"num_experts_per_token": None}, "num_experts_per_token"),
    ({"num_experts_per_token": 9}, "num_experts_per_token"),
    ({"num_experts_per_token": 0}, "num_experts_per_token"),
    ({"num_shared_experts": -1}, "num_shared_experts"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ({"routed_expert_hidden_size": 0}, "routed_expert_hidden_size"),
    ({"num_experts": None, "routed_expert_hidden_size": 8}, "routed_expert_hidden_size"),
    ({"latent_moe_use_norm": True}, "latent_moe_use_norm"),
    ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func"),
    ({"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    ({"num_expert_group": 3}, "num_expert_group"),
    ({"num_expert_group": 8, "topk_group": 4}, "num_expert_group"),
    ({"num_expert_group": 2, "topk_group": 3}, "topk_group"),
    ({"num_expert_group": 4, "topk_group": 1, "num_experts_per_token": 3}, "topk_group"),
    ({"topk_group": None}, "topk_group"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ({"moe_layer_freq": 0}, "moe_layer_freq"),
    ({"layer_types": ["full_attention", "sliding"] * 2}, "layer_types"),
    ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types"),
    ({"mla_use_output_gate": "no"}, "mla_use_output_gate"),
    ({"moe_renormalize": None}, "moe_renormalize"),
    ({"pad_token_id": 163840}, "pad_token_id"),
]
LINEAR = [
    ({"num_heads": 0}, "num_heads"),
    ({"head_dim": "8"}, "head_dim"),
    ({"short_conv_kernel_size": 0}, "short_conv_kernel_size"),
    ({"gate_lower_bound": 0.0}, "gate_lower_bound"),
    ({"gate_lower_bound": -5.01}, "gate_lower_bound"),
    ({"gate_lower_bound": 1}, "gate_lower_bound"),
    ({"gate_lower_bound": float("nan")}, "gate_lower_bound"),
    ({"gate_lower_bound": "-5"}, "gate_lower_bound"),
    ({"use_full_rank_gate": "yes"}, "use_full_rank_gate"),
    ({"kda_layer": [1, 2, 3]}, "kda_layer"),
    ({"kda_layers": [1, 2, 3], "full_attn_layers": [3, 4]}, "both hold"),
    ({"kda_layers": [1, 2], "full_attn_layers": [4]}, "leave out layers"),
    ({"kda_layers": [0, 1, 2], "full_attn_layers": [3]}, "kda_layers"),
    ({"kda_layers": [1, 2, 3], "full_attn_layers": [4, 5]}, "full_attn_layers"),
    ({"kda_layers": [1, 2, 2, 3], "full_attn_layers": [4]}, "kda_layers"),
    ({"kda_layers": [1, 2, "3"], "full_attn_layers": [4]}, "kda_layers"),
    ({"kda_layers": "1,2,3", "full_attn_layers": [4]}, "kda_layers"),
]


@pytest.mark.parametrize(("fields", "name"), FIELDS, ids=lambda x: str(x)[:60])
def test_a_contradiction_names_its_field(fields, name):
    with pytest.raises(ConfigError, match=rf"\b{name}\b"):
        _config(**fields)


@pytest.mark.parametrize(("linear", "name"), LINEAR, ids=lambda x: str(x)[:60])
def test_a_contradiction_in_linear_attn_config_names_its_field(linear, name):
    with pytest.raises(ConfigError, match=rf"linear_attn_config.*{name}"):
        _config(linear=linear)


def test_a_file_that_contradicts_itself_is_refused_on_loading(tmp_path):
    fields = _config().to_dict() | {"num_experts_per_token": 99}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"num_experts_per_token \(99\) is more than num_experts \(8\)"):
        KimiLinearConfig.from_pretrained(tmp_path)


def test_both_parts_of_a_composite_must_agree():
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        KimiK3Config(text_config=_config().to_dict(), tie_word_embeddings=True)


def test_foreign_quantization_names_its_format():
    with pytest.raises(ConfigError, match=r"quantization_config\.format is 'nvfp4-pack-quantized'"):
        _config(quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})


def test_errors_are_value_errors_of_one_family():
    assert issubclass(ConfigError, KimiHfError) and issubclass(KimiHfError, ValueError)


@st.composite
def _partitions(draw):
    layers = draw(st.integers(1, 40))
    kda = draw(st.lists(st.integers(1, layers), unique=True, max_size=layers))
    return layers, kda, complement(kda, layers)


@QUICK
@given(_partitions(), st.sampled_from(["both", "kda_layers", "full_attn_layers"]))
def test_any_split_of_the_layers_is_accepted_and_kept(split, given_lists):
    layers, kda, full = split
    lists = {"kda_layers": kda, "full_attn_layers": full}
    lists = lists if given_lists == "both" else {given_lists: lists[given_lists]}
    config = KimiLinearConfig(num_hidden_layers=layers, linear_attn_config=lists)
    assert sorted(config.linear_attn_config["kda_layers"]) == sorted(kda)
    assert sorted(config.linear_attn_config["full_attn_layers"]) == full
    assert [i + 1 for i, kind in enumerate(config.layer_types) if kind == "linear_attention"] == sorted(kda)


@QUICK
@given(_partitions(), st.data())
def test_any_damaged_split_is_refused_by_name(split, data):
    layers, kda, full = split
    lists = {"kda_layers": list(kda), "full_attn_layers": list(full)}
    name = data.draw(st.sampled_from([n for n, x in lists.items() if x]))
    other = "kda_layers" if name == "full_attn_layers" else "full_attn_layers"
    layer = data.draw(st.sampled_from(lists[name]))
    damage = data.draw(st.sampled_from(["drop", "repeat", "share", "zero", "beyond"]))
    if damage == "drop":
        lists[name].remove(layer)
    elif damage == "share":
        lists[other].append(layer)
    else:
        lists[name].append({"repeat": layer, "zero": 0, "beyond": layers + 1}[damage])
    with pytest.raises(ConfigError, match="linear_attn_config.*layers"):
        KimiLinearConfig(num_hidden_layers=layers, linear_attn_config=lists)


@QUICK
@given(experts=st.integers(1, 64), groups=st.integers(1, 16), kept=st.integers(1, 16), chosen=st.integers(1, 64))
def test_expert_groups_are_legal_exactly_when_a_router_can_choose(experts, groups, kept, chosen):
    divides, within = experts % groups == 0, kept <= groups
    scored = groups <= kept or experts // groups >= 2
    enough = divides and kept * (experts // groups) >= chosen and chosen <= experts
    fields = {
        "num_experts": experts,
        "num_experts_per_token": chosen,
        "num_expert_group": groups,
        "topk_group": kept,
    }
    if divides and within and scored and enough:
        assert _config(**fields).num_expert_group == groups
    else:
        with pytest.raises(ConfigError, match="num_experts_per_token|num_expert_group|topk_group"):
            _config(**fields)


@QUICK
@given(st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(-9, 9), st.none()))
def test_the_lower_bound_is_null_or_within_minus_five_and_zero(bound):
    if bound is None or -5 <= bound < 0:
        assert _config(linear={"gate_lower_bound": bound}).linear_attn_config["gate_lower_bound"] == bound
    else:
        with pytest.raises(ConfigError, match="gate_lower_bound"):
            _config(linear={"gate_lower_bound": bound})
