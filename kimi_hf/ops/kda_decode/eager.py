"""The KDA step in plain PyTorch: its three operations one after the other."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.ops.kda_decode.reference import three_operations


def kda_decode_eager(*inputs: Tensor, **options) -> Tensor:
    """See `kimi_hf.ops.kda_decode.kda_decode`."""
    return three_operations(*inputs, **options, backend="eager")
