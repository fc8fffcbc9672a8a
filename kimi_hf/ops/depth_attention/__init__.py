"""Attention over depth (Block AttnRes): a softmax over sealed blocks and the open block, per token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["depth_attention", "inverse_rms"]

OPERATION = Operation(
    "depth_attention",
    Backend("reference", "kimi_hf.ops.depth_attention.reference", "depth_attention_reference"),
    Backend("eager", "kimi_hf.ops.depth_attention.eager", "depth_attention_eager"),
    Backend("triton", "kimi_hf.ops.depth_attention.kernels", "depth_attention_triton", kernel_limits.depth),
)
INVERSE_RMS = Operation(
    "inverse_rms",
    Backend("reference", "kimi_hf.ops.depth_attention.reference", "inverse_rms_reference"),
    Backend("eager", "kimi_hf.ops.depth_attention.eager", "inverse_rms_eager"),
    Backend("triton", "kimi_hf.ops.depth_attention.kernels", "inverse_rms_triton", kernel_limits.row),
)


def depth_attention(
    bank: Sequence[Tensor] | Tensor,
    inv_rms: Tensor,
    prefix: Tensor,
    weight: Tensor,
    *,
    eps: float,
    backend: str | None = None,
) -> Tensor:
    """h = sum_j P_j v_j with P = softmax_j(v_j . w / rms(v_j)) over the sealed blocks v_0 .. v_{M-1} and v_M = prefix.

    Scores, softmax and sum are fp32 (fp64 for fp64), one cast at the end. `inv_rms` is an input of its own: gradients
    of the scores through 1 / rms(v_j) of a *sealed* block flow into `inv_rms`, and from there into the block through
    `inverse_rms`, which every later reader of the block shares; do not detach it. The prefix's own inverse RMS is
    computed and differentiated inside.

    Args:
        bank: M sealed blocks [B, T, D], as a sequence or one tensor [M, B, T, D]; M = 0 returns prefix unchanged.
        inv_rms: [M, B, T] fp32, `inverse_rms(block, eps)` of each, made once when the block was sealed.
        prefix: [B, T, D], the running sum of the open block.
        weight: [D] fp32, norm.weight * proj.weight of the reading sub-layer.
        eps: added to the mean of squares of the prefix, as for the sealed blocks.
        backend: None for automatic.
    Returns: [B, T, D] in prefix.dtype.
    Raises: ShapeError for shapes or dtypes; BackendError when a named backend cannot serve.
    Source: kimi_k3.md 2.3.
    """
    if len(bank) == 0:
        return prefix
    checks.require_rank("depth_attention", "prefix", prefix, 3, "[B, T, D]")
    checks.require_shape("depth_attention", "weight", weight, prefix.shape[-1:], "[D]")
    checks.require_shape("depth_attention", "inv_rms", inv_rms, (len(bank), *prefix.shape[:2]), "[M, B, T]")
    if isinstance(bank, Tensor):
        checks.require_shape("depth_attention", "bank", bank, (len(bank), *prefix.shape), "[M, B, T, D]")
        checks.require_floating("depth_attention", prefix=prefix, inv_rms=inv_rms, weight=weight, bank=bank)
    else:
        for i, block in enumerate(bank):
            checks.require_shape("depth_attention", f"bank[{i}]", block, prefix.shape, "[B, T, D]")
        checks.require_floating("depth_attention", prefix=prefix, inv_rms=inv_rms, weight=weight)
    with no_autocast(prefix):
        return OPERATION.pick(prefix, backend, blocks=len(bank))(bank, inv_rms, prefix, weight, eps=eps)


def inverse_rms(x: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """1 / sqrt(mean_D(x^2) + eps): x [..., D] -> [...] in fp32 (fp64 for fp64), differentiable."""
    checks.require_floating("inverse_rms", x=x)
    with no_autocast(x):
        return INVERSE_RMS.pick(x, backend)(x, eps)
