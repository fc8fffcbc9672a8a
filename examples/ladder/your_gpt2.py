"""A GPT-2 you have (a Hugging Face folder, or nanoGPT's ckpt.pt) as the lowest rung: convert, load, compare, generate.

python examples/ladder/your_gpt2.py path/to/gpt2
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import kimi_hf
from kimi_hf.conversion.gpt2 import convert


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, help="keep the converted folder here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = convert(args.checkpoint, args.out or Path(scratch) / "ladder", "ladder")
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        print(f"{type(model).__name__} with {kimi_hf.census(model.config).total:,} parameters")
        prompt = torch.arange(3, 11)[None]
        if (args.checkpoint / "config.json").exists():
            native = AutoModelForCausalLM.from_pretrained(args.checkpoint).eval()
            with torch.no_grad():
                off = (native(prompt).logits - model(prompt).logits).abs().max()
            print(f"largest difference to transformers' own GPT-2: {off:.1e}")
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        print("tokens:", ids[0].tolist())


if __name__ == "__main__":
    main()
