"""The router of a mixture of experts: scores, biased selection, unbiased weights."""

from __future__ import annotations

from torch import Tensor

from kimi_hf.errors import ShapeError
from kimi_hf.ops import checks
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.dispatch import Backend, Operation

__all__ = ["route"]

ACTIVATIONS = ("sigmoid", "softmax")
OPERATION = Operation(
    "router",
    Backend("reference", "kimi_hf.ops.router.reference", "route_reference"),
    Backend("eager", "kimi_hf.ops.router.eager", "route_eager"),
)


def route(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    activation: str = "sigmoid",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose `top_k` experts a token by s + bias and weigh them by s, where s = act(hidden weight^T), all in fp32.

    With num_groups > topk_groups the experts stand in `num_groups` equal contiguous groups; a group's score is the sum
    of its two largest s + bias, and only experts of the best `topk_groups` groups can be chosen.

    Args:
        hidden: [N, D], any floating dtype.
        weight: [E, D], one row an expert.
        bias: [E] or None; fp32, decides the choice only and gets no gradient.
        top_k: experts a token.
        activation: "sigmoid" or "softmax" (over the experts).
        num_groups, topk_groups: group-limited choice; off unless num_groups > topk_groups.
        renormalize: divide the chosen weights by their sum (+1e-20) when top_k > 1.
        scaling: final factor of the weights.
        backend: None for automatic.
    Returns: indices [N, top_k] int64 (in no particular order), weights [N, top_k] and logits [N, E], both fp32 (fp64
        for fp64 hidden). Weights and logits are differentiable in hidden and weight.
    Raises: ShapeError for shapes, dtypes or impossible counts; BackendError when a named backend cannot serve.
    Source: kimi_k3.md 5.3.
    """
    checks.require_rank("route", "hidden", hidden, 2, "[N, D]")
    checks.require_rank("route", "weight", weight, 2, "[E, D]")
    num_experts = weight.shape[0]
    checks.require_shape("route", "weight", weight, (num_experts, hidden.shape[1]), "[E, D]")
    if bias is not None:
        checks.require_shape("route", "bias", bias, (num_experts,), "[E]")
    checks.require_floating("route", hidden=hidden, weight=weight, **({} if bias is None else {"bias": bias}))
    if activation not in ACTIVATIONS:
        raise ShapeError(f"route: activation is {activation!r}, expected one of {ACTIVATIONS}")
    grouped = num_groups > topk_groups
    if grouped and (topk_groups < 1 or num_experts % num_groups):
        raise ShapeError(
            f"route: {num_experts} experts in {num_groups} groups, keeping {topk_groups}; expected equal groups and at "
            "least one kept group"
        )
    selectable = num_experts // num_groups * topk_groups if grouped else num_experts
    if not 1 <= top_k <= selectable:
        raise ShapeError(f"route: top_k is {top_k}, expected between 1 and {selectable}, the experts open to a token")
    with no_autocast(hidden):
        return OPERATION.pick(hidden, backend)(
            hidden,
            weight,
            bias,
            top_k=top_k,
            activation=activation,
            groups=(num_groups, topk_groups) if grouped else None,
            renormalize=renormalize,
            scaling=scaling,
        )
