"""A stack of packed matrices that other operations take in place of a dense one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hf.ops.mxfp4 import unpack


@dataclass(frozen=True)
class PackedWeight:
    """E matrices [out, in] in MXFP4: packed [E, out, in / 2] and scale [E, out, in / 32], both uint8, constant."""

    packed: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, out, in), as of the dense stack."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    def dense(self, expert: int, rows: slice, dtype: torch.dtype) -> Tensor:
        """`rows` of one matrix, unpacked to `dtype`."""
        return unpack(self.packed[expert, rows], self.scale[expert, rows], dtype, check=False)
