"""Train one rung of the ladder on the standard library's sources, save it, load it by its Auto class, and let it write.

python examples/ladder/train_a_rung.py --rung gated-delta-net --steps 200
python examples/ladder/train_a_rung.py --rung kimi-k3 --set residual=full_attn_res
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kimi_hf import LadderConfig, LadderForCausalLM, census
from kimi_hf.lab.models import loss_of, shifted, train
from kimi_hf.lab.tasks import Text


def value(text: str) -> Any:
    """ "3" -> 3, "0.1" -> 0.1, "true" -> True, "a,b" -> ["a", "b"], anything else as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if text in ("true", "false"):
        return text == "true"
    return text.split(",") if "," in text else text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", default="gated-delta-net")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of LadderConfig")
    parser.add_argument("--out", type=Path, help="keep the model here")
    args = parser.parse_args(argv)

    changes = {name: value(text) for name, text in (item.split("=", 1) for item in args.set)}
    shape = {"hidden_size": args.width, "num_hidden_layers": 4, "num_attention_heads": max(1, args.width // 32)}
    torch.manual_seed(0)
    config = LadderConfig.rung(
        f"{args.rung}-tiny", vocab_size=Text.vocab, initializer_range=0.06, **{**shape, **changes}
    )
    model = LadderForCausalLM(config)
    print(f"{args.rung}: {census(config).total:,} parameters, mixers {config.mixers}")

    text, length = Text(1_000_000), 128
    generator = torch.Generator().manual_seed(1)
    losses = train(model, lambda step: loss_of(model, *shifted(text.batch(8, length + 1, generator))), args.steps, 5e-3)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte")

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch) / "model"
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([list(b"def main(")])
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
    print(bytes(ids[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
