import copy
import json

import pytest

from kimi_hf.configuration.configuration_kimi_k3_vision import KimiK3VisionConfig
from kimi_hf.errors import ConfigError

# `vision_config` of the released config.json.
RELEASED = {
    "_attn_implementation": "flash_attention_2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 64,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 64,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 1024,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "qkv_hidden_size": 1536,
    "text_hidden_size": 7168,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 27,
}
ADDED_BY_TRANSFORMERS = {"model_type", "transformers_version"}


def saved(config: KimiK3VisionConfig, folder) -> dict:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def test_released_schema_survives_field_for_field(tmp_path):
    written = saved(KimiK3VisionConfig(**RELEASED, from_the_future={"a": [1]}), tmp_path)
    assert {k: v for k, v in written.items() if k not in ADDED_BY_TRANSFORMERS} == {
        **RELEASED,
        "from_the_future": {"a": [1]},
    }
    again = saved(KimiK3VisionConfig.from_pretrained(tmp_path), tmp_path)
    assert again == written


def test_defaults_are_the_released_values(tmp_path):
    written = saved(KimiK3VisionConfig(), tmp_path)
    assert {k: v for k, v in written.items() if k not in ADDED_BY_TRANSFORMERS} == {
        k: v for k, v in RELEASED.items() if k != "_attn_implementation"
    }


def test_released_kernel_choice_is_kept_but_does_not_choose():
    config = KimiK3VisionConfig(**RELEASED)
    assert config._attn_implementation is None
    config._attn_implementation = "eager"
    assert copy.deepcopy(config)._attn_implementation == "eager"
    assert config.to_dict()["_attn_implementation"] == "flash_attention_2"
    assert KimiK3VisionConfig(**RELEASED, attn_implementation="sdpa")._attn_implementation == "sdpa"


def test_taken_out_of_a_full_repository(goldens):
    config = KimiK3VisionConfig.from_pretrained(goldens("k3_multimodal_tiny/config.json").parent)
    assert (config.vt_hidden_size, config.head_dim, config.hidden_size) == (48, 16, 48)


def test_init_range_is_written_only_when_set(tmp_path):
    assert KimiK3VisionConfig().initializer_range == 0.02
    assert saved(KimiK3VisionConfig(initializer_range=0.1), tmp_path)["initializer_range"] == 0.1
    assert KimiK3VisionConfig.from_pretrained(tmp_path).initializer_range == 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"vt_num_attention_heads": 5},
        {"qkv_hidden_size": 24, "vt_num_attention_heads": 12},
        {"vt_hidden_size": 512},
        {"vt_hidden_size": 33, "mm_hidden_size": 33},
        {"merge_kernel_size": [2]},
        {"merge_kernel_size": [2, 0]},
        {"merge_kernel_size": 2},
        {"patch_size": 0},
        {"vt_num_hidden_layers": "27"},
        {"init_pos_emb_time": True},
        {"projector_ln_eps": 0.0},
        {"attn_bias": "no"},
        {"pos_emb_type": "learnable"},
        {"pos_emb_interpolation_mode": "bicubic"},
        {"norm_type": "layernorm"},
        {"mlp_type": "mlp3"},
        {"merge_type": "sd2"},
        {"mm_projector_type": "patchmerger"},
    ],
    ids=str,
)
def test_contradictions_name_their_field(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        KimiK3VisionConfig(**change)


def test_the_size_error_says_what_to_do():
    with pytest.raises(ConfigError, match=r"mm_hidden_size 1024 differs from vt_hidden_size 512.*same value"):
        KimiK3VisionConfig(vt_hidden_size=512)
