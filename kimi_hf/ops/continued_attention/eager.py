"""Attention after a past in two fused calls."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kimi_hf.ops import checks
from kimi_hf.ops.continued_attention.reference import continued_attention_reference


def continued_attention_eager(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """See `kimi_hf.ops.continued_attention.continued_attention`."""
    if q.device.type != "cpu":
        return continued_attention_reference(q, k, v, scale=scale)
    past, width, v_width = k.shape[2] - q.shape[2], q.shape[3], v.shape[3]
    # The kernel wants values as wide as keys; zero columns change nothing.
    both = max(width, v_width)
    q, k, v = (x if x.shape[3] == both else pad(x, (0, both - x.shape[3])) for x in (q, k, v))
    new, new_norm = _attend(q, k[:, :, past:], v[:, :, past:], True, scale)
    if past:
        old, old_norm = _attend(q, k[:, :, :past], v[:, :, :past], False, scale)
        share = torch.sigmoid(old_norm - new_norm)[..., None]  # z1 / (z1 + z2) of their logarithms
        wide = checks.compute_dtype(q.dtype)
        new = torch.lerp(new.to(wide), old.to(wide), share.to(wide)).to(q.dtype)
    return new[..., :v_width].transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, A, T, d] and the logarithm of the softmax's normaliser [B, A, T]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
