"""Writing a checkpoint folder shard by shard, so that a kill at any moment loses at most one shard's work.

The folder is built as `<out>.partial` beside its final place:

    <out>.partial/conversion-journal.jsonl     which shards are complete; one line each, flushed to disk
    <out>.partial/model-00001-of-00004.safetensors
    <out>.partial/model-00002-of-00004.safetensors.part      the one being written
    ...
    <out>.partial/config.json, model.safetensors.index.json  last
    <out>                                                    the folder renamed, when all is there

A shard gets its name only after it was read back and compared with its sources, and the folder only after all
shards have theirs: whatever is called `<out>` is complete. The same command run again goes on where it stopped.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from kimi_hf.checkpoint.layout import TensorSpec
from kimi_hf.checkpoint.shards import INDEX_NAME, SINGLE_NAME, hole_length
from kimi_hf.checkpoint.writing import build_header
from kimi_hf.errors import CheckpointError

JOURNAL = "conversion-journal.jsonl"
CHUNK = 16 << 20
# The format's reference writer puts wide types first and names in order within a type; so do we, byte for byte.
_DTYPE_RANK = {
    name: rank
    for rank, name in enumerate(
        "U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 BOOL".split()
    )
}


Chunk = bytearray | int  # some bytes, or a number of zero bytes (a hole of a sparse file)


class Recipe(Protocol):
    """How to make one tensor: its spec, and its bytes in pieces of a few MB, the same ones on every call."""

    spec: TensorSpec

    def chunks(self) -> Iterator[Chunk]: ...

    def describe(self) -> str: ...


@dataclass
class PlannedShard:
    """One output file: `prefix`, if given, is the exact header to write; the tensors then follow in its order.

    `indexed` is False for files that are kept beside a checkpoint without being part of it.
    """

    file: str
    recipes: Sequence[Recipe]
    prefix: bytes | None = None
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    indexed: bool = True

    def layout(self) -> tuple[bytes, list[Recipe]]:
        """The bytes before the data, and the recipes in the order of their bytes."""
        if self.prefix is not None:
            return self.prefix, list(self.recipes)
        ordered = sorted(self.recipes, key=lambda r: (_DTYPE_RANK.get(r.spec.dtype, 99), r.spec.name))
        return build_header([recipe.spec for recipe in ordered], self.metadata), ordered

    @property
    def nbytes(self) -> int:
        return sum(recipe.spec.nbytes for recipe in self.recipes)


def shard_name(number: int, count: int) -> str:
    """`model-00003-of-000096.safetensors`, as the release numbers its shards; `model.safetensors` if alone."""
    return SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:06d}.safetensors"


def plan_shards(recipes: Iterable[Recipe], max_bytes: int) -> list[PlannedShard]:
    """Fill shards in order up to `max_bytes` each; a larger tensor gets a shard of its own."""
    groups: list[list[Recipe]] = []
    filled = 0
    for recipe in recipes:
        if not groups or (groups[-1] and filled + recipe.spec.nbytes > max_bytes):
            groups.append([])
            filled = 0
        groups[-1].append(recipe)
        filled += recipe.spec.nbytes
    return [PlannedShard(shard_name(at + 1, len(groups)), group) for at, group in enumerate(groups)]


def build_index(shards: Sequence[PlannedShard]) -> bytes:
    """The index file: total bytes, and each tensor's shard in the order of names."""
    parts = [shard for shard in shards if shard.indexed]
    weight_map = {recipe.spec.name: shard.file for shard in parts for recipe in shard.recipes}
    total = sum(shard.nbytes for shard in parts)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def write_folder(
    out: str | Path,
    shards: Sequence[PlannedShard],
    files: Mapping[str, bytes | Path],
    *,
    sources: Sequence[Path] = (),
    density: float = 1.0,
    verify: bool = True,
    label: str = "writing",
) -> Path:
    """Write shards, then `files` (config.json and others; bytes, or a path to copy), then the index.

    Args:
        out: folder to make; it must not exist, except as the finished result of this very job.
        shards: what to write; tensors of later shards may come from anywhere.
        files: names relative to `out`. `model.safetensors.index.json` is added when there are several shards,
            unless given here.
        sources: files that the recipes read; if one changes between two runs the job is not resumed.
        density: share of the bytes that will take room on disk (all-zero pieces are left as holes).
        verify: read every shard back and compare it with its recipes before it gets its name.
        label: shown before the progress bar.
    Returns: `out`.
    Raises: CheckpointError if `out` exists, another job's leftovers are in the way, the disk is full or read-only,
        or what was written reads back differently. The sources are never touched.
    """
    out = Path(out)
    if len({recipe.spec.name for shard in shards for recipe in shard.recipes}) != sum(len(s.recipes) for s in shards):
        raise CheckpointError(f"{out}: two of the tensors to be written share a name; check the input for duplicates")
    for source in sources:
        if out.resolve() in (source.resolve(), *source.resolve().parents):
            raise CheckpointError(f"{out} holds the input {source.name}; choose another folder")
    job = _Job(out, shards, sources, label)
    try:
        if not job.open():
            return out
        job.check_space(density)
        with tqdm(total=job.total(verify), unit="B", unit_scale=True, desc=label, mininterval=0.5) as bar:
            for shard in shards:
                job.write_shard(shard, verify, bar)
        extra = dict(files)
        if sum(shard.indexed for shard in shards) > 1 and INDEX_NAME not in extra:
            extra[INDEX_NAME] = build_index(shards)
        job.finish(extra)
    except OSError as error:
        raise _explain(error, job.partial) from error
    finally:
        job.close()
    return out


