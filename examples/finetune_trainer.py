"""Fine-tune with transformers' Trainer on a streamed data set, router balance on, bf16 where there is a GPU.

Run `python examples/finetune_trainer.py` for a tiny random model on the standard library's sources, byte by byte; on
several processes, `torchrun --nproc-per-node 2 examples/finetune_trainer.py`.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import Trainer, TrainingArguments

import kimi_hf
from kimi_hf.training import DocumentCollator, RouterBalanceCallback

FIRST_BYTE = 4  # ids 0 to 3 are pad, begin, end and the image placeholder
ROW = 256


def documents(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """Lines of text -> documents of byte ids, none longer than a row; empty lines are left out."""
    ids = [[byte + FIRST_BYTE for byte in text.encode()][:ROW] for text in batch["text"] if text.strip()]
    return {"input_ids": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="*", help="text files; default: the standard library's sources")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="keep checkpoints here, to resume from")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = parser.parse_args()
    torch.manual_seed(0)
    files = args.files or sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
    stream = load_dataset("text", data_files=files, split="train", streaming=True, sample_by="paragraph")
    stream = stream.map(documents, batched=True, remove_columns=["text"]).shuffle(seed=0, buffer_size=256)

    model = kimi_hf.KimiLinearForCausalLM(kimi_hf.preset("kimi-k3-tiny").get_text_config())
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            str(args.out or scratch),
            max_steps=args.steps,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            weight_decay=0.1,
            logging_steps=5,
            save_strategy="steps" if args.out else "no",
            save_steps=10,
            report_to="none",
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            # Rows of packed documents differ in number from batch to batch; each process takes its own.
            accelerator_config={"dispatch_batches": False},
        )
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=stream,
            data_collator=DocumentCollator(ROW),
            callbacks=[RouterBalanceCallback()],
        )
        trainer.train(resume_from_checkpoint=args.resume or None)


if __name__ == "__main__":
    main()
