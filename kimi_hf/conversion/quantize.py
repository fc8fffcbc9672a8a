"""`kimi_hf.quantize`: routed experts to MXFP4, of a model in memory or of a checkpoint folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_hf.conversion.convert import convert
from kimi_hf.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def quantize(
    model_or_folder: nn.Module | str | os.PathLike,
    out: str | os.PathLike | None = None,
    *,
    max_shard_bytes: int | None = None,
    keep_original: bool = False,
    verify: bool = True,
) -> nn.Module | Path:
    """Pack the routed experts: round to nearest, with the E8M0 scales that compressed-tensors computes.

    Weights that already lie on an MXFP4 grid keep their values exactly.

    Args:
        model_or_folder: a model, whose experts are packed in place; or a checkpoint folder, which is written anew shard
            by shard to `out`, without a model and in a few hundred MB of memory. An interrupted job goes on when it is
            called again (see docs/conversion.md).
        out: for a folder only, the new folder.
        max_shard_bytes, keep_original, verify: for a folder only, see `kimi_hf.conversion.convert.convert`.
    Returns: the model, or `out`.
    Raises:
        ConfigError: a folder without `out`, a model with it, or experts that stay on disk.
        ShapeError: a model with expert widths that are no multiples of 32, or weights that are not finite.
        CheckpointError: a damaged folder, weights that are not finite, an `out` that exists or cannot be written.
    """
    if isinstance(model_or_folder, (str, os.PathLike)):
        if out is None:
            raise ConfigError(
                f"quantize({str(model_or_folder)!r}) writes a new folder: give its name as the second argument"
            )
        return convert(
            model_or_folder,
            out,
            "packed",
            max_shard_bytes=max_shard_bytes,
            keep_original=keep_original,
            verify=verify,
        )
    if out is not None:
        raise ConfigError(
            "quantize packs a model in place; leave the second argument out and save_pretrained afterwards"
        )
    from kimi_hf.quantization import quantize as in_place

    return in_place(model_or_folder)
