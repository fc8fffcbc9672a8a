"""LoRA on experts that stay packed in MXFP4, and on the attention of the same model: train, save, load, merge.

Run `python examples/finetune_lora.py`. The packed bytes do not change; only the adapters are trained and saved.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import kimi_hf
from kimi_hf.quantization import quantize
from kimi_hf.training import lora_config

KINDS = ["attention", "experts"]


def rows(count: int = 64, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Byte ids of a text that is easy to learn."""
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog; " * 40)) + 4
    return [{"input_ids": text[i : i + length], "labels": text[i : i + length]} for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        released, adapter = Path(scratch, "released"), Path(scratch, "adapter")
        start = kimi_hf.KimiLinearForCausalLM(kimi_hf.preset("kimi-k3-tiny").get_text_config())
        quantize(start).save_pretrained(released)

        base = kimi_hf.KimiLinearForCausalLM.from_pretrained(released, dtype=torch.float32)
        model = get_peft_model(base, lora_config(KINDS, model=base, r=8, lora_alpha=16))
        model.print_trainable_parameters()
        settings = TrainingArguments(
            scratch,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(model=model, args=settings, train_dataset=rows()).train()
        model.save_pretrained(adapter)

        probe = rows(1)[0]["input_ids"][None].to(model.device)
        with torch.no_grad():
            trained = model.eval()(input_ids=probe).logits
            fresh = kimi_hf.KimiLinearForCausalLM.from_pretrained(released, dtype=torch.float32).to(model.device)
            # PEFT's files do not say how packed experts are adapted, so the configuration comes along.
            config = lora_config(KINDS, model=fresh, r=8, lora_alpha=16)
            again = PeftModel.from_pretrained(fresh, adapter, config=config).eval()
            loaded = again(input_ids=probe).logits
        print(f"largest difference after saving and loading the adapter: {(trained - loaded).abs().max():.1e}")
        print("to merge: kimi-hf merge-lora BASE ADAPTER OUT")


if __name__ == "__main__":
    main()
