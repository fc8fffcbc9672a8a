"""Bytes of open files by position: errors for files that end early or change, instead of the faults of a memory map."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kimi_hf.errors import CheckpointError

IOV_LIMIT = 512  # ranges a call to the kernel takes at most (IOV_MAX is 1024)


class OpenFiles:
    """Files opened for reading, each once, on first use.

    With `watched`, a file that has another size or modification time than at `remember` is refused: somebody wrote
    into it, or put another in its place, and byte ranges read from its header may mean something else now.
    """

    def __init__(self, watched: bool = False):
        self._open: dict[Path, int] = {}
        self._known: dict[Path, tuple[int, int]] | None = {} if watched else None

    def remember(self, path: Path) -> None:
        """Open a file that will be read later, and note what it looks like now."""
        stat = os.fstat(self.descriptor(path))
        self._known[path] = (stat.st_size, stat.st_mtime_ns)

    def descriptor(self, path: Path) -> int:
        """Raises: OSError."""
        if path not in self._open:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if self._open.setdefault(path, file) != file:  # another thread was faster
                os.close(file)
        return self._open[path]

    def read_into(self, path: Path, offset: int, buffers: Sequence[memoryview], name: str) -> None:
        """Fill `buffers`, one after another, with the bytes from `offset` on; `name` of the tensor is for messages.

        Raises: CheckpointError if the file ends early, has changed, is gone, or the disk reports an error.
        """
        try:
            file = self.descriptor(path)
            if self._known is not None:
                self._check(path, file)
            for part in _portions(buffers):
                while part:
                    got = os.preadv(file, part, offset)
                    if got == 0:
                        raise CheckpointError(f"{path}: ends inside tensor {name}; fetch the file again")
                    offset += got
                    part = _after(part, got)
        except OSError as error:
            raise CheckpointError(f"{path}: reading tensor {name}: {error.strerror}") from error

    def _check(self, path: Path, file: int) -> None:
        stat = os.fstat(file)
        size, modified = self._known[path]
        if stat.st_size != size:
            raise CheckpointError(
                f"{path}: had {size} bytes when it was opened and has {stat.st_size} now; fetch the file again and load "
                "the model anew"
            )
        if stat.st_mtime_ns != modified:
            raise CheckpointError(
                f"{path}: has been written to since it was opened, so its tensors may be others; load the model anew"
            )

    def close(self) -> None:
        while self._open:
            self._close(self._open.popitem()[1])

    _close = staticmethod(os.close)  # at hand when the interpreter has taken the modules apart

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return {"_open": {}, "_known": self._known}


def _portions(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    for start in range(0, len(buffers), IOV_LIMIT):
        yield [buffer for buffer in buffers[start : start + IOV_LIMIT] if len(buffer)]


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` when `done` bytes have gone into them."""
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[at + 1 :]]
        done -= len(buffer)
    return []
