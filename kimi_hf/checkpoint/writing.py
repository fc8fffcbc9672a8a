"""The start of a safetensors file, for those who write its tensors one after another."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping

from kimi_hf.checkpoint.layout import TensorSpec


def build_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length word, JSON and padding to 8 bytes for tensors that follow each other in this order."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for spec in specs:
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
