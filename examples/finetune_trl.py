"""TRL on a Kimi chat model: supervised fine-tuning on the assistant's tokens only, then preference optimisation.

Run `python examples/finetune_trl.py` for a tiny random model with a byte-level vocabulary, or name a checkpoint folder
with `--model`. TRL is given loaded models, never paths: from a path it takes the class that transformers itself has
under the name in `architectures`, and for `KimiLinearForCausalLM` that is not the plugin's.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import kimi_hf
from kimi_hf.processing.byte_pairs import write_ranks

CONTROL = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[PAD]", "[UNK]")


def write_tiny(folder: Path) -> Path:
    """A random K3-style text model of half a million parameters, and a tokenizer whose words are single bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_bytes(write_ranks({bytes([byte]): byte for byte in range(256)}))
    tokens = {
        str(256 + i): {"content": name, "special": name not in ("<|open|>", "<|close|>", "<|sep|>")}
        for i, name in enumerate(CONTROL)
    }
    settings = {
        "added_tokens_decoder": tokens,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    config = kimi_hf.preset("kimi-k3-tiny").get_text_config()
    for name, value in {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": vocabulary, "num_experts": 8}.items():
        setattr(config, name, value)
    config.linear_attn_config |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2}
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 258, 262, 256
    kimi_hf.KimiLinearForCausalLM(config).save_pretrained(folder)
    return folder


def questions(count: int) -> list[tuple[str, str]]:
    return [(f"What is {i % 5} + {i // 5 % 5}?", str(i % 5 + i // 5 % 5)) for i in range(count)]


def chats(count: int = 64) -> Dataset:
    """Rows with `messages`."""
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in questions(count)]
    return Dataset.from_list([{"messages": row} for row in rows])


def preferences(count: int = 64) -> Dataset:
    """Rows with `prompt`, `chosen` and `rejected`."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": q}],
                "chosen": [{"role": "assistant", "content": a}],
                "rejected": [{"role": "assistant", "content": "I do not know."}],
            }
            for q, a in questions(count)
        ]
    )


def settings(folder: Path, **arguments) -> dict:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "max_length": 1024,  # longer rows are cut; cut before the answer, nothing is left to learn
        **arguments,
    }


def supervised(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Dataset, folder: Path, **arguments
) -> SFTTrainer:
    """Train on what the assistant writes; prompts carry no loss."""
    config = SFTConfig(**settings(folder, assistant_only_loss=True, learning_rate=2e-3, **arguments))
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return trainer


def preferred(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    folder: Path,
    **arguments,
) -> DPOTrainer:
    """Direct preference optimisation against a frozen `reference` (not needed with a `peft_config`)."""
    config = DPOConfig(**settings(folder, learning_rate=5e-4, beta=0.1, **arguments))
    trainer = DPOTrainer(model=model, ref_model=reference, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint folder with its tokenizer; default: a tiny random one")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or write_tiny(Path(scratch, "model"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        supervised(model, tokenizer, chats(), Path(scratch, "sft"), max_steps=args.steps)
        model.save_pretrained(Path(scratch, "tuned"))
        reference = AutoModelForCausalLM.from_pretrained(Path(scratch, "tuned"), dtype=torch.float32)
        preferred(model, reference, tokenizer, preferences(), Path(scratch, "dpo"), max_steps=args.steps)


if __name__ == "__main__":
    main()
