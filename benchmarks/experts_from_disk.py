"""Experts from disk at a size that does not fit in memory: opening, generating, and what the disk gives.

Makes a random checkpoint in K3's layout with K3's expert shapes (17.5 MB an expert in MXFP4, 22.5 GB in all), measures
the disk by reading experts of it, opens it in a process whose memory the kernel limits (RLIMIT_AS, as `ulimit -v`), and
generates with cold and with warm pages. Whatever happens, the checkpoint is deleted in the end.

    python -m benchmarks.experts_from_disk OUT                # OUT: a folder on a disk with 24 GB free
    python -m benchmarks.experts_from_disk OUT --experts 8    # a quick look
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
POPULATE_READ = 22  # MADV_POPULATE_READ, which Python's mmap does not name yet
GB = 1e9
# K3's expert shapes and number of chosen experts; the rest is small, so that experts are nearly all of it.
SETTINGS = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "vocab_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "routed_expert_hidden_size": 3584,
    "moe_intermediate_size": 3072,
    "num_experts_per_token": 16,
}


def build_config(experts: int, layers: int) -> dict[str, Any]:
    """A text-only K3 configuration with `layers` layers, the first of them dense."""
    from kimi_hf.configuration import preset
    from kimi_hf.conversion.configs import packed_config, text_only_config
    from kimi_hf.conversion.make_tiny import shrink_config

    config = text_only_config(shrink_config(preset("kimi-k3").to_dict(), layers))
    config.update(SETTINGS, num_experts=experts)
    config["linear_attn_config"].update(num_heads=8, head_dim=128)
    return packed_config(config)


class Place(NamedTuple):
    path: Path
    offset: int
    nbytes: int


def expert_places(folder: Path) -> list[Place]:
    """Where each expert's bytes lie: its six tensors follow each other, since names are sorted within a dtype."""
    from kimi_hf.checkpoint.shards import open_checkpoint

    spans: dict[str, list] = {}
    with open_checkpoint(folder) as checkpoint:
        for name, entry in checkpoint.entries.items():
            if ".experts." in name:
                spans.setdefault(name.rpartition(".w")[0], []).append(entry)
    places = []
    for entries in spans.values():
        start, total = min(entry.offset for entry in entries), sum(entry.nbytes for entry in entries)
        places.append(Place(entries[0].path, start, total))
    return places


