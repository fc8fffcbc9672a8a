"""Files as others write them: parts of other models, blocks in other places, and what a file gains by being read."""

import json

import pytest
from transformers import AutoConfig

import kimi_hf
from kimi_hf import KimiK3Config, KimiK3VisionConfig, KimiLinearConfig, LadderConfig
from kimi_hf.errors import ConfigError

from ..conftest import fixture_path
from ..contract.tiny import kimi_k3_config, kimi_k3_text_config, ladder_mixture

GPTQ = {"quant_method": "gptq", "bits": 4}


def _folder(path, fields):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def _composite(**changes):
    fields = kimi_k3_config().to_dict()
    return {name: value for name, value in {**fields, **changes}.items() if value != "absent"}


def _text(**changes):
    fields = {**kimi_k3_config().to_dict()["text_config"], **changes}
    return {name: value for name, value in fields.items() if value != "absent"}


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "null", "{}"])
@pytest.mark.parametrize("cls", [KimiLinearConfig, KimiK3Config, KimiK3VisionConfig, LadderConfig])
def test_a_file_without_fields_is_named(cls, content, tmp_path):
    with pytest.raises(ConfigError, match=rf"config.json holds .* expected the fields of {cls.__name__}"):
        cls.from_pretrained(_folder(tmp_path, content))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (_composite(text_config=_text(model_type="llama")), "text_config.model_type is 'llama'"),
        (_composite(text_config=_text(model_type="absent")), "text_config.model_type is None"),
        (_composite(text_config=None), "text_config must be an object with the fields of KimiLinearConfig, got None"),
        (_composite(text_config=[1]), "text_config must be an object .* got .1."),
        (_composite(text_config="x"), "text_config must be an object .* got 'x'"),
    ],
    ids=["llama", "nameless", "null", "list", "string"],
)
def test_a_composite_without_our_text_part_is_refused_by_every_class(fields, told, tmp_path):
    folder = _folder(tmp_path, fields)
    for loader in (AutoConfig, KimiK3Config, KimiLinearConfig, kimi_hf.KimiLinearForCausalLM):
        with pytest.raises(ConfigError, match=told):
            loader.from_pretrained(folder)


@pytest.mark.parametrize("part", [None, [1], 3, {"model_type": "clip"}], ids=str)
def test_a_composite_without_our_vision_part_is_refused(part, tmp_path):
    folder = _folder(tmp_path, _composite(vision_config=part))
    for loader in (AutoConfig, KimiK3Config, KimiK3VisionConfig):
        with pytest.raises(ConfigError, match="vision_config"):
            loader.from_pretrained(folder)
    assert KimiLinearConfig.from_pretrained(folder).num_hidden_layers == 4


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (KimiLinearConfig, {"model_type": "llama", "hidden_size": 32}),
        (KimiK3Config, {"model_type": "llava", "text_config": {}, "vision_config": {}}),
        (KimiK3Config, {**kimi_k3_text_config().to_dict()}),
        (LadderConfig, {"model_type": "gpt2"}),
        (KimiK3VisionConfig, {"model_type": "clip_vision_model"}),
    ],
)
def test_a_file_of_another_model_is_named(cls, fields, tmp_path):
    told = f"model_type is '{fields['model_type']}', but {cls.__name__} reads '{cls.model_type}'"
    with pytest.raises(ConfigError, match=told):
        cls.from_pretrained(_folder(tmp_path, fields))
    with pytest.raises(ConfigError, match=told):
        cls(**fields)


def _block():
    return json.loads(fixture_path("released/kimi_k3_config.json").read_text())["text_config"]["quantization_config"]


@pytest.mark.parametrize("places", [("top",), ("text_config",), ("top", "text_config")], ids="+".join)
def test_a_quantization_block_is_read_where_it_stands_and_written_back_there(places, tmp_path):
    top = {"quantization_config": _block()} if "top" in places else {}
    text = _text(**({"quantization_config": _block()} if "text_config" in places else {}))
    folder = _folder(tmp_path / "in", _composite(text_config=text, **top))
    for round_trip in (AutoConfig.from_pretrained(folder), KimiK3Config.from_dict(_read(folder))):
        assert round_trip.quantization_config["quant_method"] == "kimi_mxfp4"
        again = KimiK3Config.from_dict(round_trip.to_dict())
        for config in (round_trip, again):
            config.save_pretrained(tmp_path / "out")
            written = _read(tmp_path / "out")
            found = {"top": written, "text_config": written["text_config"]}
            assert {p for p, holder in found.items() if "quantization_config" in holder} == set(places)
            assert all(found[place]["quantization_config"] == _block() for place in places)
    alone = KimiLinearConfig.from_pretrained(folder)
    assert alone.quantization_config["released"] == _block()
    alone.save_pretrained(tmp_path / "alone")
    assert _read(tmp_path / "alone")["quantization_config"] == _block()


