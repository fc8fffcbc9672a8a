"""Fields changed after a configuration was made: by keywords of `from_pretrained`, or by assignment. They follow, or raise."""

import copy
import json

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import kimi_hf
from kimi_hf.errors import CheckpointError, ConfigError

from ..contract.tiny import kimi_k3_config, kimi_k3_text_config, ladder_config

TextModel, K3Model = kimi_hf.KimiLinearForCausalLM, kimi_hf.KimiK3ForConditionalGeneration
# (keywords, what the error says)
REFUSED = [
    ({"hidden_act": "zork"}, "hidden_act must be one of .* got 'zork'"),
    ({"num_hidden_layers": 20}, "leave out layers .5, 6.*num_hidden_layers 20.*null for both"),
    ({"num_experts_per_token": 99}, "num_experts_per_token .99. is more than num_experts"),
    ({"num_experts_per_tok": 99}, "num_experts_per_token .99. is more than num_experts"),
    ({"kv_lora_rank": 0}, "kv_lora_rank must be an integer of at least 1, got 0"),
    ({"linear_attn_config": {"gate_lower_bound": -7}}, "gate_lower_bound must lie in .-5, 0."),
    ({"linear_attn_config": [1]}, "linear_attn_config must be an object"),
    ({"layer_types": ["full_attention"]}, "layer_types holds 1 entries, but num_hidden_layers is 4"),
]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    TextModel(kimi_k3_text_config()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def k3_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k3")
    K3Model(kimi_k3_config()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("keywords", "told"), REFUSED, ids=str)
@pytest.mark.parametrize("loader", [TextModel, AutoModel, AutoConfig], ids=lambda cls: cls.__name__)
def test_keywords_are_checked(loader, keywords, told, text_folder):
    with pytest.raises(ConfigError, match=told):
        loader.from_pretrained(text_folder, **copy.deepcopy(keywords))


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"text_config": {"hidden_act": "zork"}}, "hidden_act must be one of"),
        ({"text_config": {"num_hidden_layers": 20}}, "leave out layers"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama'"),
        (
            {"text_config": {"quantization_config": {"quant_method": "x"}}},
            "quantization_config cannot be given in text_config",
        ),
        ({"text_config": [1]}, "text_config must be a KimiLinearConfig or an object with its fields, got .1."),
        ({"vision_config": 3}, "vision_config must be a KimiK3VisionConfig or an object with its fields, got 3"),
        ({"vision_config": {"vt_num_hidden_layers": 0}}, "vt_num_hidden_layers must be"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but text_config.tie_word_embeddings is False"),
    ],
    ids=str,
)
def test_keywords_for_the_parts_of_a_composite_are_checked(keywords, told, k3_folder):
    for loader in (K3Model, AutoConfig):
        with pytest.raises(ConfigError, match=told):
            loader.from_pretrained(k3_folder, **copy.deepcopy(keywords))


@pytest.mark.parametrize("loader", [K3Model, AutoModelForCausalLM], ids=lambda cls: cls.__name__)
def test_a_keyword_of_a_part_says_where_it_belongs(loader, k3_folder):
    with pytest.raises(
        ConfigError, match=r"num_hidden_layers is a field of text_config; give text_config=\{'num_hidden_layers': 2\}"
    ):
        loader.from_pretrained(k3_folder, num_hidden_layers=2)


@pytest.mark.parametrize("loader", [TextModel, AutoModelForCausalLM], ids=lambda cls: cls.__name__)
def test_fewer_layers_are_the_first_ones_and_can_be_saved(loader, text_folder, tmp_path):
    model = loader.from_pretrained(text_folder, num_hidden_layers=2)
    assert len(model.model.layers) == 2
    model.save_pretrained(tmp_path)
    config = TextModel.from_pretrained(tmp_path).config
    assert config.linear_attn_config["kda_layers"] == [1] and config.linear_attn_config["full_attn_layers"] == [2]
    assert config.layer_types == ["linear_attention", "full_attention"]


