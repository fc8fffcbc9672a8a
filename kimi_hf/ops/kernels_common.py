"""What all Triton kernels share: launching, named configurations, explicit dot precision, small device functions.

Importing this file imports triton; `dispatch.py` decides whether anybody does. Nothing here synchronises with the
device: grids come from host-side shapes, sequence tables are built by device operations.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hf.errors import BackendError, ShapeError
from kimi_hf.ops.dispatch import triton_interprets

TUNED_FILE = Path(__file__).with_name("kernels_tuned.json")
MOST_PROGRAMS = 2**31 - 1  # of a grid's first axis, the only one used
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Config:
    """One named way to compile a kernel. The first configuration of a kernel is its default.

    `constants` are the kernel's block sizes; `name` is what the tuning table stores; `suits` are the kinds of call
    ("hip", "fp32", ...) that it is the default of instead.
    """

    name: str
    constants: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    suits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One recorded launch: enough to compile the kernel ahead of time exactly as it would have been compiled."""

    kernel: Any
    arguments: Mapping[str, Any]
    config: Config
    grid: tuple[int]

    @property
    def name(self) -> str:
        return self.kernel.__name__


_recorder: list[Launch] | None = None
_recording_for_hip = False
_forced: dict[str, str] = {}  # kernel name -> configuration name, while tuning
# kernel name -> (its configurations, the tuning key) of its last call: what there is to tune
seen_choices: dict[str, tuple[tuple[Config, ...], str]] = {}


@contextmanager
def record_launches(hip: bool = False) -> Iterator[list[Launch]]:
    """Inside the block nothing runs: launches are listed instead, as for AMD with `hip`. Takes "meta" tensors."""
    global _recorder, _recording_for_hip
    before = _recorder, _recording_for_hip
    _recorder, _recording_for_hip = [], hip
    try:
        yield _recorder
    finally:
        _recorder, _recording_for_hip = before


def on_hip() -> bool:
    """Whether kernels are for AMD GPUs."""
    return _recording_for_hip or torch.version.hip is not None


@contextmanager
def force_config(kernel_name: str, config_name: str) -> Iterator[None]:
    """Inside the block the kernel takes this configuration: for tuning and for tests of every configuration."""
    _forced[kernel_name] = config_name
    try:
        yield
    finally:
        del _forced[kernel_name]


@cache
def tuned_table() -> dict[str, dict[str, str]]:
    """{device name: {"kernel/key": configuration name}}: the shipped result of `benchmarks/gpu_check.py --tune`."""
    return json.loads(TUNED_FILE.read_text()) if TUNED_FILE.exists() else {}


@cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def choose(kernel: Any, configs: tuple[Config, ...], key: str, device: torch.device, *, kind: str = "") -> Config:
    """The configuration to launch: forced, else the shipped tuning table's for this device and key, else the default.

    The default is the first that suits this `kind` of call, else the first of all.
    """
    seen_choices[kernel.__name__] = configs, key
    name = _forced.get(kernel.__name__)
    if name is None and device.type == "cuda":
        name = tuned_table().get(_device_name(device.index or 0), {}).get(f"{kernel.__name__}/{key}")
    if name is None:
        return next((config for config in configs if kind in config.suits), configs[0])
    for config in configs:
        if config.name == name:
            return config
    known = ", ".join(c.name for c in configs)
    raise BackendError(f"{kernel.__name__}: no configuration {name!r}; it has {known}; correct {TUNED_FILE.name}")


def launch(kernel: Any, grid: tuple[int], config: Config, device: torch.device, **arguments: Any) -> None:
    """Run `kernel` on `grid`; an empty grid runs nothing. Block sizes come from `config`, all else from `arguments`.

    Floating-point contraction is asked for by name, so that a change of triton's default changes no results.

    Raises: ShapeError for more programs than a GPU's grid holds.
    """
    if 0 in grid:
        return
    if grid[0] > MOST_PROGRAMS:
        raise ShapeError(
            f"{kernel.__name__}: {grid[0]} programs are needed, a grid holds {MOST_PROGRAMS}; give fewer rows at a time"
        )
    if _recorder is not None:
        _recorder.append(Launch(kernel, {**arguments, **config.constants}, config, grid))
        return
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            kernel[grid](**arguments, **config.constants, **options)
    else:
        kernel[grid](**arguments, **config.constants, **options)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Operand type of the large matrix products for activations of `dtype`; sums are fp32 always.

    triton's interpreter multiplies bf16 operands wrongly, so there bf16 values are multiplied as fp32.
    """
    if dtype == torch.bfloat16 and triton_interprets():
        return tl.float32
    return DTYPES[dtype]


def fp32_precision(device: torch.device) -> str:
    """How fp32 operands are multiplied: never plain tf32. Three tf32 products on NVIDIA, IEEE fp32 elsewhere."""
    if device.type in ("cuda", "meta") and not on_hip():
        return "tf32x3"
    return "ieee"


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


@triton.jit
def wide(index):
    """A loop index in 64 bits, for offsets that can pass 2^31; the interpreter's loop indices are plain integers."""
    return index + tl.full([], 0, tl.int64)


@triton.jit
def stable_tanh(x):
    """tanh in fp32, to a few ulp everywhere: an odd polynomial near 0, where (1 - e) / (1 + e) would cancel."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = a * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    t = tl.where(a < 0.25, near, far)
    return tl.where(x < 0, -t, t)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in fp32 without cancellation for very negative x, and x itself above 20."""
    e = tl.exp(tl.minimum(x, 20.0))
    series = e * (1.0 + e * (-1.0 / 2 + e * (1.0 / 3 + e * (-1.0 / 4 + e * (1.0 / 5 - e * (1.0 / 6))))))
    return tl.where(x > 20.0, x, tl.where(e < 0.0625, series, tl.log(1.0 + e)))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """ACTIVATION: "sigmoid", "silu" or None."""
    if ACTIVATION == "sigmoid":
        return tl.sigmoid(x)
    elif ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    else:
        return x


@triton.jit
def activate_slope(x, ACTIVATION: tl.constexpr):
    """d activate(x) / dx."""
    if ACTIVATION == "sigmoid":
        s = tl.sigmoid(x)
        return s * (1.0 - s)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    else:
        return x * 0.0 + 1.0


class _Remembered:
    """The last result for a cu_seqlens tensor: every layer of a forward asks for the same tables.

    Remembered by identity and version; never during CUDA graph capture, where the tables must be part of the graph,
    nor of tensors made in inference mode, which have no version.
    """

    def __init__(self, build):
        self.build, self.owner, self.key, self.value = build, None, None, None

    def __call__(self, cu_seqlens: Tensor, *sizes: int):
        if cu_seqlens.is_inference() or (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.build(cu_seqlens, *sizes)
        key = (cu_seqlens._version, *sizes)
        if self.owner is None or self.owner() is not cu_seqlens or self.key != key:
            self.value = self.build(cu_seqlens, *sizes)
            self.owner, self.key = weakref.ref(cu_seqlens), key
        return self.value


def _sequence_of_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    positions = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, positions, right=True, out_int32=True) - 1


# (cu_seqlens [N+1], tokens) -> int32 [tokens]: the sequence each token belongs to. Built on the device.
sequence_of_token = _Remembered(_sequence_of_token)
