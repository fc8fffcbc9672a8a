"""No field silently does nothing: changing one changes the model, or raises, or the field is documented to do nothing.

A model's observable self: names and shapes of its parameters, what it computes in eval and training mode from weights
that depend on names alone, how fresh weights are drawn, and what it returns.
"""

import json
import zlib

import pytest
import torch

from kimi_hf import (
    KimiK3Config,
    KimiK3ForConditionalGeneration,
    KimiK3VisionConfig,
    KimiLinearConfig,
    KimiLinearForCausalLM,
)
from kimi_hf.configuration.layer_plan import LINEAR_ATTN_FIELDS
from kimi_hf.errors import ConfigError
from kimi_hf.modeling.vision import KimiK3PatchMergerV2, KimiK3VisionModel

from ..contract.tiny import TINY, kimi_k3_config

IDS = torch.arange(3, 15)[None]
TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_act": "situ",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "attn_res_block_size": 2,
    "num_experts": 8,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 8,
    "routed_expert_hidden_size": 8,
    "first_k_dense_replace": 1,
    "num_expert_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 1e-5,
}
LINEAR = {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}

# field -> another value of it.
CHANGED = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "activation_situ_beta": 2.0,
    "activation_situ_linear_beta": 1.0,
    "rms_norm_eps": 0.1,
    "initializer_range": 0.5,
    "use_cache": False,
    "tie_word_embeddings": True,
    "pad_token_id": 5,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": False,
    "mla_use_output_gate": True,
    "attention_dropout": 0.5,
    "linear_attn_config": {**LINEAR, "kda_layers": [1], "full_attn_layers": [2, 3]},
    "attn_res_block_size": None,
    "num_experts": 16,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "softmax",
    "moe_renormalize": False,
    "routed_scaling_factor": 2.446,
    "num_expert_group": 2,
    "topk_group": 4,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 2,
    "output_router_logits": True,
    "num_nextn_predict_layers": 1,
}
# Notes for `generate` and for servers: there is no position embedding to size, and no weight knows a special token.
NOTES = {"max_position_embeddings": 99, "bos_token_id": 7, "eos_token_id": 9}
CHANGED_LINEAR = {
    "kda_layers": [1],
    "full_attn_layers": [2, 3],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 3,
    "use_full_rank_gate": True,
    "gate_lower_bound": -5.0,
}
# Kept for the round trip (kimi_k3.md 1.4).
DO_NOTHING = {
    "head_dim": 99,
    "rope_theta": 5.0,
    "rope_scaling": {"type": "yarn", "factor": 2.0},
    "use_grouped_topk": False,
    "topk_method": "greedy",
    "model_max_length": 99,
    "temperature": 0.5,
    "id2label": {"0": "a"},
}


