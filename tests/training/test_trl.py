"""TRL by way of examples/finetune_trl.py: assistant-only loss, and direct preference optimisation."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kimi_hf
from tests.processing.vocabulary import write_folder

from .models import tiny_model

pytest.importorskip("trl")
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_trl.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_trl", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_folder(tmp_path_factory.mktemp("tokenizer")))


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_sft_learns_from_the_assistants_tokens_only(example, tokenizer, tmp_path):
    model = tiny_model(vocab_size=len(tokenizer))
    trainer = example.supervised(
        model, tokenizer, example.chats(8), tmp_path, max_steps=4, gradient_checkpointing=False, disable_tqdm=True
    )
    batch = next(iter(trainer.get_train_dataloader()))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        taught, prompt = tokenizer.decode(ids[labels != -100]), tokenizer.decode(ids)
        assert "What is" in prompt and "What is" not in taught
        assert taught.endswith("<|end_of_msg|>") and any(digit in taught for digit in "0123456789")
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


def test_dpo_raises_the_margin(example, tokenizer, tmp_path):
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    model, reference = (AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32) for _ in range(2))
    assert type(model) is kimi_hf.KimiLinearForCausalLM
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    trainer = example.preferred(
        model,
        reference,
        tokenizer,
        example.preferences(4),
        tmp_path,
        max_steps=4,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    assert logged(trainer, "loss")[0] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-3)
    assert logged(trainer, "rewards/margins")[-1] > 0.01 and logged(trainer, "loss")[-1] < 0.69
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())
