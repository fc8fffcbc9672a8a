"""Measuring on a GPU (or, for a dry run, anywhere): times, ceilings, and a guard against waiting for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Bench:
    """Times functions on one device. Between runs the second-level cache is flushed, so that small states are cold.

    Args:
        device: where everything runs; "cpu" for a dry run, which takes each function once.
        seconds: how long one measurement may take.
    """

    def __init__(self, device: torch.device, seconds: float = 0.6):
        self.device, self.seconds = device, seconds
        self.on_gpu = device.type == "cuda"
        self._flush = torch.empty(1 << 28, dtype=torch.uint8, device=device) if self.on_gpu else None

    def time(self, run: Callable[[], object], *, runs: int = 50) -> float:
        """Median seconds of `run` after a warm-up."""
        if not self.on_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        first = self._once(run)  # compiles
        first = self._once(run)
        runs = max(3, min(runs, int(self.seconds / max(first, 1e-6))))
        return statistics.median(self._once(run) for _ in range(runs))

    def _once(self, run: Callable[[], object]) -> float:
        self._flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run` captured in a CUDA graph, so that launching costs nothing; `run` itself in a dry run."""
        if not self.on_gpu:
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes allocated at most while `run` runs, above what was allocated before. 0 in a dry run."""
        if not self.on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside, any operation that makes the host wait for the device raises."""
        if not self.on_gpu:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def ceilings(self) -> dict[str, float]:
        """Bytes a second of a large copy (read and write counted), and bf16 flops a second of a large product."""
        size, n = (1 << 30, 8192) if self.on_gpu else (1 << 20, 64)
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        a = torch.randn(n, n, dtype=torch.bfloat16, device=self.device)
        copy = self.time(lambda: target.copy_(source))
        product = self.time(lambda: a @ a)
        return {"copy_bytes_per_s": 2 * size / copy, "bf16_flops_per_s": 2 * n**3 / product}
