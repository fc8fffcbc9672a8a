"""Every field with values of every kind: each is refused by the field's name, or is of the declared kind, survives a file and
builds a model.
"""

import json
import types
import typing
from dataclasses import fields

import pytest
import torch

import kimi_hf
from kimi_hf.configuration.layer_plan import LINEAR_ATTN_FIELDS
from kimi_hf.errors import ConfigError
from kimi_hf.modeling.vision import KimiK3PatchMergerV2, KimiK3VisionModel

from ..contract.tiny import kimi_k3_config, kimi_k3_text_config, ladder_config, ladder_mixture
from .test_every_field import VISION

VALUES = [None, "x", [], [1], ["x"], {}, {"a": 1}, True, False, 0, 1, -1, 3, 10**12, 10**30]
VALUES += [0.0, 0.5, 2.5, -0.5, float("inf"), float("-inf"), float("nan")]
BARE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


def _vision(config):
    return KimiK3VisionModel(config), KimiK3PatchMergerV2(config)


MODELS = {
    "k3-text": (kimi_k3_text_config, kimi_hf.KimiLinearForCausalLM),
    "dense": (lambda: kimi_hf.KimiLinearConfig(**BARE), kimi_hf.KimiLinearForCausalLM),
    "k3": (kimi_k3_config, kimi_hf.KimiK3ForConditionalGeneration),
    "vision": (lambda: kimi_hf.KimiK3VisionConfig(**VISION), _vision),
    "gpt2": (lambda: ladder_config("gpt2"), kimi_hf.LadderForCausalLM),
    "gated-delta-net": (lambda: ladder_config("gated-delta-net"), kimi_hf.LadderForCausalLM),
    "mixture": (ladder_mixture, kimi_hf.LadderForCausalLM),
}


