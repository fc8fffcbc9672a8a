"""transformers' Trainer: resuming and loading the best model give exactly the weights that were saved.

Its checkpoints hold the released names; it reads them back with `load_state_dict`, which knows no conversion rules.
"""

import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

import kimi_hf

from .small import small_model

K3, KIMI_LINEAR = "kimi-k3-tiny", "kimi-linear-tiny"


def _model(name):
    return small_model(name, num_experts=8).float()


def _trainer(model, folder, **arguments):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 64, (16, 12), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        "logging_strategy": "no",
        **arguments,
    }
    return Trainer(
        model=model, args=TrainingArguments(str(folder), **arguments), train_dataset=data, eval_dataset=data[:4]
    )


def _differences(one, other):
    theirs = other.state_dict()
    return max((x.float() - theirs[name].float()).abs().max().item() for name, x in one.state_dict().items())


@pytest.mark.parametrize("name", [K3, KIMI_LINEAR])
def test_resuming_continues_exactly(name, tmp_path, caplog):
    straight = _model(name)
    _trainer(straight, tmp_path / "straight").train()
    halfway = _trainer(_model(name), tmp_path / "halfway", max_steps=2)
    halfway.train()
    written = load_file(tmp_path / "halfway" / "checkpoint-2" / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in written
    torch.manual_seed(9)
    resumed = _model(name)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.normal_()
    trainer = _trainer(resumed, tmp_path / "halfway")
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(tmp_path / "halfway" / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert _differences(resumed, straight) <= 1e-6
    assert _differences(resumed, halfway.model) > 1e-3
    for record in caplog.records:
        assert "missing keys" not in record.message and "unexpected keys" not in record.message, record.message


def test_resuming_from_shards_continues_exactly(tmp_path):
    """Trainer reads them one after another, each with some of a layer's experts."""
    straight = _model(K3)
    _trainer(straight, tmp_path / "straight").train()
    halfway = _trainer(_model(K3), tmp_path / "halfway", max_steps=2)
    halfway.train()
    checkpoint = tmp_path / "halfway" / "checkpoint-2"
    halfway.model.save_pretrained(checkpoint, max_shard_size="100KB")
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 1 and not (checkpoint / "model.safetensors").exists()
    resumed = _model(K3)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.normal_()
    _trainer(resumed, tmp_path / "halfway").train(resume_from_checkpoint=str(checkpoint))
    assert _differences(resumed, straight) <= 1e-6


class _Spoil(TrainerCallback):
    """Worsens the model after its first evaluation, so that the best one is the first."""

    def on_evaluate(self, args, state, control, model, **kwargs):
        with torch.no_grad():
            model.lm_head.weight.normal_(std=10)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    model = _model(K3)
    arguments = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
    }
    trainer = _trainer(model, tmp_path, **arguments)
    trainer.add_callback(_Spoil())
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = kimi_hf.KimiLinearForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
    assert _differences(model, best) == 0.0
    last = kimi_hf.KimiLinearForCausalLM.from_pretrained(tmp_path / "checkpoint-4", dtype=torch.float32)
    assert _differences(model, last) > 1.0
