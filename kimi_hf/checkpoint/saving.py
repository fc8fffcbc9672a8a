"""A save that is there whole or not at all: written beside its place, then put there by renaming."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import logging

from .shards import INDEX_NAME, with_variant

logger = logging.get_logger(__name__)
# Nothing loads a folder without these, so they leave first and come last: a kill in between is never a mixed model.
_MARKERS = ("config.json", "adapter_config.json")


@contextmanager
def written_whole(target: str | os.PathLike, variant: str | None = None) -> Iterator[Path]:
    """A folder to write into, whose files take their places in `target` when the block ends without an error.

    Until then `target` is as it was, and after an error too. Other files in `target` stay; shards and index of an earlier
    save of the same `variant` go. If `target` does not exist it appears at once, complete. If it does, its files are
    exchanged one after another, which takes a moment: a kill in that moment leaves `target` without config.json, and both
    the old and the new files in the hidden folder beside it.

    Raises:
        NotADirectoryError: `target` is a file.
        PermissionError: it cannot be written to (told before anything is). OSError: a full disk, and the like.
    """
    if Path(target).is_file():
        raise NotADirectoryError(f"save_pretrained: {target} is a file; name a folder")
    place = Path(os.path.realpath(target))  # behind a link, so that the link stays
    place.parent.mkdir(parents=True, exist_ok=True)
    parent = _workplace(place)
    for left in sorted(parent.glob(f".{place.name}.partial-*")):
        logger.warning("%s was left by a save that was interrupted; it can be deleted unless one is running", left)
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=parent))
    new, old = partial / "new", partial / "old"
    try:
        new.mkdir()
        old.mkdir()
        yield new
        _put(new, old, place, variant)
        shutil.rmtree(old, ignore_errors=True)
    except SafetensorError as error:  # which is how the format's writer reports a full disk
        raise OSError(
            f"save_pretrained: {target} was not written ({error}); what was there before is untouched"
        ) from error
    finally:
        if not old.exists() or not any(old.iterdir()):
            shutil.rmtree(partial, ignore_errors=True)


def _workplace(place: Path) -> Path:
    """Where to write: beside `place`, or within it if it lies on a file system of its own or its parent is read-only."""
    if not place.exists():
        return place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"save_pretrained: {place} cannot be written to")
    same = _device(place) == _device(place.parent)
    return place.parent if same and os.access(place.parent, os.W_OK | os.X_OK) else place


def told_of_interrupted_save(folder: Path) -> str:
    """What an error about `folder` should add if a save was killed while it exchanged files; usually nothing."""
    place = Path(os.path.realpath(folder))
    for parent in (place.parent, place):
        for partial in parent.glob(f".{place.name}.partial-*"):
            if (partial / "old" / "config.json").exists():
                return (
                    f". A save was interrupted while it exchanged files: those that were there lie in {partial / 'old'}, "
                    f"the new ones in {partial / 'new'} and, as far as they had come, in the folder itself"
                )
    return ""


def _device(folder: Path) -> int:
    return folder.stat().st_dev


def _put(new: Path, old: Path, place: Path, variant: str | None) -> None:
    """Move all of `new` into `place`, and what it replaces into `old`; an error brings everything back."""
    if not place.exists():
        new.rename(place)
        return
    arriving = {path.name for path in new.iterdir()}
    leaving = {path.name for path in place.iterdir()} & (arriving | _stale(arriving, place, variant))
    moves = [(place / name, old / name) for name in sorted(leaving, key=lambda name: name not in _MARKERS)]
    moves += [(new / name, place / name) for name in sorted(arriving, key=lambda name: name in _MARKERS)]
    try:
        for here, there in moves:
            here.rename(there)
    except BaseException:
        for here, there in reversed(moves):
            if os.path.lexists(there) and not os.path.lexists(here):
                there.rename(here)
        raise


def _stale(arriving: set[str], place: Path, variant: str | None) -> set[str]:
    """Weights of an earlier save of `variant` in `place`, if the new one brings weights."""
    stem = re.escape(f"model.{variant}" if variant else "model")
    weights = re.compile(rf"{stem}(-\d+-of-\d+)?\.safetensors")
    if not any(weights.fullmatch(name) for name in arriving):
        return set()
    found = {path.name for path in place.iterdir() if weights.fullmatch(path.name)}
    return found | {with_variant(INDEX_NAME, variant)}
