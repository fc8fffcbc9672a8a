"""What cannot be trained as asked says so, and what to do instead."""

import pytest
import torch
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

import kimi_hf
from kimi_hf.errors import ConfigError, ShapeError
from kimi_hf.modeling import head
from kimi_hf.quantization import quantize
from kimi_hf.training import MuonWithAdamW, RouterBalanceCallback, lora_config, optimizers, parameter_groups

from .models import tiny_model, tokens


@pytest.fixture
def said(monkeypatch):
    """Warnings of the loggers, which say each thing once."""
    messages = []
    monkeypatch.setattr(head.logger, "warning_once", messages.append)
    monkeypatch.setattr(optimizers.logger, "warning", messages.append)
    return messages


def trainer(model, folder, **arguments):
    settings = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to="none", save_strategy="no", **arguments
    )
    return Trainer(model=model, args=settings, train_dataset=[{"input_ids": t, "labels": t} for t in tokens()])


def test_packed_experts_without_adapters(tmp_path, said):
    quantize(tiny_model()).save_pretrained(tmp_path / "packed")
    model = kimi_hf.KimiLinearForCausalLM.from_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trainer(model, tmp_path)
    for build in (parameter_groups, MuonWithAdamW):  # an own loop
        said.clear()
        build(model)
        assert len(said) == 1 and "dequantize=True" in said[0] and "lora_config" in said[0]
    said.clear()
    parameter_groups(get_peft_model(model, lora_config("experts", model=model, r=2)))
    parameter_groups(tiny_model())
    assert not said


def test_dropout_on_fused_experts():
    with pytest.raises(ConfigError, match="lora_dropout is 0.1.*leave it at 0, or leave 'experts' out"):
        lora_config(["attention", "experts"], lora_dropout=0.1)


def test_balance_of_a_dense_model(tmp_path):
    dense = tiny_model(num_experts=None, routed_expert_hidden_size=None, latent_moe_use_norm=False)
    with pytest.raises(ConfigError, match="no routed experts .*leave it out"):
        RouterBalanceCallback().attach(dense)


@pytest.mark.parametrize("shape", [(2, 11), (1, 12), (2, 12, 1)])
def test_labels_of_the_wrong_shape(shape):
    with pytest.raises(ShapeError, match="give one label per token"):
        tiny_model()(input_ids=tokens(), labels=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("chunked", [None, 8])
def test_float16_that_overflows(said, chunked):
    model = tiny_model().half().train()
    model.set_chunked_loss(chunked)
    assert model(input_ids=tokens(), labels=tokens()).loss.isfinite() and not said
    with torch.no_grad():  # what KDA writes into its state, and reads from it, leaves fp16's range
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "v_proj"):
                layer.self_attn.v_proj.weight.fill_(6e4)
    model.eval()(input_ids=tokens(), labels=tokens())
    assert not said, "evaluation does not wait for the device"
    assert not model.train()(input_ids=tokens(), labels=tokens()).loss.isfinite()
    assert len(said) == 1 and "bfloat16" in said[0]


def test_float16_autocast_that_overflows(said):
    model = tiny_model().train()
    torch.nn.init.normal_(model.lm_head.weight, std=3e4)
    with torch.autocast("cpu", dtype=torch.float16):
        model(input_ids=tokens(), labels=tokens())
    assert len(said) == 1 and "bf16=True" in said[0]
