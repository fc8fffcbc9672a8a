"""Small checkpoints and comparisons that the conversion tests share."""

import argparse
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from kimi_hf.checkpoint.layout import TensorSpec
from kimi_hf.checkpoint.shards import DTYPE_NAMES, open_checkpoint
from kimi_hf.conversion.recipes import InMemory
from kimi_hf.conversion.writer import PlannedShard, build_header, build_index

INDEX = "model.safetensors.index.json"


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint folder (goldens left out)."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith("golden")
    }


def copy_checkpoint(source: Path, target: Path) -> Path:
    """A writable copy without goldens."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("golden"):
            shutil.copyfile(path, target / path.name)
    return target


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.entries}


def recipe(name: str, tensor: torch.Tensor) -> InMemory:
    return InMemory(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)), tensor)


def write_raw(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A safetensors file in the order of the dict."""
    recipes = [recipe(name, tensor) for name, tensor in tensors.items()]
    with path.open("wb") as file:
        file.write(build_header([r.spec for r in recipes], {"format": "pt"}))
        for one in recipes:
            for chunk in one.chunks():
                file.write(chunk)
    return path


def write_checkpoint(folder: Path, shards: list[dict[str, torch.Tensor]], config: dict | None = None) -> Path:
    """Shards with an index, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    planned = []
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_raw(folder / file, tensors)
        planned.append(PlannedShard(file, [recipe(name, tensor) for name, tensor in tensors.items()]))
    (folder / INDEX).write_bytes(build_index(planned))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_config(folder: Path, edit: Callable[[dict], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrite a single-file checkpoint after changing its tensors."""
    tensors = {name: tensor.clone() for name, tensor in read_all(folder).items()}
    edit(tensors)
    write_raw(folder / "model.safetensors", tensors)
    return folder


def command(module: ModuleType, *arguments: object) -> int:
    """Run a command module as the command line does."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(argument) for argument in arguments]))


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child: 0 if it returned, 1 if it raised, -N if signal N killed it."""
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


SYSTEM_CALLS = ("open", "write", "pwrite", "ftruncate", "fsync", "rename", "rmdir")


class Killer:
    """Notes the names of this process's file operations; at number `at` it kills the process with SIGKILL.

    `half` makes the fatal write put half of its bytes on disk first.
    """

    def __init__(self, at: int | None = None, half: bool = False):
        self.at, self.half = at, half
        self.names: list[str] = []

    def install(self) -> "Killer":
        for name in SYSTEM_CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        return self

    def _wrapped(self, name: str, call: Callable) -> Callable:
        def wrapped(*arguments, **keywords):
            self.names.append(name)
            if len(self.names) == self.at:
                if self.half and name in ("write", "pwrite"):
                    data = arguments[1]
                    call(arguments[0], data[: len(data) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return wrapped
