"""What the Triton kernels accept, in words. Imported by the operations' tables, so it never imports triton itself.

Each function has the signature `dispatch.Backend.why_not` wants: the call's first tensor and the operation's facts in,
None or the reason out.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST_ROW = 16384  # a row is held in registers
MOST_SEALED_BLOCKS = 16  # one pointer each; Kimi K3 has 8
WIDEST_HEAD = 256  # the state of a head is held in registers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dtype(tensor: Tensor, **facts: object) -> str | None:
    """Kernels compute in fp32, so fp64 stays with plain PyTorch."""
    if tensor.dtype not in DTYPES:
        return f"the kernels take fp32, bf16 and fp16, not {tensor.dtype}"
    return None


def row(tensor: Tensor, **facts: object) -> str | None:
    """For kernels that hold whole rows."""
    if tensor.shape[-1] > WIDEST_ROW:
        return f"rows are {tensor.shape[-1]} wide, the kernel holds {WIDEST_ROW}"
    return dtype(tensor)


def depth(tensor: Tensor, *, blocks: int, **facts: object) -> str | None:
    """For attention over depth."""
    if blocks > MOST_SEALED_BLOCKS:
        return f"there are {blocks} sealed blocks, the kernel reads {MOST_SEALED_BLOCKS}"
    return row(tensor)


def heads(tensor: Tensor, *, head_dim: int, value_dim: int, **facts: object) -> str | None:
    """For the recurrent mixers."""
    if max(head_dim, value_dim) > WIDEST_HEAD:
        return f"heads are {head_dim} x {value_dim}, the kernels hold {WIDEST_HEAD}"
    return dtype(tensor)
