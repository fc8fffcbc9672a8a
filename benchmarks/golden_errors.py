"""Largest and mean distance of logits to every text golden: `python -m benchmarks.golden_errors`.

fp32 unless said; `golden` is the reference in fp32, `exact` the same in float64. Padding positions are left out.
"""

import argparse
import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import kimi_hf

HERE = Path(__file__).parent.parent
ROOT = Path(os.environ.get("KIMI_HF_FIXTURES", HERE / "tests" / "data"))
CASES = ("kimi_linear_tiny", "k3_text_tiny", "k3_mxfp4_tiny")


def distance(ours: Tensor, stored: Tensor, mask: Tensor | None) -> str:
    gap = (ours.float() - stored).abs()
    if mask is not None:
        gap = gap[mask.bool()]
    return f"max {gap.max():.1e}  mean {gap.mean():.1e}"


@torch.no_grad()
def text_case(name: str, attention: str) -> None:
    folder = ROOT / name
    model = kimi_hf.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    golden, exact = load_file(folder / "golden.safetensors"), load_file(folder / "golden_exact.safetensors")
    for run in sorted({key.split(".")[0] for key in golden if key.endswith(".input_ids")}):
        ids, mask = golden[f"{run}.input_ids"], golden.get(f"{run}.attention_mask")
        logits = model(input_ids=ids, attention_mask=mask).logits
        print(f"{name:18s} {attention:6s} {run:8s} golden {distance(logits, golden[f'{run}.logits'], mask)}", end="")
        if f"{run}.logits" in exact:
            print(f"   exact {distance(logits, exact[f'{run}.logits'], mask)}", end="")
        if f"{run}.greedy_tokens" in golden:
            expected = golden[f"{run}.greedy_tokens"]
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=expected.shape[1],
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            print(f"   greedy tokens {'equal' if torch.equal(out[:, ids.shape[1] :], expected) else 'DIFFER'}", end="")
        print()


@torch.no_grad()
def release_case() -> None:
    folder = ROOT / "k3_release_tiny"
    exact = load_file(folder / "golden_exact.safetensors")
    for dtype, file in ((torch.float32, "golden_fp32"), (torch.bfloat16, "golden_bf16")):
        golden = load_file(folder / f"{file}.safetensors")
        inputs = load_file(folder / "golden_fp32.safetensors")
        ids = inputs["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        model = kimi_hf.KimiK3ForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        logits = model(input_ids=ids, attention_mask=mask).logits
        print(
            f"k3_release_tiny    {str(dtype).removeprefix('torch.'):9s} golden {distance(logits, golden['logits'], mask)}"
            f"   exact {distance(logits, exact['logits'], mask)}"
        )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in CASES:
        for attention in ("eager", "sdpa"):
            text_case(name, attention)
    release_case()


if __name__ == "__main__":
    main()
