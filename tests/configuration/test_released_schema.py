"""Released config files survive load and save field for field, and a changed field is written changed."""

import copy
import json

import pytest
from transformers import AutoConfig

import kimi_hf
from kimi_hf import KimiK3Config, KimiLinearConfig
from kimi_hf.configuration.layer_plan import default_full_attention_layers
from kimi_hf.errors import ConfigError

from ..conftest import fixture_path

# transformers stamps the file it writes; inside the text part of a release its own old stamp stays.
STAMP = "transformers_version"
RELEASED = {"kimi_k3_config.json": KimiK3Config, "kimi_linear_48b_config.json": KimiLinearConfig}
FIXTURES = ["k3_text_tiny", "k3_mxfp4_tiny", "k3_release_tiny", "k3_multimodal_tiny", "kimi_linear_tiny"]


def _released(name):
    return json.loads(fixture_path(f"released/{name}").read_text())


def _file(folder):
    return json.loads((folder / "config.json").read_text())


def _saved(config, folder):
    config.save_pretrained(folder)
    written = _file(folder)
    written.pop(STAMP)
    return written


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_file_survives_load_and_save(name, tmp_path):
    released = _released(name)
    (tmp_path / "config.json").write_text(json.dumps(released))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is RELEASED[name]
    assert _saved(config, tmp_path / "1") == released
    assert _saved(AutoConfig.from_pretrained(tmp_path / "1"), tmp_path / "2") == released
    assert _saved(copy.deepcopy(config), tmp_path / "3") == released
    assert _saved(type(config).from_dict(copy.deepcopy(released)), tmp_path / "4") == released
    assert json.loads(config.to_json_string()).items() >= released.items()


@pytest.mark.parametrize("case", FIXTURES)
def test_fixture_files_survive(case, tmp_path):
    original = _file(fixture_path(case))
    assert _saved(AutoConfig.from_pretrained(fixture_path(case)), tmp_path) == original


@pytest.mark.parametrize("name", RELEASED)
def test_loading_does_not_change_the_dictionary_it_reads(name):
    released = _released(name)
    before = copy.deepcopy(released)
    RELEASED[name].from_dict(released)
    assert released == before


def test_changed_and_unknown_fields_are_written(tmp_path):
    released = _released("kimi_k3_config.json")
    config = KimiK3Config.from_dict({**copy.deepcopy(released), "from_a_server": {"a": [1]}})
    config.text_config.routed_scaling_factor = 2.0
    config.text_config.linear_attn_config["gate_lower_bound"] = -3.0
    config.vision_config.vt_num_hidden_layers = 3
    config.media_placeholder_token_id = 7
    written = _saved(config, tmp_path)
    released["text_config"]["routed_scaling_factor"] = 2.0
    released["text_config"]["linear_attn_config"]["gate_lower_bound"] = -3.0
    released["vision_config"]["vt_num_hidden_layers"] = 3
    released["media_placeholder_token_id"] = 7
    assert written == {**released, "from_a_server": {"a": [1]}}


def test_a_config_made_by_hand_writes_every_field(tmp_path):
    """Another reader's defaults may differ from ours, so nothing is left to them."""
    written = _saved(KimiLinearConfig(num_hidden_layers=4), tmp_path)
    missing = KimiLinearConfig._declared_defaults().keys() - written.keys()
    assert not missing
    assert written["linear_attn_config"]["full_attn_layers"] == [4]
    assert _saved(KimiLinearConfig.from_pretrained(tmp_path), tmp_path / "again") == written


def test_the_text_part_can_be_taken_out_of_a_composite_file(tmp_path):
    (tmp_path / "config.json").write_text(fixture_path("released/kimi_k3_config.json").read_text())
    config = KimiLinearConfig.from_pretrained(tmp_path)
    assert type(config) is KimiLinearConfig and config.num_hidden_layers == 93
    written, released = _saved(config, tmp_path / "out"), _released("kimi_k3_config.json")["text_config"]
    # A file of its own needs its own stamp and no record of where it was read from.
    for key in (STAMP, "_name_or_path"):
        released.pop(key, None)
    assert written == released


def test_other_spellings_are_read():
    """Aliases of transformers' native class, and its 0-based layer types."""
    config = KimiLinearConfig(
        num_hidden_layers=4,
        num_experts_per_tok=2,
        num_local_experts=8,
        n_shared_experts=3,
        n_group=2,
        norm_topk_prob=False,
        moe_intermediate_size=8,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        linear_head_dim=16,
        linear_num_heads=2,
        linear_conv_kernel_dim=3,
    )
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (8, 2, 3)
    assert config.num_expert_group == 2 and config.moe_renormalize is False and config.first_k_dense_replace == 2
    assert config.linear_attn_config == {
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 3,
        "kda_layers": [2, 3],
        "full_attn_layers": [1, 4],
    }


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(12, [3, 7, 11]), (10, [3, 7, 9]), (4, [3]), (1, [0]), (93, [*range(3, 92, 4), 92])],
)
def test_default_pattern_counts_from_one(layers, expected):
    config = KimiLinearConfig(num_hidden_layers=layers)
    found = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert found == expected
    assert config.linear_attn_config["full_attn_layers"] == [i + 1 for i in expected]


def test_default_pattern_is_the_released_one():
    k3 = _released("kimi_k3_config.json")["text_config"]["linear_attn_config"]
    assert default_full_attention_layers(93) == k3["full_attn_layers"] and len(k3["full_attn_layers"]) == 24
    kimi_linear = _released("kimi_linear_48b_config.json")["linear_attn_config"]
    assert default_full_attention_layers(27) == kimi_linear["full_attn_layers"]


def test_sparse_layers_of_the_releases():
    k3 = kimi_hf.preset("kimi-k3").text_config
    assert [i for i in range(93) if not k3.is_moe_layer(i)] == [0]
    strided = KimiLinearConfig(
        num_hidden_layers=6,
        num_experts=4,
        num_experts_per_token=1,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
        moe_layer_freq=2,
    )
    assert strided.mlp_layer_types == ["dense", "dense", "sparse", "dense", "sparse", "dense"]


@pytest.mark.parametrize(
    ("preset", "file"), [("kimi-k3", "kimi_k3_config.json"), ("kimi-linear-48b-a3b", "kimi_linear_48b_config.json")]
)
def test_presets_say_what_the_released_files_say(preset, file):
    """Every field a preset and a released file both have is equal (the preset leaves out fields that do nothing)."""

    def compare(ours, theirs, where=""):
        for key in ours.keys() & theirs.keys() - {STAMP, "_name_or_path"}:
            if isinstance(ours[key], dict) and key != "quantization_config":
                compare(ours[key], theirs[key], f"{where}{key}.")
            elif key != "quantization_config":
                assert ours[key] == theirs[key], where + key

    compare(kimi_hf.preset(preset).to_dict(), _released(file))


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"gpt-9.*kimi-k3"):
        kimi_hf.preset("gpt-9")


def test_each_preset_call_gives_a_fresh_config():
    one, other = kimi_hf.preset("kimi-linear-tiny"), kimi_hf.preset("kimi-linear-tiny")
    one.linear_attn_config["num_heads"] = 1
    assert other.linear_attn_config["num_heads"] == 4