def _kinds(annotation) -> set[type]:
    """The Python types that an annotation names; where a float may stand, so may an integer."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    found = {typing.get_origin(part) or part for part in parts}
    found = {type(None) if kind is None else kind for kind in found}
    return found | ({int} if float in found else set())


def _given(config):
    """The keywords that give this configuration again."""
    declared = config._declared_defaults()
    return {name: value for name, value in json.loads(json.dumps(config.to_dict())).items() if name in declared}


@pytest.mark.parametrize("name", MODELS)
def test_a_field_holds_its_own_kind_or_is_refused_by_name(name, tmp_path):
    make, build = MODELS[name]
    base = make()
    declared, given = base._declared_defaults(), _given(base)
    annotations = {f.name: f.type for f in fields(type(base)) if f.name in declared}
    accepted = 0
    for field in declared:
        for value in VALUES:
            where = f"{field} = {value!r}"
            try:
                config = type(base)(**{**given, field: value})
            except ConfigError as error:
                assert field in str(error), f"{where}: {error}"
                continue
            accepted += 1
            assert type(value) in _kinds(annotations[field]), f"{where} was accepted"
            config.save_pretrained(tmp_path)
            assert type(base).from_pretrained(tmp_path).to_dict() == config.to_dict(), where
            if field not in ("text_config", "vision_config"):  # whose defaults do not fit the other part
                with torch.device("meta"):
                    build(config)
    assert accepted >= len(declared) / 2


def test_a_field_of_linear_attention_holds_its_own_kind_or_is_refused_by_name():
    given = _given(kimi_k3_text_config())
    for field in LINEAR_ATTN_FIELDS:
        for value in VALUES:
            linear = {**given["linear_attn_config"], field: value}
            try:
                config = kimi_hf.KimiLinearConfig(**{**given, "linear_attn_config": linear})
            except ConfigError as error:
                assert field in str(error), f"{field} = {value!r}: {error}"
            else:
                with torch.device("meta"):
                    kimi_hf.KimiLinearForCausalLM(config)


TOKENS = [("pad_token_id", v) for v in ("x", [], [1], 2.5, -1, True, {})]
TOKENS += [("bos_token_id", v) for v in ("x", [1], 2.5, -1, True)]
TOKENS += [("eos_token_id", v) for v in ("x", [], [1, "a"], [1, None], [-1], 2.5, -1, True, {})]


@pytest.mark.parametrize(("field", "value"), TOKENS, ids=str)
def test_special_tokens_are_ids(field, value):
    for make in (kimi_k3_config, kimi_k3_text_config, ladder_mixture):
        with pytest.raises(ConfigError, match=rf"{field}.*(token|id)"):
            type(make())(**{**_given(make()), field: value})
        config = type(make())(**{**_given(make()), "eos_token_id": [1, 2], "bos_token_id": None})
        assert config.eos_token_id == [1, 2]


ALIASES = [
    ({"num_experts_per_tok": 1}, r"num_experts_per_tok is 1, but num_experts_per_token, which is the same, is 2"),
    ({"num_local_experts": 16}, r"num_local_experts is 16, but num_experts, which is the same, is 8"),
    ({"n_group": 2, "num_expert_group": 1}, r"n_group is 2, but num_expert_group"),
    (
        {"layer_types": ["full_attention"] * 4, "linear_attn_config": {"full_attn_layers": [4]}},
        "layer_types is .* give",
    ),
    ({"layer_types": ["full_attention"] * 3}, "layer_types holds 3 entries, but num_hidden_layers is 4"),
    ({"layer_types": 3}, "layer_types must be a list with an entry per layer, got 3"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types must be one of 'linear_attention', 'full_attention'"),
    ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2, "first_k_dense_replace": 1}, "mlp_layer_types is .* give"),
    ({"mlp_layer_types": ["sparse"] * 4, "num_experts": None}, "mlp_layer_types is .* give"),
    ({"mlp_layer_types": ["sparse"] * 3 + ["dense"]}, "mlp_layer_types has a dense layer after a sparse one"),
    ({"mlp_layer_types": 5}, "mlp_layer_types must be a list"),
    ({"linear_head_dim": 4, "linear_attn_config": {"head_dim": 8}}, "linear_head_dim is 4, but the other fields"),
    ({"qk_head_dim": 100}, "qk_head_dim is 100, but the other fields of the configuration give 192"),
    ({"linear_head_dim": 0}, r"linear_attn_config.head_dim must be .*was given as linear_head_dim"),
]


@pytest.mark.parametrize(("changes", "told"), ALIASES, ids=str)
def test_two_spellings_of_a_field_must_agree(changes, told):
    experts = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 8}
    with pytest.raises(ConfigError, match=told):
        kimi_hf.KimiLinearConfig(**{"num_hidden_layers": 4, **experts, **changes})


def test_two_spellings_that_agree_are_one_field():
    config = kimi_hf.KimiLinearConfig(
        num_hidden_layers=2,
        num_experts=8,
        num_local_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["linear_attention", "full_attention"],
        linear_attn_config={"kda_layers": [1], "full_attn_layers": [2], "head_dim": 16},
        linear_head_dim=16,
        qk_head_dim=192,
    )
    twice = {"num_local_experts", "layer_types", "linear_head_dim", "qk_head_dim"}
    assert config.to_diff_dict().keys().isdisjoint(twice)
    with pytest.raises(ConfigError, match=r"qk_head_dim is 100, .* change those two"):
        config.qk_head_dim = 100


MORE = [
    ({"mla_use_nope": "yes"}, "mla_use_nope must be true or false"),
    ({"mla_use_nope": 1}, "mla_use_nope must be true or false"),
    ({"use_cache": 1}, "use_cache must be true or false"),
    ({"num_experts": None, "latent_moe_use_norm": True}, "latent_moe_use_norm is True, but num_experts is null"),
    ({"first_k_dense_replace": 5}, r"first_k_dense_replace \(5\) is more than num_hidden_layers \(4\)"),
    ({"linear_attn_config": {"kda_layers": 3}}, "linear_attn_config.kda_layers must be a list of integers, got 3"),
    (
        {"linear_attn_config": {"full_attn_layers": [[1]]}},
        "linear_attn_config.full_attn_layers must be a list of integers",
    ),
    ({"dtype": "zork"}, "dtype must be one of"),
    ({"architectures": "KimiLinearForCausalLM"}, "architectures must be a list of class names or null, got 'Kimi"),
    ({"architectures": [1]}, "architectures must be a list"),
    ({"torch_dtype": "zork"}, "torch_dtype must be one of"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer of at most 100000"),
]


@pytest.mark.parametrize(("changes", "told"), MORE, ids=str)
def test_more_contradictions(changes, told):
    experts = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 8}
    with pytest.raises(ConfigError, match=told):
        kimi_hf.KimiLinearConfig(**{"num_hidden_layers": 4, **experts, **changes})
