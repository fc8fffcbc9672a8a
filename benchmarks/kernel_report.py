"""Compile every Triton kernel ahead of time, for GPUs that need not be there, and report what each one needs.

    python -m benchmarks.kernel_report [--target sm_90 sm_100 gfx942] [--only NAME]

The operations themselves are called, on tensors without storage and with launches recorded instead of run, so what is
compiled is exactly what a GPU would be given at those shapes. Prints a table and writes it, with the versions it was
made with, to benchmarks/results/kernel_report.md and .jsonl (its first line: the versions).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernel_cases import CASES
from kimi_hf.ops.kernels_common import Launch, record_launches

RESULTS = Path(__file__).parent / "results"
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.int32: "i32",
         torch.int64: "i64", torch.bool: "i1"}  # fmt: skip
MATRIX = re.compile(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma_|v_smfmac_")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Row:
    """One compiled kernel. `spills` is bytes of memory a thread needs for what its registers do not hold (NVIDIA's
    stack, AMD's private segment)."""

    case: str
    kernel: str
    config: str
    target: str
    warps: int
    registers: int
    spills: int
    shared: int
    matrix_instructions: int
    instructions: int


def recorded(case: Callable[[], object], target: str = "sm_90") -> list[Launch]:
    """The launches of one case on a target, the same kernel with the same constants listed once."""
    with record_launches(hip=target.startswith("gfx")) as launches, torch.device("meta"):
        case()
    seen, unique = set(), []
    for launch in launches:
        key = (launch.name, launch.config.name, str(_signature(launch)))
        if key not in seen:
            seen.add(key)
            unique.append(launch)
    return unique


def compile_launch(launch: Launch, target: str) -> Row:
    """Compile for `target` as a launch would, and read the resources off the binary."""
    signature, constants, attributes = _signature(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        count = {name: int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for name in
                 ("vgpr_count", "private_segment_fixed_size")}  # fmt: skip
        registers, spills = count["vgpr_count"], count["private_segment_fixed_size"]
    else:
        text = compiled.asm["ptx"]
        registers, spills = _nvidia_resources(compiled.asm["cubin"])
    instructions = sum(1 for line in text.splitlines() if line.startswith("\t") and not line.startswith("\t."))
    return Row(
        "", launch.name, launch.config.name, target, launch.config.num_warps, registers, spills,
        compiled.metadata.shared, len(MATRIX.findall(text)), instructions,
    )  # fmt: skip


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def _signature(launch: Launch) -> tuple[dict, dict, dict]:
    """(types, constants, alignment facts) of the kernel's arguments, by the launcher's rules: 1 and None are constants,
    pointers and integers that divide by 16 are known to, unless the kernel asks for no specialisation."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, tuple):
            signature[parameter.name] = tuple(f"*{NAMES[t.dtype]}" for t in value)
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(len(value))}
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{NAMES[value.dtype]}"
            attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return signature, constants, attributes


def rows(targets: list[str], only: str = "") -> Iterator[Row]:
    """Compile every case for every target."""
    for name, case in CASES.items():
        for target in targets:
            for launch in recorded(case, target):
                if only in name or only in launch.name:
                    yield Row(**(asdict(compile_launch(launch, target)) | {"case": name}))


def table(found: list[Row]) -> str:
    lines = ["| case | kernel | config | target | warps | registers | spills | shared | matrix instr. | instr. |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in found:
        lines.append("| " + " | ".join(str(v) for v in asdict(row).values()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--only", default="", help="cases or kernels whose name contains this")
    arguments = parser.parse_args()
    found = []
    for row in rows(arguments.target, arguments.only):
        found.append(row)
        print(f"{row.case:28} {row.kernel:36} {row.target:7} registers {row.registers:4} spills {row.spills:4} "
              f"shared {row.shared:7} matrix {row.matrix_instructions:4}", flush=True)  # fmt: skip
    if not arguments.only:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        RESULTS.mkdir(exist_ok=True)
        lines = [json.dumps(versions), *(json.dumps(asdict(row)) for row in found)]
        (RESULTS / "kernel_report.jsonl").write_text("\n".join(lines) + "\n")
        header = "Made by `python -m benchmarks.kernel_report` with " + ", ".join(
            f"{k} {v}" for k, v in versions.items()
        )
        (RESULTS / "kernel_report.md").write_text(f"# Kernels compiled ahead of time\n\n{header}.\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
