"""No field of the ladder silently does nothing: changing one changes a model that reads it, or raises."""

import pytest
import torch

from kimi_hf import LadderConfig, LadderForCausalLM
from kimi_hf.errors import ConfigError

from .test_every_field import IDS, _differs, _fill

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"max_position_embeddings": 32, "pad_token_id": 0}
GPT2 = SIZES
DELTA = {**SIZES, "mixer": "gated_delta_net", "feed_forward": "swiglu", "positions": "none", "norm": "rms_norm"}
KDA = {**DELTA, "mixer": "kimi_delta_attention", "feed_forward": "situ_glu"}
MLA = {**KDA, "mixer": "latent_attention", "residual": "block_attn_res"}
MOE = {**KDA, "feed_forward": "latent_moe", "hidden_act": "situ", "num_experts": 8, "num_experts_per_token": 4}
MOE |= {"num_expert_group": 4, "topk_group": 2, "moe_intermediate_size": 8}
# field -> (a configuration that reads it, another value).
CHANGED = {
    "vocab_size": (GPT2, 41),
    "hidden_size": (GPT2, 24),
    "num_hidden_layers": (GPT2, 3),
    "num_attention_heads": (GPT2, 4),
    "max_position_embeddings": (GPT2, 33),
    "mixer": (GPT2, ["softmax_attention", "delta_net"]),
    "feed_forward": (GPT2, ["gelu_mlp", "swiglu"]),
    "residual": (GPT2, "full_attn_res"),
    "positions": (GPT2, "none"),
    "norm": (GPT2, "rms_norm"),
    "norm_eps": (GPT2, 0.1),
    "bias": (GPT2, False),
    "residual_dropout": (GPT2, 0.5),
    "embedding_dropout": (GPT2, 0.5),
    "attention_dropout": (GPT2, 0.5),
    "initializer_range": (GPT2, 0.5),
    "tie_word_embeddings": (GPT2, False),
    "use_cache": (GPT2, False),
    "pad_token_id": (GPT2, 5),
    "activation_function": (GPT2, "gelu"),
    "intermediate_size": (GPT2, 40),
    "linear_num_heads": (DELTA, 1),
    "linear_head_dim": (DELTA, 16),
    "linear_value_head_dim": (DELTA, 16),
    "short_conv_kernel_size": (DELTA, 3),
    "output_norm": (DELTA, False),
    "output_gate": (DELTA, False),
    "gate_lower_bound": (KDA, -5.0),
    "use_full_rank_gate": (KDA, True),
    "activation_situ_beta": (KDA, 2.0),
    "activation_situ_linear_beta": (KDA, 1.0),
    "q_lora_rank": (MLA, 8),
    "kv_lora_rank": (MLA, 8),
    "qk_nope_head_dim": (MLA, 16),
    "qk_rope_head_dim": (MLA, 8),
    "v_head_dim": (MLA, 16),
    "mla_use_output_gate": (MLA, True),
    "attn_res_block_size": (MLA, 2),
    "hidden_act": (MOE, "silu"),
    "num_experts": (MOE, 12),
    "num_experts_per_token": (MOE, 2),
    "num_shared_experts": (MOE, 0),
    "moe_intermediate_size": (MOE, 16),
    "routed_expert_hidden_size": (MOE, 16),
    "latent_moe_use_norm": (MOE, True),
    "moe_router_activation_func": (MOE, "softmax"),
    "moe_renormalize": (MOE, False),
    "routed_scaling_factor": (MOE, 2.5),
    "num_expert_group": (MOE, 2),
    "topk_group": (MOE, 4),
    "output_router_logits": (MOE, True),
}
# Notes for `generate`: no weight knows a special token.
NOTES = {"bos_token_id": 7, "eos_token_id": 9}


def _self(fields):
    """Everything observable about the model of a configuration, as a dict that can be compared."""
    torch.manual_seed(1)
    model = LadderForCausalLM._from_config(LadderConfig(**fields), attn_implementation="eager")
    found = {"shapes": {n: tuple(x.shape) for n, x in [*model.named_parameters(), *model.named_buffers()]}}
    found["drawn"] = model.model.layers[0].self_attn.q_proj.weight.std().item() if "q_lora_rank" not in fields else 0
    found["padding"] = model.model.embed_tokens.padding_idx
    _fill(model)
    model.tie_weights()
    with torch.no_grad():
        out = model.eval()(IDS)
        torch.manual_seed(2)
        found["training"] = model.train()(IDS).logits
    return {**found, "returns": sorted(k for k, v in out.items() if v is not None), "logits": out.logits}


def test_every_declared_field_is_listed():
    assert LadderConfig._declared_defaults().keys() == CHANGED.keys() | NOTES.keys()


@pytest.mark.parametrize("field", CHANGED)
def test_a_field_changes_the_model_that_reads_it(field):
    base, value = CHANGED[field]
    assert _differs(_self({**base, field: value}), _self(base)), f"{field} does nothing"


@pytest.mark.parametrize("field", NOTES)
def test_a_note_is_kept(field, tmp_path):
    assert not _differs(_self({**GPT2, field: NOTES[field]}), _self(GPT2))
    LadderConfig(**GPT2, **{field: NOTES[field]}).save_pretrained(tmp_path)
    assert getattr(LadderConfig.from_pretrained(tmp_path), field) == NOTES[field]


@pytest.mark.parametrize("base", [GPT2, DELTA, KDA, MLA, MOE], ids=["gpt2", "delta", "kda", "mla", "moe"])
def test_a_field_that_nothing_reads_is_refused(base):
    parts, refused = LadderConfig(**base).parts, 0
    for field, (reader, value) in CHANGED.items():
        if value is False or field in base or field in ("bias",) or LadderConfig(**reader).parts == parts:
            continue
        try:
            same = not _differs(_self({**base, field: value}), _self(base))
        except ConfigError as error:
            assert field in str(error)
            refused += 1
        else:
            assert not same, f"{field} does nothing"
    assert refused > 3
