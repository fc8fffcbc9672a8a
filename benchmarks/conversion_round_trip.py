"""Convert a checkpoint of real bytes there and back, killing it on the way, and compare hashes.

Makes a random checkpoint with Kimi K3's expert shapes, decodes it to bf16 (ended by SIGKILL in the middle, then run
again), converts it back, and prints what each step took and the SHA-256 over all files before and after.

    python -m benchmarks.conversion_round_trip OUT                    # 1 GB of packed experts, 4 GB decoded
    python -m benchmarks.conversion_round_trip OUT --experts 256      # eight times that
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from pathlib import Path

from tqdm import tqdm

from benchmarks.full_geometry import disk_usage, measure, table

# K3's own expert width and intermediate size; the rest is small, so that experts are nearly all of it.
SETTINGS = (
    "text_config.hidden_size=1024",
    "vision_config.text_hidden_size=1024",
    "text_config.routed_expert_hidden_size=3584",
    "text_config.moe_intermediate_size=3072",
)


def digest(folder: Path) -> str:
    """SHA-256 over names and contents of all files of a folder."""
    total = hashlib.sha256()
    for path in tqdm(sorted(folder.iterdir()), desc=f"hash {folder.name}"):
        with path.open("rb") as file:
            total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def finished(out: Path) -> list[Path]:
    """Shards of an unfinished job that are complete."""
    return list(out.with_name(f"{out.name}.partial").glob("*.safetensors"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder on a disk with room for six times the packed size")
    parser.add_argument("--experts", type=int, default=32, help="routed experts a layer, of 17.5 MB each")
    parser.add_argument("--num-layers", type=int, default=3, help="layers, of which all but the first have experts")
    args = parser.parse_args()
    source, decoded, back = (args.out / name for name in ("packed", "bf16", "back"))
    settings = [
        word for setting in (*SETTINGS, f"text_config.num_experts={args.experts}") for word in ("--set", setting)
    ]
    make = ["make-tiny", "kimi-k3", str(source), "--num-layers", str(args.num_layers), "--experts", "packed"]
    convert = ["convert", str(source), str(decoded), "--to", "bf16", "--max-shard-size", "500MB"]
    try:
        rows = [("make-tiny", measure([*make, "--max-shard-size", "200MB", *settings]))]
        before = digest(source)
        rows.append(("to bf16, killed", measure(convert, lambda: len(finished(decoded)) >= 2)))
        print(f"\nkilled with {len(finished(decoded))} files finished; {decoded.name} exists: {decoded.exists()}")
        rows.append(("to bf16, resumed", measure(convert)))
        rows.append(("verify packed bf16", measure(["verify", str(source), str(decoded)])))
        rows.append(("back to packed", measure(["convert", str(decoded), str(back), "--to", "released"])))
        sizes = [disk_usage(folder) / 1e9 for folder in (source, decoded, back)]
        print("packed {:.2f} GB, bf16 {:.2f} GB, back {:.2f} GB".format(*sizes))
        print(table(rows))
        after, again = digest(back), digest(source)
        print(f"before          {before}\nafter           {after}\nsource after    {again}")
        return int(not before == after == again)
    finally:
        for folder in (source, decoded, back, decoded.with_name("bf16.partial")):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