def _fill(model):
    """Give every tensor a value that depends on its name and shape alone."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                scale = 0.5 if tensor.ndim <= 1 else tensor.shape[-1] ** -0.5
                tensor.copy_(("norm" in name) + scale * torch.randn(tensor.shape, generator=generator))


def _text_self(config):
    """Everything observable about the text model of `config`, as a dict that can be compared."""
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    model = KimiLinearForCausalLM(config)
    found = {"shapes": {n: tuple(x.shape) for n, x in [*model.named_parameters(), *model.named_buffers()]}}
    found["drawn"] = model.model.layers[0].self_attn.o_proj.weight.std().item()
    found["padding"] = model.model.embed_tokens.padding_idx
    _fill(model)
    model.tie_weights()
    with torch.no_grad():
        out = model.eval()(IDS)
        torch.manual_seed(2)
        found["training"] = model.train()(IDS).logits
    found.update(returns=sorted(k for k, v in out.items() if v is not None), logits=out.logits)
    return found


def _differs(one, other):
    if one.keys() != other.keys():
        return True
    for key, value in one.items():
        if torch.is_tensor(value):
            if value.shape != other[key].shape or not torch.equal(value, other[key]):
                return True
        elif value != other[key]:
            return True
    return False


@pytest.fixture(scope="module")
def unchanged():
    return _text_self(KimiLinearConfig(**TEXT, linear_attn_config=LINEAR))


def test_every_declared_field_is_listed():
    assert KimiLinearConfig._declared_defaults().keys() == CHANGED.keys() | NOTES.keys()
    assert set(LINEAR_ATTN_FIELDS) == CHANGED_LINEAR.keys()
    assert KimiK3VisionConfig._declared_defaults().keys() == CHANGED_VISION.keys() | VISION_DO_NOTHING.keys()
    composite = {"text_config", "vision_config"} | COMPOSITE.keys() | COMPOSITE_NOTES.keys()
    assert KimiK3Config._declared_defaults().keys() == composite


@pytest.mark.parametrize("field", CHANGED)
def test_a_text_field_changes_the_model_or_raises(field, unchanged):
    try:
        config = KimiLinearConfig(**{**TEXT, "linear_attn_config": LINEAR, field: CHANGED[field]})
    except ConfigError as error:
        assert field in str(error) or field == "num_hidden_layers" and "leave out layers" in str(error)
        return
    assert _differs(_text_self(config), unchanged), f"{field} does nothing"


@pytest.mark.parametrize("field", CHANGED_LINEAR)
def test_a_linear_attention_field_changes_the_model_or_raises(field, unchanged):
    try:
        config = KimiLinearConfig(**TEXT, linear_attn_config={**LINEAR, field: CHANGED_LINEAR[field]})
    except ConfigError as error:
        assert field in str(error)
        return
    assert _differs(_text_self(config), unchanged), f"{field} does nothing"


@pytest.mark.parametrize("field", [*NOTES, *DO_NOTHING])
def test_a_field_that_does_nothing_is_kept(field, unchanged, tmp_path):
    value = {**NOTES, **DO_NOTHING}[field]
    config = KimiLinearConfig(**{**TEXT, "linear_attn_config": LINEAR, field: value})
    assert not _differs(_text_self(config), unchanged)
    config.save_pretrained(tmp_path)
    KimiLinearConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[field] == value


VISION = {
    "patch_size": 4,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "vt_hidden_size": 16,
    "vt_num_hidden_layers": 2,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 16,
    "vt_intermediate_size": 24,
    "mm_hidden_size": 16,
    "text_hidden_size": 16,
}
CHANGED_VISION = {
    "patch_size": 7,
    "init_pos_emb_height": 6,
    "init_pos_emb_width": 6,
    "init_pos_emb_time": 1,
    "pos_emb_type": "learnable",
    "pos_emb_interpolation_mode": "bicubic",
    "vt_hidden_size": 32,
    "vt_num_hidden_layers": 3,
    "vt_num_attention_heads": 4,
    "qkv_hidden_size": 32,
    "vt_intermediate_size": 32,
    "norm_type": "layernorm",
    "mlp_type": "mlp3",
    "attn_bias": True,
    "linear_bias": True,
    "patch_embed_proj_bias": True,
    "merge_kernel_size": [2, 1],
    "merge_type": "sd2",
    "mm_projector_type": "mlp",
    "mm_hidden_size": 32,
    "projector_ln_eps": 0.1,
    "text_hidden_size": 24,
}
VISION_DO_NOTHING = {"activation_func": "relu", "projector_hidden_act": "relu"}


def _vision_self(config):
    tower, projector = KimiK3VisionModel(config).eval(), KimiK3PatchMergerV2(config).eval()
    found = {}
    for module in (tower, projector):
        found.update({n: tuple(x.shape) for n, x in module.named_parameters()})
        _fill(module)
    grids = torch.tensor([[2, 2, 4], [1, 4, 2]])
    pixels = torch.rand(24, 3, config.patch_size, config.patch_size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        try:
            found["features"] = torch.cat(projector(tower(pixels, grids).pooler_output))
        except ValueError as error:
            found["refuses"] = str(error)
    return found


@pytest.fixture(scope="module")
def unchanged_vision():
    return _vision_self(KimiK3VisionConfig(**VISION))


@pytest.mark.parametrize("field", CHANGED_VISION)
def test_a_vision_field_changes_the_tower_or_raises(field, unchanged_vision):
    assert "features" in unchanged_vision
    try:
        config = KimiK3VisionConfig(**{**VISION, field: CHANGED_VISION[field]})
    except ConfigError as error:
        assert field in str(error)
        return
    assert _differs(_vision_self(config), unchanged_vision), f"{field} does nothing"


@pytest.mark.parametrize("field", VISION_DO_NOTHING)
def test_a_vision_field_the_release_does_not_read_is_kept(field, unchanged_vision):
    config = KimiK3VisionConfig(**{**VISION, field: VISION_DO_NOTHING[field]})
    assert not _differs(_vision_self(config), unchanged_vision)
    assert config.to_dict()[field] == VISION_DO_NOTHING[field]


# field of the composite -> another value; which image token stands where, which positions have no loss, who is padding.
COMPOSITE = {"media_placeholder_token_id": 4, "ignore_index": 6, "pad_token_id": 5, "tie_word_embeddings": True}
COMPOSITE_NOTES = {"image_placeholder": "<image>", "bos_token_id": 7, "eos_token_id": 9}


def _composite_self(config):
    tiny = next(model for model in TINY if model.vision)
    model = KimiK3ForConditionalGeneration(config).eval()
    _fill(model)
    inputs = tiny.images()
    inputs["input_ids"][:, -3:] = torch.tensor([4, 5, 6])
    try:
        with torch.no_grad():
            out = model(**inputs, labels=inputs["input_ids"])
    except ValueError as error:
        return {"refuses": str(error)}
    return {"loss": out.loss, "logits": out.logits}


@pytest.fixture(scope="module")
def unchanged_composite():
    found = _composite_self(kimi_k3_config())
    assert "logits" in found
    return found


@pytest.mark.parametrize("field", [*COMPOSITE, *COMPOSITE_NOTES])
def test_a_field_of_the_composite_changes_the_model_or_raises_or_is_a_note(field, unchanged_composite):
    config = kimi_k3_config()
    setattr(config, field, {**COMPOSITE, **COMPOSITE_NOTES}[field])
    try:
        found = _composite_self(config)
    except ConfigError as error:
        assert field in str(error)
        return
    assert _differs(found, unchanged_composite) is (field in COMPOSITE)


@pytest.mark.parametrize("placeholder", [163605, None])
def test_a_placeholder_outside_the_vocabulary_is_told_when_an_image_comes(placeholder):
    """As a small text model behind the released default, or one whose tokens were cut, has it."""
    config = kimi_k3_config()
    config.media_placeholder_token_id = placeholder
    model = KimiK3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model(IDS)
    told = _composite_self(config)["refuses"]
    assert f"media_placeholder_token_id is {placeholder}, no token of text_config.vocab_size (99)" in told
