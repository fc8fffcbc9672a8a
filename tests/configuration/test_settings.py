"""What a configuration hands on: settings for `generate`, and the size of the vocabulary."""

import json
import logging

import pytest
import torch

import kimi_hf

from ..conftest import fixture_path
from ..contract.tiny import TINY


@pytest.mark.parametrize("how", ["from_pretrained", "from_config"])
def test_library_defaults_in_a_released_file_do_not_make_generate_warn(how, tmp_path, caplog):
    folder = fixture_path("k3_text_tiny")
    assert json.loads((folder / "config.json").read_text())["text_config"]["max_length"] == 20
    if how == "from_pretrained":
        model = kimi_hf.KimiLinearForCausalLM.from_pretrained(folder)
    else:
        model = kimi_hf.KimiLinearForCausalLM(kimi_hf.KimiLinearConfig.from_pretrained(folder))
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.records
    assert model.generation_config.max_length is None and model.generation_config.eos_token_id == 2
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_length"] == 20


def test_settings_that_somebody_chose_are_kept(tmp_path):
    fields = json.loads((fixture_path("k3_text_tiny") / "config.json").read_text())["text_config"]
    model = kimi_hf.KimiLinearForCausalLM(kimi_hf.KimiLinearConfig(**{**fields, "max_length": 12, "use_cache": False}))
    assert model.generation_config.max_length == 12 and model.generation_config.use_cache is False
    model.generation_config.max_length = 20
    assert model.generation_config.max_length == 20


@pytest.mark.parametrize("base", [True, False], ids=["base", "head"])
def test_every_module_knows_the_resized_vocabulary(base):
    for tiny in TINY:
        model = tiny.build(base=base)
        model.resize_token_embeddings(150)
        found = {name: module.vocab_size for name, module in model.named_modules() if hasattr(module, "vocab_size")}
        assert set(found.values()) == {150}, (tiny.name, found)
        assert model.config.get_text_config().vocab_size == 150
