"""`kimi-hf verify`: does a checkpoint match its configuration, and do two checkpoints hold the same numbers?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from kimi_hf.checkpoint.check import check_decay_tails, check_scales, find_problems, format_disagreement
from kimi_hf.checkpoint.layout import DTYPE_BYTES
from kimi_hf.checkpoint.shards import as_tensor
from kimi_hf.conversion.gpt2 import is_gpt2, read_any
from kimi_hf.conversion.recipes import ByteRange, Matrix
from kimi_hf.conversion.view import CheckpointView
from kimi_hf.conversion.writer import CHUNK
from kimi_hf.errors import CheckpointError

SHOWN = 10


@dataclass
class Comparison:
    """Differences found, one printable line each; `compared` counts tensors of equal name."""

    differences: list[str] = field(default_factory=list)
    compared: int = 0
    count: int = 0

    def add(self, line: str, shown: int) -> None:
        self.count += 1
        if len(self.differences) < shown:
            self.differences.append(line)


def compare(first: str | Path, second: str | Path, shown: int = SHOWN) -> Comparison:
    """Compare two checkpoints tensor by tensor, whatever layout each is in.

    Tensors are matched by their released names; experts one matrix at a time. Two MXFP4 experts must have equal
    bytes; an MXFP4 and a dense one equal decoded values; otherwise stored bits must be equal, and values when the
    dtypes differ. `A_log` is compared on its heads.

    Returns: a `Comparison` with the first `shown` differences.
    Raises: CheckpointError if one of them cannot be read.
    """
    if is_gpt2(Path(first)) or is_gpt2(Path(second)):
        return _compare_states(read_any(first)[0], read_any(second)[0], shown)
    a, b = CheckpointView.open(first), CheckpointView.open(second)
    result = Comparison()
    for one, other, where in ((a, b, second), (b, a, first)):
        for name in one.common:
            if name not in other.common:
                result.add(f"{name} is missing in {where}", shown)
    total = a.checkpoint.nbytes
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", mininterval=0.5) as bar:
        for name in a.common:
            if name in b.common:
                _compare_ranges(result, name, a.whole(name), b.whole(name), a.text.kda_heads, shown)
                result.compared += 1
            bar.update(a.common[name].nbytes)
        for name, left, right in _matrix_pairs(a, b, result, shown):
            _compare_matrices(result, name, left, right, shown)
            result.compared += 1
            bar.update(sum(part.nbytes for part in (left.dense, left.packed, left.scale) if part is not None))
    return result


def _matrix_pairs(
    a: CheckpointView, b: CheckpointView, result: Comparison, shown: int
) -> Iterator[tuple[str, Matrix, Matrix]]:
    keys = ("num_layers", "num_experts", "moe_intermediate", "expert_width")
    differing = [key for key in keys if getattr(a.text, key) != getattr(b.text, key)]
    for key in differing:
        result.add(f"config: {key} is {getattr(a.text, key)} against {getattr(b.text, key)}", shown)
    if differing:
        return
    for layer, expert, which in a.matrices():
        name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{which}"
        sides = []
        for view in (a, b):
            try:
                sides.append(view.matrix(layer, expert, which))
            except CheckpointError as error:
                result.add(str(error), shown)
        if len(sides) == 2:
            yield name, sides[0], sides[1]


def _compare_ranges(result: Comparison, name: str, a: ByteRange, b: ByteRange, heads: int, shown: int) -> None:
    if name.endswith("self_attn.A_log"):
        values = [side.checkpoint.read(side.entry.name).reshape(-1)[:heads] for side in (a, b)]
        if not torch.equal(*values):
            result.add(_first_difference(name, *values), shown)
        return
    if a.entry.shape != b.entry.shape:
        result.add(f"{name}: shape {list(a.entry.shape)} against {list(b.entry.shape)}", shown)
        return
    types = (a.entry.dtype, b.entry.dtype)
    count, step = a.nbytes // DTYPE_BYTES[types[0]], CHUNK // 8
    for begin in range(0, count, step):
        size = min(step, count - begin)
        raw = [s.read(begin * DTYPE_BYTES[t], size * DTYPE_BYTES[t]) for s, t in zip((a, b), types, strict=True)]
        if types[0] == types[1] and raw[0] == raw[1]:
            continue
        values = [as_tensor(r, t, (size,)) for r, t in zip(raw, types, strict=True)]
        if types[0] == types[1] or not torch.equal(values[0].double(), values[1].double()):
            note = "" if types[0] == types[1] else f" ({types[0]} against {types[1]})"
            result.add(_first_difference(name, *values, begin, a.entry.shape) + note, shown)
            return


def _compare_matrices(result: Comparison, name: str, a: Matrix, b: Matrix, shown: int) -> None:
    if a.packed is not None and b.packed is not None:
        for part in ("packed", "scale"):
            left, right = getattr(a, part).read(), getattr(b, part).read()
            if left != right:
                at = next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
                result.add(f"{name}.weight_{part}: byte {at} is {left[at]} against {right[at]}", shown)
                return
        return
    if a.dense is not None and b.dense is not None:
        dtype = a.dtype if a.dtype == b.dtype else "F64"
    else:
        dtype = b.dtype if b.dense is not None else a.dtype
    step = max(1, CHUNK // (8 * a.cols))
    for begin in range(0, a.rows, step):
        end = min(begin + step, a.rows)
        values = [side.dense_rows(begin, end, dtype) for side in (a, b)]
        # Bits, not values: -0 and 0 are different weights of a packed checkpoint.
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values[0].element_size()]
        if not torch.equal(values[0].view(bits), values[1].view(bits)):
            flat = [value.reshape(-1) for value in values]
            result.add(_first_difference(f"{name}.weight", *flat, begin * a.cols, (a.rows, a.cols)), shown)
            return


def _first_difference(
    name: str, a: torch.Tensor, b: torch.Tensor, begin: int = 0, shape: tuple[int, ...] | None = None
) -> str:
    """`name[3, 17]: 0.5 against 0.25`, and how many of the compared piece differ."""
    different = (a.double() != b.double()) | (torch.signbit(a.double()) != torch.signbit(b.double()))
    different |= torch.isnan(a.double()) != torch.isnan(b.double())
    if not bool(different.any()):
        return f"{name}: NaN payloads differ"
    at = int(different.nonzero()[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(begin + at), shape or a.shape)]
    share = f"{int(different.sum())} of {different.numel()} compared values differ"
    return f"{name}{place}: {float(a[at])!r} against {float(b[at])!r}; {share}"


def _compare_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], shown: int) -> Comparison:
    result = Comparison()
    for name in tqdm(sorted(a.keys() | b.keys()), desc="verify", mininterval=0.5):
        if name not in a or name not in b:
            result.add(f"{name} is missing on the {'second' if name in a else 'first'} side", shown)
        elif a[name].shape != b[name].shape:
            result.add(f"{name}: shape {list(a[name].shape)} against {list(b[name].shape)}", shown)
        else:
            result.compared += 1
            if not torch.equal(a[name].float(), b[name].float()):
                flat = a[name].float().reshape(-1), b[name].float().reshape(-1)
                result.add(_first_difference(name, *flat, 0, tuple(a[name].shape)), shown)
    return result


def verify_config(
    folder: str | Path, deep: bool = False, strict_dtypes: bool = True, vision: bool | None = None
) -> tuple[CheckpointView, list[str]]:
    """Names, shapes and dtypes of a checkpoint against its config; also the expert format that it names, and the
    zero tails of `A_log`.

    Args:
        deep: read all MXFP4 scales and look for NaN (255).
        strict_dtypes: report float tensors whose dtype is not the released one.
        vision: False to let a composite checkpoint lack its vision tensors.
    Returns: the view, and the problems, one line each.
    """
    view = CheckpointView.open(folder)
    with view.checkpoint:
        problems = find_problems(view.checkpoint, view.config, vision=vision, strict_dtypes=strict_dtypes)
        lines = [*filter(None, [format_disagreement(view.checkpoint, view.config)]), *problems.lines(SHOWN)]
        try:
            check_decay_tails(view.checkpoint, view.config)
            if deep:
                check_scales(view.checkpoint)
        except CheckpointError as error:
            lines.append(str(error))
    return view, lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="checkpoint folder (or nanoGPT ckpt.pt)")
    parser.add_argument("second", type=Path, nargs="?", help="another one; without it the config is checked alone")
    parser.add_argument("--deep", action="store_true", help="also read all MXFP4 scales and look for NaN")
    parser.add_argument("--any-float", action="store_true", help="accept any float dtype where the release has another")
    parser.add_argument("--text-only", action="store_true", help="the vision tensors of the config may be absent")
    parser.add_argument("--show", type=int, default=SHOWN, metavar="N", help="differences to print")


def run(args: argparse.Namespace) -> int:
    if args.second is None:
        if args.first.suffix == ".pt":
            raise CheckpointError(f"{args.first} is a nanoGPT checkpoint, which has no config.json; name a second one")
        vision = False if args.text_only else None
        view, lines = verify_config(args.first, args.deep, not args.any_float, vision)
        for line in lines:
            print(line)
        state = "differs from" if lines else "matches"
        print(f"{args.first}: {len(view.checkpoint)} tensors, {view.checkpoint.nbytes} bytes: {state} its config.json")
        return 1 if lines else 0
    result = compare(args.first, args.second, args.show)
    for line in result.differences:
        print(line)
    if result.count > len(result.differences):
        print(f"... and {result.count - len(result.differences)} more differences")
    print(f"{result.compared} tensors compared, {result.count} differences")
    return 1 if result.count else 0