class _Job:
    """State of one `write_folder` call: the partial folder, its journal, and the lock on it."""

    def __init__(self, out: Path, shards: Sequence[PlannedShard], sources: Sequence[Path], label: str):
        self.out, self.shards, self.label = out, shards, label
        self.partial = out.with_name(out.name + ".partial")
        self.fingerprint = _fingerprint(shards, sources)
        self.done: set[str] = set()
        self._journal: int | None = None

    def open(self) -> bool:
        """Create or take up the partial folder; False if the finished folder is already there."""
        if self.out.exists():
            if self._finished_before():
                return False
            if not self.out.is_dir() or any(self.out.iterdir()):
                raise CheckpointError(f"{self.out} exists; choose another folder or remove it")
        journal = self.partial / JOURNAL
        if self.partial.is_dir() and not journal.exists() and any(self.partial.iterdir()):
            raise CheckpointError(f"{self.partial} is in the way and is not an unfinished job; move it away")
        self.partial.mkdir(parents=True, exist_ok=True)
        self._journal = os.open(journal, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"{self.partial} is being written by another process; wait for it") from error
        raw = _whole_lines(journal)
        lines = [json.loads(line) for line in raw]
        if lines and lines[0].get("job") != self.fingerprint:
            raise CheckpointError(
                f"{self.partial} holds another unfinished job ({lines[0].get('label')!r}, other input or options); "
                f"run that command again, or remove the folder"
            )
        os.ftruncate(self._journal, sum(len(line) + 1 for line in raw))
        if not lines:
            self._note({"job": self.fingerprint, "label": self.label})
        for line in lines[1:]:
            shard = self.partial / line["shard"]
            if shard.is_file() and shard.stat().st_size == line["bytes"]:
                self.done.add(line["shard"])
        return True

    def _finished_before(self) -> bool:
        """A kill between the last rename and the removal of the journal leaves a complete folder with a journal."""
        journal = self.out / JOURNAL
        if not journal.is_file():
            return False
        lines = _whole_lines(journal)
        if not lines or json.loads(lines[0]).get("job") != self.fingerprint:
            return False
        journal.unlink()
        return True

    def _note(self, line: Mapping[str, object]) -> None:
        data = json.dumps(line).encode() + b"\n"
        os.lseek(self._journal, 0, os.SEEK_END)
        _write_all(self._journal, data, None)
        os.fsync(self._journal)

    def check_space(self, density: float) -> None:
        todo = sum(shard.nbytes for shard in self.shards if shard.file not in self.done)
        free = shutil.disk_usage(self.partial).free
        if todo * density > free:
            self._abandon()
            raise CheckpointError(
                f"{self.out} needs {todo * density / 1e9:.1f} GB more but its disk has {free / 1e9:.1f} GB free; "
                f"free some, or choose a folder on another disk"
            )

    def _abandon(self) -> None:
        """Leave nothing behind of a job that has written nothing yet."""
        if not self.done and not any(path.name != JOURNAL for path in self.partial.iterdir()):
            (self.partial / JOURNAL).unlink()
            self.partial.rmdir()

    def total(self, verify: bool) -> int:
        return (2 if verify else 1) * sum(shard.nbytes for shard in self.shards)

    def write_shard(self, shard: PlannedShard, verify: bool, bar: tqdm) -> None:
        if shard.file in self.done:
            bar.update((2 if verify else 1) * shard.nbytes)
            return
        final = self.partial / shard.file
        part = final.with_name(final.name + ".part")
        final.parent.mkdir(parents=True, exist_ok=True)
        prefix, recipes = shard.layout()
        size = len(prefix) + shard.nbytes
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_tensors(file, prefix, recipes, bar)
            os.ftruncate(file, size)
            os.fsync(file)
            if verify:
                # Drop the cached pages, so that what is compared comes from the disk.
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                _verify_tensors(file, part, prefix, recipes, bar)
        finally:
            os.close(file)
        os.rename(part, final)
        _sync_folder(final.parent)
        self._note({"shard": shard.file, "bytes": size})

    def finish(self, files: Mapping[str, bytes | Path]) -> None:
        names = sorted(files, key=lambda name: (name == INDEX_NAME, name))
        for name in names:
            content, final = files[name], self.partial / name
            part = final.with_name(final.name + ".part")
            final.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, part)
            else:
                part.write_bytes(content)
            _sync_file(part)
            os.rename(part, final)
        for leftover in self.partial.rglob("*.part"):
            leftover.unlink()
        _sync_folder(self.partial)
        if self.out.is_dir():
            self.out.rmdir()
        os.rename(self.partial, self.out)
        _sync_folder(self.out.parent)
        (self.out / JOURNAL).unlink()

    def close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None