def test_a_keyword_for_a_part_leaves_its_other_fields_alone(k3_folder, tmp_path):
    model = K3Model.from_pretrained(k3_folder, text_config={"num_hidden_layers": 2, "rms_norm_eps": 1e-3})
    model.save_pretrained(tmp_path)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (k3_folder, tmp_path))
    before["text_config"] |= {"num_hidden_layers": 2, "rms_norm_eps": 1e-3}
    before["text_config"]["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    assert after == before
    assert K3Model.from_pretrained(tmp_path).config.text_config.rms_norm_eps == 1e-3


def test_a_keyword_for_linear_attention_leaves_its_other_fields_alone(text_folder):
    config = AutoConfig.from_pretrained(text_folder, linear_attn_config={"gate_lower_bound": -3.0})
    assert config.linear_attn_config == kimi_k3_text_config().linear_attn_config | {"gate_lower_bound": -3.0}
    with pytest.raises((CheckpointError, RuntimeError), match="shape|mismatch"):
        TextModel.from_pretrained(text_folder, linear_attn_config={"num_heads": 4})


def test_layer_types_may_be_given_anew(text_folder):
    types = ["full_attention", "linear_attention"] * 2
    config = AutoConfig.from_pretrained(text_folder, layer_types=types)
    assert config.layer_types == types and config.linear_attn_config["full_attn_layers"] == [1, 3]
    config.mlp_layer_types = ["dense", "dense", "sparse", "sparse"]
    config.linear_conv_kernel_dim = 3
    config.check()
    assert config.first_k_dense_replace == 2 and config.linear_attn_config["short_conv_kernel_size"] == 3


def test_a_head_that_is_not_tied_is_not_called_tied(text_folder, tmp_path):
    with pytest.raises(ConfigError, match="tie_word_embeddings is true, but the head's weight is another tensor"):
        TextModel.from_pretrained(text_folder, tie_word_embeddings=True)
    model = TextModel.from_pretrained(text_folder)
    model.config.tie_word_embeddings = True
    with pytest.raises(ConfigError, match="call tie_weights"):
        model.save_pretrained(tmp_path / "out")
    model.tie_weights()
    model.save_pretrained(tmp_path / "out")
    model.config.tie_word_embeddings = False
    with pytest.raises(ConfigError, match="tie_word_embeddings is false, but head and embedding are one tensor"):
        model.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    again = TextModel.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "zork"),
        ("kv_lora_rank", None),
        ("num_hidden_layers", 20),
        ("num_hidden_layers", "four"),
        ("vocab_size", "x"),
        ("linear_attn_config", [1]),
        ("rms_norm_eps", float("inf")),
    ],
)
def test_an_assigned_contradiction_reaches_neither_model_nor_folder(field, value, tmp_path):
    config = kimi_k3_text_config()
    setattr(config, field, value)
    named = "layers" if value == 20 else field
    for act in (TextModel, kimi_hf.KimiLinearModel, lambda c: c.save_pretrained(tmp_path / "out"), kimi_hf.census):
        with pytest.raises(ConfigError, match=named):
            act(config)
    model = TextModel(kimi_k3_text_config())
    setattr(model.config, field, value)
    with pytest.raises(ConfigError, match=named):
        model.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_parts_are_checked_wherever_they_are_built():
    config = kimi_k3_config()
    config.text_config.linear_attn_config["gate_lower_bound"] = -7
    config.vision_config.vt_num_attention_heads = 5
    for cls in (K3Model, kimi_hf.KimiK3Model):
        with pytest.raises(ConfigError, match="gate_lower_bound"):
            cls(config)
    with pytest.raises(ConfigError, match="vt_num_attention_heads 5"):
        kimi_hf.KimiK3VisionModel(config.vision_config)


@pytest.mark.parametrize("cls", [TextModel, K3Model, kimi_hf.LadderForCausalLM])
def test_a_configuration_of_another_model_is_named(cls):
    other = kimi_hf.KimiK3VisionConfig()
    with pytest.raises(ConfigError, match=f"{cls.__name__} is built from a .*Config, got a KimiK3VisionConfig"):
        cls(other)


def test_what_was_filled_in_follows():
    config = kimi_hf.KimiLinearConfig(num_hidden_layers=8, num_attention_heads=4)
    config.num_hidden_layers, config.num_attention_heads = 5, 2
    assert config.linear_attn_config["full_attn_layers"] == [4, 5]
    assert config.num_key_value_heads == config.linear_attn_config["num_heads"] == 2
    config.check()
    config.linear_attn_config = {"num_heads": 6, "full_attn_layers": [1]}
    config.num_hidden_layers, config.num_attention_heads = 3, 8
    assert config.linear_attn_config["num_heads"] == 6
    assert config.linear_attn_config["kda_layers"] == [2, 3]


def test_what_was_given_stays():
    config = kimi_k3_text_config()
    given = copy.deepcopy(config.linear_attn_config)
    config.num_hidden_layers = 1
    assert config.layer_types == ["linear_attention"] and config.linear_attn_config["full_attn_layers"] == []
    config.num_hidden_layers = 4
    assert config.linear_attn_config == given
    for twin in (copy.deepcopy(config), copy.copy(config)):
        twin.num_hidden_layers = 2
        assert twin.linear_attn_config["kda_layers"] == [1] and config.linear_attn_config == given
    config = kimi_hf.KimiLinearConfig(num_attention_heads=2, num_key_value_heads=2)
    config.num_attention_heads = 4
    with pytest.raises(ConfigError, match=r"num_key_value_heads \(2\) must equal num_attention_heads \(4\)"):
        config.check()


def test_a_ladder_follows_its_width_and_its_parts():
    config = ladder_config("gated-delta-net")
    config.hidden_size = 64
    assert config.linear_head_dim == 32 and config.intermediate_size == 176
    config.mixer = "softmax_attention"
    assert config.linear_head_dim is None
    config.check()
    config = ladder_config("kimi-k3", num_hidden_layers=4)
    mixers = config.mixers
    config.num_hidden_layers = 2
    assert config.mixers == mixers[:2]
    config.mixer = "softmax_attention"
    with pytest.raises(ConfigError, match="but nothing reads it"):
        kimi_hf.LadderForCausalLM(config)
