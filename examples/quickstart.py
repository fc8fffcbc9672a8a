"""From nothing to generated text: write a small Kimi K3 checkpoint in the released layout, load it, train it for a
minute on the Python standard library's sources, generate, save it in the released layout, and load it again.

Run `make quickstart`, or `python examples/quickstart.py --seconds 20`.
"""

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import kimi_hf
from kimi_hf.quantization import quantize

FIRST_BYTE = 4  # ids 0 to 3 are pad, begin, end and the image placeholder
PROMPT = "def "


def read_sources(limit: int = 4_000_000) -> torch.Tensor:
    """The standard library's Python files as one row of byte-level token ids, (tokens,) int64."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.tensor(list(text[:limit]), dtype=torch.long) + FIRST_BYTE


def encode(text: str) -> torch.Tensor:
    return torch.tensor([[byte + FIRST_BYTE for byte in text.encode()]])


def decode(ids: torch.Tensor) -> str:
    return bytes(i - FIRST_BYTE for i in ids.tolist() if FIRST_BYTE <= i < FIRST_BYTE + 256).decode(errors="replace")


def write_checkpoint(folder: Path) -> None:
    """A random model as Moonshot would publish it: MXFP4 experts, padded A_log, several shards with an index."""
    model = kimi_hf.KimiK3ForConditionalGeneration(kimi_hf.preset("kimi-k3-tiny"))
    quantize(model).save_pretrained(folder, max_shard_size="4MB")
    files = sorted(path.name for path in folder.iterdir())
    print(f"wrote {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M stored values in {len(files)} files:")
    print("  " + ", ".join(files))


def train(model, data: torch.Tensor, seconds: float, batch: int = 8, length: int = 128) -> None:
    """AdamW on random windows for `seconds`, next-byte loss in the progress bar."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3, weight_decay=0.05)
    window = torch.arange(length)
    model.train()
    end, smooth, started = time.monotonic() + seconds, None, time.monotonic()
    with tqdm(total=round(seconds), unit="s", bar_format="{desc} {bar} {n:.0f}/{total} s") as bar:
        step = 0
        while time.monotonic() < end:
            start = torch.randint(len(data) - length, (batch, 1))
            ids = data[start + window]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
            bar.n = min(time.monotonic() - started, seconds)
            bar.set_description(f"step {step}, loss {smooth:.2f} nats a byte")
    model.eval()


def show_text(model, prompt: str = PROMPT, tokens: int = 160) -> None:
    ids = encode(prompt)
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, temperature=0.6
    )
    print("\n--- generated " + "-" * 46)
    print(decode(out[0]))
    print("-" * 60 + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train")
    parser.add_argument("--out", type=Path, help="keep the checkpoints here instead of a temporary folder")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        root = args.out or Path(scratch)
        write_checkpoint(root / "released")

        unpacked = kimi_hf.KimiMxfp4Config(dequantize=True)  # trained experts must be unpacked
        model = AutoModelForCausalLM.from_pretrained(root / "released", quantization_config=unpacked)
        print(f"loaded {type(model).__name__}")
        train(model, read_sources(), args.seconds)
        show_text(model)

        quantize(model)
        probe = encode("import os\n")
        with torch.no_grad():
            before = model(input_ids=probe).logits
        model.save_pretrained(root / "trained", max_shard_size="4MB")
        again = AutoModelForCausalLM.from_pretrained(root / "trained")
        with torch.no_grad():
            after = again(input_ids=probe).logits
        print(
            f"saved in the released layout and loaded again; largest difference of logits: {(before - after).abs().max()}"
        )
        if not torch.equal(before, after):
            raise SystemExit("the reloaded model differs")
        if args.out:
            print(f"the checkpoints are in {args.out}; try: kimi-hf info {args.out / 'trained'}")


if __name__ == "__main__":
    main()
