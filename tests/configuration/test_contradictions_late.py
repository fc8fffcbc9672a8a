"""Contradictions that only appear after a configuration was made, and files of the wrong kind."""

import json

import pytest
import torch

import kimi_hf
from kimi_hf.errors import CheckpointError, ConfigError, ShapeError

from ..training.models import tiny_config, tiny_model


def test_fields_changed_later_are_checked_when_the_model_is_built():
    config = tiny_config()
    config.num_experts_per_token = 99
    with pytest.raises(ConfigError, match="num_experts_per_token"):
        kimi_hf.KimiLinearForCausalLM(config)


@pytest.mark.parametrize("cls", [kimi_hf.KimiK3Config, kimi_hf.KimiLinearConfig])
def test_quantization_config_must_be_an_object(cls):
    with pytest.raises(ConfigError, match="quantization_config must be an object"):
        cls(quantization_config="mxfp4")


def test_a_composite_file_without_our_text_model_is_named():
    with pytest.raises(ConfigError, match="text_config.model_type is 'llama'"):
        kimi_hf.KimiLinearConfig(text_config={"model_type": "llama"})


def test_weights_without_a_configuration_are_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json"):
        kimi_hf.KimiLinearForCausalLM.from_pretrained(tmp_path)


def test_empty_rows_are_refused():
    with pytest.raises(ShapeError, match="at least one token"):
        tiny_model()(input_ids=torch.empty(2, 0, dtype=torch.long))


def test_saved_configuration_is_json_of_the_released_schema(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["linear_attn_config"]["full_attn_layers"] == [4] and "layer_types" not in saved
