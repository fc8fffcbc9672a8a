"""What a mixture of experts can be: the fields that `KimiLinearConfig` and `LadderConfig` share."""

from typing import Any

from ..errors import ConfigError
from .checks import one_of, optional_int, positive_float, positive_int, switch

ROUTER_ACTIVATIONS = ("sigmoid", "softmax")


def check_routing(c: Any) -> None:
    """Raise `ConfigError` if the experts of configuration `c` cannot be built, or its router cannot choose."""
    for name in ("num_experts", "num_experts_per_token", "moe_intermediate_size", "num_expert_group", "topk_group"):
        positive_int(name, getattr(c, name))
    optional_int("num_shared_experts", c.num_shared_experts, minimum=0)
    optional_int("routed_expert_hidden_size", c.routed_expert_hidden_size)
    positive_float("routed_scaling_factor", c.routed_scaling_factor)
    one_of("moe_router_activation_func", c.moe_router_activation_func, ROUTER_ACTIVATIONS)
    switch("moe_renormalize", c.moe_renormalize)
    if c.num_experts_per_token > c.num_experts:
        raise ConfigError(
            f"num_experts_per_token ({c.num_experts_per_token}) is more than num_experts ({c.num_experts}); lower it, or give "
            "more experts"
        )
    _check_groups(c.num_experts, c.num_experts_per_token, c.num_expert_group, c.topk_group)


def _check_groups(experts: int, chosen: int, groups: int, kept: int) -> None:
    if experts % groups:
        raise ConfigError(f"num_expert_group ({groups}) does not divide num_experts ({experts}); give a divisor")
    if kept > groups:
        raise ConfigError(f"topk_group ({kept}) is more than num_expert_group ({groups}); lower it")
    size = experts // groups
    if groups > kept and size < 2:
        raise ConfigError(
            f"num_expert_group ({groups}) leaves {size} expert a group, which is scored by its two best; give fewer groups"
        )
    if kept * size < chosen:
        raise ConfigError(
            f"topk_group ({kept}) keeps {kept * size} of num_experts ({experts}), fewer than num_experts_per_token ({chosen}); "
            "keep more groups"
        )