def _write_tensors(file: int, prefix: bytes, recipes: Sequence[Recipe], bar: tqdm) -> None:
    _write_all(file, prefix, 0)
    at = len(prefix)
    for recipe in recipes:
        end = at + recipe.spec.nbytes
        for chunk in recipe.chunks():
            size = chunk if isinstance(chunk, int) else len(chunk)
            if not isinstance(chunk, int) and not is_zero(chunk):
                _write_all(file, chunk, at)
            at += size
            bar.update(size)
        if at != end:
            raise CheckpointError(f"{recipe.spec.name}: its sources gave {at - end:+d} bytes; the input is damaged")


def _verify_tensors(file: int, path: Path, prefix: bytes, recipes: Sequence[Recipe], bar: tqdm) -> None:
    if os.pread(file, len(prefix), 0) != prefix:
        raise CheckpointError(f"{path}: the header reads back differently from what was written; check the disk")
    at = len(prefix)
    for recipe in recipes:
        for chunk in recipe.chunks():
            size = chunk if isinstance(chunk, int) else len(chunk)
            if not _reads_as(file, at, chunk):
                raise CheckpointError(
                    f"{path}: tensor {recipe.spec.name} reads back differently from its source; check the disk and "
                    f"run the command again"
                )
            at += size
            bar.update(size)


def _reads_as(file: int, at: int, chunk: Chunk) -> bool:
    if not isinstance(chunk, int):
        return chunk == _read_all(file, len(chunk), at)
    end = at + chunk
    while at < end:
        length = hole_length(file, at, end - at) or min(CHUNK, end - at)
        if not hole_length(file, at, 1) and not is_zero(_read_all(file, length, at)):
            return False
        at += length
    return True


def is_zero(chunk: bytearray) -> bool:
    """Whether all bytes are zero (by memcmp, which stops at the first other byte)."""
    return not any(chunk[:512]) and chunk == bytes(len(chunk))


def _write_all(file: int, data: bytes | bytearray, at: int | None) -> None:
    view = memoryview(data)
    while view:
        written = os.write(file, view) if at is None else os.pwrite(file, view, at)
        at = None if at is None else at + written
        view = view[written:]


def _read_all(file: int, length: int, at: int) -> bytearray:
    buffer = bytearray(length)
    view, done = memoryview(buffer), 0
    while done < length and (got := os.preadv(file, [view[done:]], at + done)):
        done += got
    return buffer


def _fingerprint(shards: Sequence[PlannedShard], sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        stat = source.stat()
        digest.update(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for shard in shards:
        digest.update(f"{shard.file} {len(shard.prefix or b'')} {sorted(shard.metadata.items())}\n".encode())
        for recipe in shard.recipes:
            spec = recipe.spec
            digest.update(f"{spec.name} {spec.dtype} {spec.shape} {recipe.describe()}\n".encode())
    return digest.hexdigest()


def _whole_lines(journal: Path) -> list[bytes]:
    """The journal's lines up to the last newline: a kill may have cut the one after it."""
    return journal.read_bytes().split(b"\n")[:-1]


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _explain(error: OSError, partial: Path) -> CheckpointError:
    kept = f"what is done stays in {partial.name}, and the same command continues it"
    where = error.filename or partial
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(f"{where}: the disk, quota or file size limit is full ({error.strerror}); {kept}")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return CheckpointError(f"{where} cannot be written ({error.strerror}); choose another folder")
    return CheckpointError(f"{where}: {error.strerror}; {kept}")