def test_no_quantization_asked_for_says_nothing_about_the_files_own(tmp_path):
    folder = _folder(tmp_path, _composite(text_config=_text(quantization_config=_block())))
    config = AutoConfig.from_pretrained(folder, quantization_config=None)
    assert config.quantization_config["released"] == _block()


def test_two_quantization_blocks_must_agree(tmp_path):
    folder = _folder(tmp_path, _composite(quantization_config=GPTQ, text_config=_text(quantization_config=_block())))
    told = (
        "quantization_config names quant_method 'gptq'.*text_config.quantization_config names quant_method 'compressed"
    )
    for loader in (AutoConfig, KimiLinearConfig):
        with pytest.raises(ConfigError, match=told):
            loader.from_pretrained(folder)


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_a_foreign_block_stays_where_it_stood(place, tmp_path):
    top, text = ({"quantization_config": GPTQ}, {}) if place == "top" else ({}, {"quantization_config": GPTQ})
    config = KimiK3Config.from_dict(_composite(text_config=_text(**text), **top))
    assert config.quantization_config == GPTQ
    config.save_pretrained(tmp_path)
    written = _read(tmp_path)
    assert ("quantization_config" in written) is (place == "top")
    assert ("quantization_config" in written["text_config"]) is (place == "text_config")


def test_a_format_that_only_the_groups_name_is_packed(tmp_path):
    from kimi_hf.checkpoint.geometry import is_packed

    block = _block()
    del block["format"]
    config = KimiK3Config.from_dict(_composite(quantization_config=block))
    assert config.quantization_config == {"quant_method": "kimi_mxfp4", "released": block}
    assert is_packed(config.to_dict())


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ([1], "quantization_config must be an object"),
        ({}, "quantization_config.quant_method must be a string, got None"),
        ({"quant_method": 3}, "quantization_config.quant_method must be a string, got 3"),
        (
            {"quant_method": "compressed-tensors", "config_groups": [1]},
            "config_groups must be an object of objects, got .1.",
        ),
        ({"config_groups": {"a": 1}}, "config_groups must be an object of objects, got .'a': 1."),
        ({"config_groups": {"a": {"weights": 3}}}, "config_groups.a.weights must be an object, got 3"),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "config_groups.a.weights asks for .* = .8, 'float', 32.",
        ),
        ({"config_groups": {"a": {"input_activations": {}}}}, "config_groups.a.input_activations must be null"),
    ],
)
def test_a_malformed_quantization_block_is_named(block, told):
    if isinstance(block, dict) and "config_groups" in block:
        block = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", **block}
    for cls in (KimiLinearConfig, KimiK3Config):
        with pytest.raises(ConfigError, match=told):
            cls(quantization_config=block)


@pytest.mark.parametrize("make", [kimi_k3_config, kimi_k3_text_config, ladder_mixture], ids=lambda f: f.__name__)
def test_a_dictionary_holds_what_a_file_holds(make, tmp_path):
    """No `id2label`, `return_dict` and the like appear because a configuration went through a dictionary."""
    config = make()
    config.save_pretrained(tmp_path / "1")
    type(config).from_dict(config.to_dict()).save_pretrained(tmp_path / "2")
    first, second = _read(tmp_path / "1"), _read(tmp_path / "2")
    if "vision_config" in second:
        assert second["vision_config"].pop("model_type") == "kimi_k3_vision"
    assert second == first


def test_a_released_file_gains_only_fields_of_the_schema_through_a_dictionary(tmp_path):
    released = json.loads(fixture_path("released/kimi_k3_config.json").read_text())
    config = KimiK3Config.from_dict(released)
    KimiK3Config.from_dict(config.to_dict()).save_pretrained(tmp_path)
    written = _read(tmp_path)
    assert written.keys() - released.keys() == {"transformers_version"}
    assert (
        written["text_config"].keys() - released["text_config"].keys() <= KimiLinearConfig._declared_defaults().keys()
    )
    assert written["vision_config"].keys() - released["vision_config"].keys() == {"model_type"}


def test_a_composite_made_by_hand_says_what_its_text_part_is(tmp_path):
    kimi_k3_config().save_pretrained(tmp_path)
    assert _read(tmp_path)["text_config"]["model_type"] == "kimi_linear"
    assert KimiLinearConfig.from_pretrained(tmp_path).to_dict()["hidden_size"] == 32


def test_fields_that_everybody_has_are_kept_where_they_were_set(tmp_path):
    config = KimiLinearConfig(num_hidden_layers=2, output_hidden_states=False, num_labels=3, problem_type="regression")
    config.save_pretrained(tmp_path)
    written = _read(tmp_path)
    assert written["output_hidden_states"] is False and written["problem_type"] == "regression"
    assert len(written["id2label"]) == 3 and "return_dict" not in written


def _read(folder):
    return json.loads((folder / "config.json").read_text())
