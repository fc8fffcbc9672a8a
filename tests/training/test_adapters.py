"""Every documented kind of adapter reaches what it names, trains, saves, loads and merges."""

import pytest
import torch
from peft import PeftModel, get_peft_model

from kimi_hf.errors import ConfigError
from kimi_hf.quantization import dequantize, quantize
from kimi_hf.training import LORA_KINDS, lora_config

from .models import tiny_model, tokens

REACHED = {
    "attention": {"self_attn"},
    "gates": {"self_attn"},
    "latent": {"block_sparse_moe"},
    "shared": {"mlp", "shared_experts"},
    "experts": {"experts"},
    "all": {"self_attn", "block_sparse_moe", "mlp", "shared_experts", "experts"},
}


def spread(model):
    """Adapters away from their neutral start, so that they do something."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)


@pytest.mark.parametrize("kind", LORA_KINDS)
def test_kind_reaches_what_it_names_and_nothing_else(kind):
    model = get_peft_model(tiny_model(), lora_config(kind, r=2))
    spread(model)
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    parts = {part for name in adapted for part in name.split(".")}
    assert REACHED[kind] <= parts
    assert not parts & {"lm_head", "gate", "self_attention_res_proj", "mlp_res_proj", "embed_tokens"}
    model(input_ids=tokens(4, 24), labels=tokens(4, 24)).loss.backward()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_kinds_reach_every_layer():
    model = get_peft_model(tiny_model(), lora_config(["attention", "experts"], r=2))
    names = [name for name, _ in model.named_parameters() if "lora_A" in name]
    for layer in range(4):
        assert any(f"layers.{layer}.self_attn" in name for name in names)
    for layer in range(1, 4):
        assert sum(f"layers.{layer}.block_sparse_moe.experts" in name for name in names) == 2


@pytest.mark.parametrize("kind", ["attention", "experts", "all"])
def test_merged_equals_adapted_and_reloaded(kind, tmp_path):
    model = get_peft_model(tiny_model(), lora_config(kind, r=2)).eval()
    spread(model)
    ids = tokens()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(tiny_model(), tmp_path).eval()
        torch.testing.assert_close(again(input_ids=ids).logits, adapted, atol=1e-5, rtol=0)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, atol=1e-4, rtol=0)


def test_packed_experts_train_like_unpacked_ones(tmp_path):
    packed = quantize(tiny_model()).eval()
    config = lora_config("experts", model=packed, r=2)
    model = get_peft_model(packed, config)
    spread(model)
    before = {n: p.clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(before) == 12
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert grads and all("lora_" in name for name in grads)
    for name, parameter in model.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name])

    dense = dequantize(quantize(tiny_model())).eval()
    for layer in range(1, 4):
        lora = model.base_model.model.model.layers[layer].block_sparse_moe.experts
        experts = dense.model.layers[layer].block_sparse_moe.experts
        for key, which in (("default", "gate_up_proj"), ("default_down", "down_proj")):
            delta = lora.scaling["default"] * (lora.lora_B[key] @ lora.lora_A[key])
            getattr(experts, which).data += delta.detach()
    for parameter in dense.parameters():
        parameter.requires_grad_(False)
    experts = dense.model.layers[1].block_sparse_moe.experts
    experts.gate_up_proj.requires_grad_(True)
    other = dense(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, other, atol=1e-5, rtol=0)
    other.backward()
    lora = model.base_model.model.model.layers[1].block_sparse_moe.experts
    a, b = lora.lora_A["default"], lora.lora_B["default"]
    expected = lora.scaling["default"] * experts.gate_up_proj.grad @ a.detach().transpose(1, 2)
    torch.testing.assert_close(b.grad, expected, atol=1e-4, rtol=1e-3)

    model.save_pretrained(tmp_path)
    fresh = quantize(tiny_model()).eval()
    again = PeftModel.from_pretrained(fresh, tmp_path, config=lora_config("experts", model=fresh, r=2))
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="not on the MXFP4 grid"):
        model.merge_and_unload()


def test_disabling_the_adapter_gives_the_base():
    packed = quantize(tiny_model()).eval()
    ids = tokens()
    with torch.no_grad():
        base = packed(input_ids=ids).logits
        model = get_peft_model(packed, lora_config("experts", model=packed, r=2))
        # B starts at zero; the products are the same, summed in another order
        torch.testing.assert_close(model(input_ids=ids).logits, base, atol=1e-5, rtol=0)
        spread(model)
        with model.disable_adapter():
            assert torch.equal(model(input_ids=ids).logits, base)


def test_a_zero_adapter_on_any_linear_changes_nothing():
    """No projection is bypassed by reading its weight behind the adapter's back, bit for bit."""
    reference, ids = tiny_model().eval(), tokens()
    with torch.no_grad():
        expected = reference(input_ids=ids).logits
        linears = {name.rsplit(".", 1)[-1] for name, m in reference.named_modules() if isinstance(m, torch.nn.Linear)}
        for name in sorted(linears - {"lm_head"}):
            config = lora_config("attention", r=2)
            config.target_modules = {name}
            adapted = get_peft_model(tiny_model().eval(), config)
            assert torch.equal(adapted(input_ids=ids).logits, expected), name
            spread(adapted)
            assert not torch.equal(adapted(input_ids=ids).logits, expected), name


@pytest.mark.parametrize("kind", ["attention", "all"])
def test_dora_trains(kind):
    if kind == "all":
        kind = ["attention", "gates", "latent", "shared"]
    model = get_peft_model(tiny_model(), lora_config(kind, r=2, use_dora=True))
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert any("magnitude" in n and p.grad is not None for n, p in model.named_parameters())


def test_all_linear_leaves_the_head_and_the_router_alone():
    config = lora_config("attention", r=2)
    config.target_modules = "all-linear"
    model = get_peft_model(tiny_model(), config)
    names = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert any("kv_b_proj" in name for name in names) and any("g_proj" in name for name in names)
    assert not [name for name in names if "lm_head" in name or ".gate." in name or "res_proj" in name]


def test_bad_choices_are_refused():
    with pytest.raises(ConfigError, match="kind must be among"):
        lora_config("attn")
    with pytest.raises(ConfigError, match="lora_dropout is 0.1"):
        lora_config("experts", lora_dropout=0.1)
