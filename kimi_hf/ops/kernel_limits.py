"""What the Triton kernels accept, in words. Imported by the operations' tables, so it never imports triton itself.

Each function has the signature `dispatch.Backend.why_not` wants: the call's first tensor and the operation's facts in,
None or the reason out.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST_ROW = 8192  # a row is held in registers
MOST_SEALED_BLOCKS = 16  # one pointer each; Kimi K3 has 8
WIDEST_HEAD = 256  # the state of a head is held in registers
MOST_QUERIES = 16  # of latent attention; longer ones are cheaper in the direct form
WIDEST_RANK = 512  # a sum of latents a head is held in registers
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


def decode(
    tensor: Tensor, *, head_dim: int, value_dim: int, window: Tensor, state: Tensor, **facts: object
) -> str | None:
    """For the fused KDA step."""
    if window.dtype != tensor.dtype or state.dtype != torch.float32:
        return f"it wants a window of q's {tensor.dtype} and an fp32 state, not {window.dtype} and {state.dtype}"
    return heads(tensor, head_dim=head_dim, value_dim=value_dim)


def absorbed(
    tensor: Tensor, *, form: str | None, need_weights: bool, rank: int, needs_grad: bool, **facts: object
) -> str | None:
    """For latent attention: the absorbed form, for short queries without gradients; tensor is q_nope [B, T, A, n]."""
    if form == "direct" or need_weights:
        return "the kernel computes the absorbed form, without the probabilities"
    if needs_grad:
        return "the kernel has no gradients; it is for decoding"
    if tensor.shape[1] > MOST_QUERIES:
        return f"there are {tensor.shape[1]} queries a row, the kernel is for up to {MOST_QUERIES}"
    if rank > WIDEST_RANK:
        return f"the latent has rank {rank}, the kernel holds {WIDEST_RANK}"
    return dtype(tensor)


def packed(tensor: Tensor, *, is_packed: bool, **facts: object) -> str | None:
    """For products with MXFP4 matrices."""
    if not is_packed:
        return "the matrices are dense, torch's grouped product serves those"
    return dtype(tensor)


def fla_kda(tensor: Tensor, *, head_dim: int, value_dim: int, lower_bound: float | None, **facts: object) -> str | None:
    """For flash-linear-attention's KDA kernels."""
    if lower_bound is not None and lower_bound < -5:
        return f"the gate's bound is {lower_bound}, fla takes -5 to 0"
    return heads(tensor, head_dim=head_dim, value_dim=value_dim)
