"""The whole released Kimi K3 checkpoint as sparse files: every name, shape, dtype and offset, no data.

96 shards and an index of 497,220 tensors, 1.56 TB apparent, a few hundred MB on disk, so that tools can be tried at
the real thing's size. Then times the command line tools on it, opens all 93 layers with the experts in their files and
all other layers offloaded to disk, runs one token through them (zeros in, finite numbers out), and prints a table.

    python benchmarks/full_geometry.py OUT            # writes OUT/kimi-k3, measures, deletes
    python benchmarks/full_geometry.py OUT --keep     # leaves the files
    python benchmarks/full_geometry.py OUT --write-only
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from kimi_hf.checkpoint.geometry import load_config
from kimi_hf.checkpoint.layout import TensorSpec, is_vision, released_layout
from kimi_hf.checkpoint.shards import INDEX_NAME
from kimi_hf.conversion.configs import to_json
from kimi_hf.conversion.writer import build_header

SHARDS = 96
CLI = "import sys; from kimi_hf.cli import main; sys.exit(main(sys.argv[1:]))"


def check_sparse(folder: Path, size: int = 17_000_000_000) -> None:
    """Raise SystemExit unless the file system keeps a file of `size` bytes as a hole."""
    probe = folder / "sparse-probe"
    try:
        with probe.open("wb") as file:
            file.truncate(size)
        taken = probe.stat().st_blocks * 512
    except OSError as error:
        raise SystemExit(f"{folder}: a {size / 1e9:.0f} GB file is refused ({error}); choose another disk") from error
    finally:
        probe.unlink(missing_ok=True)
    if taken > 1_000_000:
        raise SystemExit(f"{folder}: its file system does not keep holes ({taken} bytes taken); choose another disk")


def split(specs: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """`count` runs of about equal bytes, in order; the vision tensors fill the last two, as in the release."""
    text = [spec for spec in specs if not is_vision(spec.name)]
    total, filled = sum(spec.nbytes for spec in text), 0
    shards: list[list[TensorSpec]] = [[] for _ in range(count)]
    for spec in text:
        shards[min(count - 1, filled * count // total)].append(spec)
        filled += spec.nbytes
    vision = [spec for spec in specs if is_vision(spec.name)]
    half = len(vision) // 2
    shards[-2].extend(vision[:half])
    shards[-1].extend(vision[half:])
    return shards


def write_geometry(config: Mapping[str, Any], out: Path, count: int = SHARDS) -> tuple[int, int]:
    """Write the sparse checkpoint; returns the number of tensors and their bytes."""
    out.mkdir(parents=True)
    specs = list(released_layout(config))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(tqdm(split(specs, count), desc="sparse shards"), start=1):
        name = f"model-{number:05d}-of-{count:06d}.safetensors"
        header = build_header(shard, {"format": "pt"})
        with (out / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(spec.nbytes for spec in shard))
        weight_map.update((spec.name, name) for spec in shard)
    total = sum(spec.nbytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / INDEX_NAME).write_text(json.dumps(index, indent=2))
    (out / "config.json").write_bytes(to_json(config))
    return len(specs), total


class Cost(NamedTuple):
    """What a command took: exit status (-N if signal N ended it), wall and CPU seconds, peak resident GB."""

    status: int
    seconds: float
    cpu: float
    peak: float


def measure(arguments: Sequence[str], kill_when: Callable[[], bool] | None = None) -> Cost:
    """Run `kimi-hf` with `arguments`; SIGKILL ends it as soon as `kill_when` says so (asked every 20 ms)."""
    start = time.perf_counter()
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", CLI, *arguments], os.environ)
    done = 0
    while not done:
        done, status, usage = os.wait4(child, 0 if kill_when is None else os.WNOHANG)
        if not done and kill_when():
            os.kill(child, signal.SIGKILL)
            kill_when = None
        elif not done:
            time.sleep(0.02)
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(os.waitstatus_to_exitcode(status), time.perf_counter() - start, cpu, usage.ru_maxrss / 1e6)


def open_and_run(folder: Path) -> None:
    """In a process of its own: open every layer, run one token; a JSON line each with the peak of resident memory.

    Measured, not limited: offloaded layers are read through private maps of whole shards, which the kernel's limits on
    address space and data count in full.
    """
    import torch
    from transformers import AutoModelForCausalLM

    import kimi_hf  # noqa: F401

    torch.set_num_threads(1)

    def told(step: str, start: float, cpu: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(json.dumps([step, 0, time.perf_counter() - start, time.process_time() - cpu, peak]), flush=True)

    start, cpu = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(
        folder, expert_storage="disk", device_map={"": "disk"}, offload_folder=folder.with_name("offload")
    )
    layers = len(model.language_model.model.layers)
    told(f"open {layers} layers", start, cpu)
    start, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits
    if not bool(logits.isfinite().all()):
        raise SystemExit("the logits are not finite")
    told(f"one token, {layers} layers", start, cpu)
    print(f"experts: {model.expert_storage_report()}", file=sys.stderr)


def measure_model(folder: Path) -> list[tuple[str, Cost]]:
    """The rows of `open_and_run`."""
    command = [sys.executable, __file__, str(folder), "--open"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    rows = [(step, Cost(*rest)) for step, *rest in map(json.loads, done.stdout.splitlines())]
    return rows if not done.returncode else [*rows, ("open and run", Cost(done.returncode, 0.0, 0.0, 0.0))]


def table(rows: Sequence[tuple[str, Cost]]) -> str:
    lines = [f"{'step':<24} {'exit':>4} {'seconds':>8} {'cpu s':>8} {'peak GB':>8}"]
    for name, cost in rows:
        lines.append(f"{name:<24} {cost.status:>4} {cost.seconds:>8.1f} {cost.cpu:>8.1f} {cost.peak:>8.2f}")
    return "\n".join(lines)


def disk_usage(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder on a disk with room for a few GB, outside the repository")
    parser.add_argument("--config", type=Path, help="config.json; default: the kimi-k3 preset")
    parser.add_argument("--keep", action="store_true", help="do not delete the files")
    parser.add_argument("--write-only", action="store_true", help="write and keep, measure nothing")
    parser.add_argument("--open", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        open_and_run(args.out)
        return 0
    if args.config is None:
        from kimi_hf.configuration import preset

        config = preset("kimi-k3").to_dict()
    else:
        config = load_config(args.config)
    args.out.mkdir(parents=True, exist_ok=True)
    check_sparse(args.out)
    folder, cut = args.out / "kimi-k3", args.out / "kimi-k3-layers-0-3"
    try:
        start, cpu = time.perf_counter(), time.process_time()
        tensors, total = write_geometry(config, folder)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        rows = [("write", Cost(0, time.perf_counter() - start, time.process_time() - cpu, peak))]
        print(f"{tensors:,} tensors, {total:,} bytes apparent, {disk_usage(folder) / 1e6:.0f} MB on disk")
        if not args.write_only:
            rows.append(("info", measure(["info", str(folder)])))
            rows.append(("verify", measure(["verify", str(folder)])))
            rows.append(("slice --layers 0-3", measure(["slice", str(folder), str(cut), "--layers", "0-3"])))
            rows.append(("verify the slice", measure(["verify", str(cut)])))
            rows += measure_model(cut)
            rows += measure_model(folder)
            print(f"the slice takes {disk_usage(cut) / 1e6:.0f} MB on disk")
        print(f"\n{table(rows)}")
        return max(cost.status for _, cost in rows)
    finally:
        if not (args.keep or args.write_only):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(cut, ignore_errors=True)
        shutil.rmtree(args.out / "offload", ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
