"""From GPT-2 to Gated DeltaNet in single steps, each trained on the same text: what does every change do?

python examples/ladder/one_change_at_a_time.py --steps 150
"""

import argparse
from typing import Any

import torch

from kimi_hf import LadderConfig, LadderForCausalLM, census
from kimi_hf.lab.models import loss_of, shifted, train
from kimi_hf.lab.tasks import Text

# Each line is the line above and one more change.
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("GPT-2", {}),
    ("linear attention", {"mixer": "linear_attention"}),
    ("delta rule", {"mixer": "delta_net"}),
    ("short convolutions", {"short_conv_kernel_size": 4}),
    ("output norm", {"output_norm": True}),
    ("output gate", {"output_gate": True}),
    ("decay", {"mixer": "gated_delta_net"}),
    ("no positions", {"positions": "none"}),
    ("SwiGLU", {"feed_forward": "swiglu", "intermediate_size": 168}),
    ("RMS norm", {"norm": "rms_norm", "bias": None}),
    ("attention over depth", {"residual": "full_attn_res"}),
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args(argv)
    text, length = Text(1_000_000), 64
    fields = {"vocab_size": Text.vocab, "hidden_size": args.width, "num_hidden_layers": 3, "num_attention_heads": 2}
    print(f"{'change':<24}{'parameters':>12}{'loss, nats a byte':>20}")
    for name, change in CHANGES:
        fields.update(change)
        torch.manual_seed(0)
        model = LadderForCausalLM(LadderConfig.rung("gpt2-tiny", initializer_range=0.06, **fields))
        generator = torch.Generator().manual_seed(1)

        def objective(step: int, model=model, generator=generator) -> torch.Tensor:
            return loss_of(model, *shifted(text.batch(8, length + 1, generator)))

        train(model, objective, args.steps, 5e-3)
        with torch.no_grad():
            held_out = loss_of(model, *shifted(text.test(64, length + 1))).item()
        print(f"{name:<24}{census(model.config).total:>12,}{held_out:>20.3f}")


if __name__ == "__main__":
    main()
