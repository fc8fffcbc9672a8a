"""`kimi-hf lab`: run the experiments, then write the report."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .experiment import Experiment, Point
from .experiments import EXPERIMENTS
from .store import Store

BUDGETS = ("small", "medium")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help="which to run; all when left out (see --list)")
    parser.add_argument(
        "--budget", choices=BUDGETS, default="small", help="small: minutes on two cores; medium: an hour"
    )
    parser.add_argument("--out", type=Path, default=Path("lab"), help="folder of results.json and report.html")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes, one thread each")
    parser.add_argument("--report-only", action="store_true", help="draw what is there, measure nothing")
    parser.add_argument("--list", action="store_true", help="say what there is, and stop")


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, report what there is. A stopped run goes on where it was.

    Raises:
        ConfigError: an unknown experiment, or a folder with another budget's results.
    """
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    if args.list:
        for experiment in EXPERIMENTS:
            print(f"{experiment.name:<14} {experiment.claim}")
        return 0
    unknown = [name for name in args.names if name not in known]
    if unknown:
        raise ConfigError(f"no experiment is called {unknown[0]!r}; there are {', '.join(known)}")
    if args.workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {args.workers}")
    store = Store(args.out, args.budget)
    if not args.report_only:
        measure([known[name] for name in args.names] or list(EXPERIMENTS), store, args.workers)
    from .report import write_report

    for line in write_report(store, args.out / "report.html"):
        print(line)
    return 0


def measure(experiments: list[Experiment], store: Store, workers: int) -> None:
    """Measure every missing point: those that time something one by one, then all others side by side."""
    timed = [(e, p) for e in experiments if e.alone for p in store.missing(e)]
    beside = [(e, p) for e in experiments if not e.alone for p in store.missing(e)]
    total, begun = len(timed) + len(beside), time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        done = 0
        for experiment, point, value in _in_turn(timed, beside, workers):
            store.keep(experiment, point, value)
            done += 1
            spent = time.monotonic() - begun
            print(
                f"{done:>4}/{total} {spent:7.0f} s  {experiment.name}: {point.key} ({value['seconds']:.1f} s)",
                flush=True,
            )
    finally:
        torch.set_num_threads(threads)


Task = tuple[Experiment, Point]


def _in_turn(timed: list[Task], beside: list[Task], workers: int) -> Iterator[tuple[Experiment, Point, Any]]:
    for experiment, point in timed:
        yield experiment, point, _measured(point)
    if workers == 1 or len(beside) < 2:
        for experiment, point in beside:
            yield experiment, point, _measured(point)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = {pool.submit(_measured, point): (experiment, point) for experiment, point in beside}
        try:
            for future in as_completed(waiting):
                yield *waiting[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _measured(point: Point) -> dict[str, Any]:
    """What the point's function returns, with the time it took by the clock and of the processor."""
    begun, processor = time.perf_counter(), time.process_time()
    value = point.function(**point.arguments)
    spent = {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time() - processor}
    return {**value, **{name: round(seconds, 2) for name, seconds in spent.items()}}