def forget_pages(folder: Path) -> None:
    """Drop the checkpoint's pages from the page cache; no other file's."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def ways_to_read(places: list[Place]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ways to get at the given experts; each adds up all bytes, so that they have really been there."""
    import numpy

    files = {place.path: os.open(place.path, os.O_RDONLY) for place in places}
    maps = {path: mmap.mmap(file, 0, prot=mmap.PROT_READ) for path, file in files.items()}
    arrays = {path: numpy.frombuffer(mapped, numpy.uint8) for path, mapped in maps.items()}

    def pread(place: Place) -> None:
        buffer = numpy.empty(place.nbytes, numpy.uint8)
        view, done = memoryview(buffer), 0
        while done < place.nbytes:
            done += os.preadv(files[place.path], [view[done:]], place.offset + done)
        buffer[: place.nbytes // 8 * 8].view(numpy.uint64).sum()

    def read_ahead() -> None:
        for at, place in enumerate(places):
            for later in places[at + 1 : at + 3]:
                os.posix_fadvise(files[later.path], later.offset, later.nbytes, os.POSIX_FADV_WILLNEED)
            pread(place)

    def mapped(advice: int | None) -> None:
        for place in places:
            start = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
            length = place.offset + place.nbytes - start
            if advice is not None:
                maps[place.path].madvise(advice, start, length)
            span = arrays[place.path][start + mmap.PAGESIZE : start + length]
            span[: len(span) // 8 * 8].view(numpy.uint64).sum()
            maps[place.path].madvise(mmap.MADV_DONTNEED, start, length)

    yield "preadv into memory (what we do)", lambda: [pread(place) for place in places]
    yield "preadv, WILLNEED for the next two", read_ahead
    yield "mmap", lambda: mapped(None)
    yield "mmap, WILLNEED", lambda: mapped(mmap.MADV_WILLNEED)
    yield "mmap, POPULATE_READ", lambda: mapped(POPULATE_READ)
    for file in files.values():
        os.close(file)


def measure_disk(folder: Path, count: int) -> list[dict[str, Any]]:
    """GB/s of reading `count` experts at random places, cold and then warm, by each way."""
    places = expert_places(folder)
    chosen = random.Random(0).sample(places, min(count, len(places)))
    total, rows = sum(place.nbytes for place in chosen), []
    for name, work in ways_to_read(chosen):
        row = {"way": name}
        for state in ("cold", "warm"):
            if state == "cold":
                forget_pages(folder)
            start, cpu = time.perf_counter(), time.process_time()
            work()
            row[f"{state}_gb_s"] = total / GB / (time.perf_counter() - start)
            row[f"{state}_cpu_s_per_gb"] = (time.process_time() - cpu) / (total / GB)
        rows.append(row)
        print(f"{name:<36} cold {row['cold_gb_s']:.2f} GB/s, warm {row['warm_gb_s']:.2f} GB/s", flush=True)
    return rows


def child(folder: Path, cache_bytes: int, tokens: int) -> None:
    """Runs under the limit: open, generate cold, generate warm; a JSON line each."""
    start = time.perf_counter()
    import torch

    import kimi_hf

    imported = time.perf_counter() - start
    torch.set_num_threads(1)
    start = time.perf_counter()
    model = kimi_hf.KimiLinearForCausalLM.from_pretrained(
        folder, expert_storage="disk", expert_cache_bytes=cache_bytes, dtype=torch.bfloat16
    )
    opened = time.perf_counter() - start
    others = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    report = model.expert_storage_report()
    print(
        json.dumps(
            {
                "step": "open",
                "seconds": opened,
                "import_seconds": imported,
                "non_expert_gb": others / GB,
                "experts_gb": report.bytes_on_disk / GB,
                "expert_mb": report.expert_bytes / 1e6,
                "peak_gb": peak_gb(),
            }
        ),
        flush=True,
    )
    prompt = torch.arange(100, 104)[None]
    for state in ("cold", "warm"):
        if state == "cold":
            forget_pages(folder)
        print(json.dumps(generate(model, prompt, tokens, state)), flush=True)


def generate(model, prompt, tokens: int, state: str) -> dict[str, Any]:
    """Prefill and greedy decoding, with what was read for them."""
    import torch

    with torch.no_grad():
        model.expert_storage_report(reset=True)
        start = time.perf_counter()
        out = model(prompt, use_cache=True, logits_to_keep=1)
        prefill, read = time.perf_counter() - start, model.expert_storage_report(reset=True)
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(tokens):
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        report = model.expert_storage_report(reset=True)
    assert_finite(out.logits)
    return {
        "step": state,
        "prefill_tokens": prompt.shape[1],
        "prefill_seconds": prefill,
        "prefill_gb_read": read.bytes_read / GB,
        "tokens": tokens,
        "tokens_s": tokens / seconds,
        "cpu_s_per_token": cpu / tokens,
        "gb_per_token": report.bytes_read / GB / tokens,
        "gb_s_of_reading": report.bytes_read / GB / max(report.seconds_reading, 1e-9),
        "share_of_time_reading": report.seconds_reading / seconds,
        "hit_rate": report.hit_rate,
        "cached_gb": report.cached_bytes / GB,
        "peak_gb": peak_gb(),
    }


def assert_finite(logits) -> None:
    if not bool(logits.isfinite().all()):
        raise SystemExit("the logits are not finite")


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def run_limited(folder: Path, cache_bytes: int, tokens: int, limit: int) -> list[dict[str, Any]]:
    """The rows that `child` prints, from a process with `limit` bytes of address space."""
    arguments = [str(folder), "--child", "--cache-bytes", str(cache_bytes), "--tokens", str(tokens)]
    command = [sys.executable, "-m", "benchmarks.experts_from_disk", *arguments]
    # One heap for all threads: every further one would reserve 64 MB of the address space.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    rows = []
    for line in process.stdout:
        print(line, end="", flush=True)
        rows.append({**json.loads(line), "cache_gb": cache_bytes / GB, "limit_gb": limit / GB})
    if process.wait():
        raise SystemExit(f"the limited process ended with status {process.returncode}")
    return rows


def non_expert_bytes(folder: Path) -> int:
    from kimi_hf.checkpoint.shards import open_checkpoint

    with open_checkpoint(folder) as checkpoint:
        return sum(entry.nbytes for name, entry in checkpoint.entries.items() if ".experts." not in name)


def write_report(made: dict[str, Any], disk: list[dict[str, Any]], runs: list[dict[str, Any]], command: str) -> str:
    lines = [
        "# Experts from disk",
        "",
        f"`{command}`, one thread; load average {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores.",
        "",
    ]
    opened = next(row for row in runs if row["step"] == "open")
    lines += [
        f"{opened['experts_gb']:.2f} GB of experts ({opened['expert_mb']:.2f} MB each, {made['layers']} layers of "
        f"{made['experts']}, 16 a token) and {opened['non_expert_gb']:.2f} GB of everything else, written in "
        f"{made['seconds']:.0f} s. Every process ran under RLIMIT_AS = {opened['limit_gb']:.2f} GB, the other tensors plus "
        "3 GB, so its resident memory could not exceed that either.",
        "",
        "| cache GB | step | seconds | tokens/s | CPU s a token | GB read a token | GB/s while reading | share of time reading "
        "| hit rate | peak RSS GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in runs:
        start = f"| {row['cache_gb']:.2f} "
        if row["step"] == "open":
            lines.append(f"{start}| open | {row['seconds']:.1f} | | | | | | | {row['peak_gb']:.2f} |")
            continue
        lines.append(
            f"{start}| {row['step']} prefill, {row['prefill_tokens']} tokens | {row['prefill_seconds']:.1f} | "
            f"{row['prefill_tokens'] / row['prefill_seconds']:.2f} | | "
            f"{row['prefill_gb_read'] / row['prefill_tokens']:.2f} | | | | |"
        )
        lines.append(
            f"{start}| {row['step']} decoding | {row['tokens'] / row['tokens_s']:.1f} | {row['tokens_s']:.2f} | "
            f"{row['cpu_s_per_token']:.2f} | {row['gb_per_token']:.2f} | {row['gb_s_of_reading']:.2f} | "
            f"{row['share_of_time_reading']:.0%} | {row['hit_rate']:.1%} | {row['peak_gb']:.2f} |"
        )
    lines += ["", "The disk, by experts at random places (cold: the file's pages dropped first):", ""]
    lines += ["| way | cold GB/s | warm GB/s | cold CPU s a GB | warm CPU s a GB |", "|---|---|---|---|---|"]
    for row in disk:
        lines.append(
            f"| {row['way']} | {row['cold_gb_s']:.2f} | {row['warm_gb_s']:.2f} | {row['cold_cpu_s_per_gb']:.2f} | "
            f"{row['warm_cpu_s_per_gb']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def make(folder: Path, experts: int, layers: int) -> dict[str, Any]:
    from kimi_hf.conversion.make_tiny import make_tiny

    start = time.perf_counter()
    make_tiny(build_config(experts, layers), folder, max_shard_bytes=2_000_000_000, verify=False)
    return {"step": "make", "seconds": time.perf_counter() - start, "experts": experts, "layers": layers - 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder on a disk with room for the experts, outside the repository")
    parser.add_argument("--experts", type=int, default=256, help="routed experts a layer, of 17.5 MB each")
    parser.add_argument("--layers", type=int, default=6, help="layers, of which all but the first have experts")
    parser.add_argument("--tokens", type=int, default=12, help="tokens to generate in each state")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the report")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache-bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.out, args.cache_bytes, args.tokens)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out / "experts-from-disk"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the checkpoint is deleted then, too
    try:
        made = make(folder, args.experts, args.layers)
        print(json.dumps(made), flush=True)
        disk = measure_disk(folder, 60)
        limit = non_expert_bytes(folder) + 3 * 10**9
        runs = [row for cache in (0, 1 << 30) for row in run_limited(folder, cache, args.tokens, limit)]
        words = ["OUT" if word == str(args.out) else word for word in sys.argv[1:]]
        report = write_report(made, disk, runs, f"python -m benchmarks.experts_from_disk {' '.join(words)}")
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "experts_from_disk.md").write_text(report)
        with (args.results / "experts_from_disk.jsonl").open("w") as file:
            for row in (made, *({"step": "disk", **row} for row in disk), *runs):
                file.write(json.dumps(row) + "\n")
        print(f"\n{report}")
        return 0
    finally:
        for leftover in (folder, folder.with_name(folder.name + ".partial")):
            shutil.rmtree(leftover, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
