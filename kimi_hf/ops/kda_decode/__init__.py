"""One token through the core of a KDA mixer: convolutions, recurrence and gated norm over states updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks, kernel_limits
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["kda_decode"]

OPERATION = Operation(
    "kda_decode",
    Backend("reference", "kimi_hf.ops.kda_decode.reference", "kda_decode_reference"),
    Backend("eager", "kimi_hf.ops.kda_decode.eager", "kda_decode_eager"),
    Backend("triton", "kimi_hf.ops.kda_decode.kernels", "kda_decode_triton", kernel_limits.decode),
)


@torch.no_grad()
def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Tensor,
    window: Tensor,
    state: Tensor,
    *,
    conv_weights: tuple[Tensor, Tensor, Tensor],
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = None,
    norm_weight: Tensor,
    eps: float,
    real: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`short_conv` of q, k and v, `kda` and `gated_norm` for one token of each of N sequences, without gradients.

    Args:
        q, k: [N, H*K], v: [N, H*V], raw projections, before the convolution.
        g: [N, H*K] decay logits. beta: [N, H] write logits. gate: [N, H*V] output-gate logits.
        window: [N, 2*H*K + H*V, W], the last W raw inputs [q; k; v], oldest first; contiguous; updated in place.
        state: [N, H, K, V], fp32, contiguous; updated in place.
        conv_weights: of q, k and v, [channels, W] or [channels, 1, W].
        A_log: [H]. dt_bias: [H*K]. lower_bound: None (softplus gate) or a negative number.
        norm_weight: [V]. eps: of the norm.
        real: bool [N], rows whose token is no padding; None for all. Padding changes no memory, and its output is 0.
        backend: None for automatic.
    Returns: [N, H*V] in gate.dtype.
    Raises: ShapeError for shapes or layouts; BackendError when a named backend cannot serve.
    Numerics: rounded where the separate operations round: after the convolution, after the recurrence, at the end.
    """
    checks.require_rank("kda_decode", "state", state, 4, "(N, H, K, V)")
    N, H, K, V = state.shape
    shapes = {
        "q": (q, H * K),
        "k": (k, H * K),
        "v": (v, H * V),
        "g": (g, H * K),
        "beta": (beta, H),
        "gate": (gate, H * V),
    }
    for name, (tensor, width) in shapes.items():
        checks.require_shape("kda_decode", name, tensor, (N, width), "(N, channels)")
    checks.require_shape("kda_decode", "window", window, (N, 2 * H * K + H * V, *window.shape[2:3]), "(N, channels, W)")
    for name, tensor in (("window", window), ("state", state)):
        if not tensor.is_contiguous():
            raise ShapeError(
                f"kda_decode: {name} has strides {tensor.stride()}, expected a contiguous tensor to update"
            )
    checks.require_floating("kda_decode", q=q, k=k, v=v, g=g, beta=beta, gate=gate, window=window, state=state)
    if real is not None:
        checks.require_shape("kda_decode", "real", real, (N,), "(N,)")
    run = OPERATION.pick(q, backend, head_dim=K, value_dim=V, window=window, state=state)
    return run(
        q,
        k,
        v,
        g,
        beta,
        gate,
        window,
        state,
        conv_weights=conv_weights,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        norm_weight=norm_weight,
        eps=eps,
        real=real,
    )
