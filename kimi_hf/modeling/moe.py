"""Mixture of experts: router, fused experts, and the block around them at full width or in a latent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

from ..ops.grouped_experts import grouped_experts
from ..ops.router import route
from .feed_forward import KimiMLP, gated_activation
from .norms import KimiRMSNorm


class KimiRouter(nn.Module):
    """Scores every expert from the full-width input, in fp32; the correction bias only selects.

    `weight` (E, D) is a parameter rather than a Linear, so that adapters on "all-linear" leave routing alone.
    `e_score_correction_bias` (E,) is a buffer: no optimiser and no weight decay ever touches it.
    """

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.top_k = config.num_experts_per_token
        self.activation = config.moe_router_activation_func
        self.num_groups = config.num_expert_group
        self.topk_groups = config.topk_group
        self.renormalize = config.moe_renormalize
        self.scaling = config.routed_scaling_factor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (N, D) -> logits (N, E), weights (N, k), experts (N, k) int64; logits and weights in fp32."""
        indices, weights, logits = route(
            hidden,
            self.weight,
            self.e_score_correction_bias,
            top_k=self.top_k,
            activation=self.activation,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            renormalize=self.renormalize,
            scaling=self.scaling,
        )
        return logits, weights, indices


@use_experts_implementation
class KimiExperts(nn.Module):
    """All routed experts of a layer in two tensors: `gate_up_proj` (E, 2F, Z) = [w1; w3], `down_proj` (E, Z, F) = w2.

    The fused names are what transformers' experts implementations, PEFT's `target_parameters` and the parallel plans
    work on; a checkpoint's per-expert w1, w3, w2 are stacked on loading and taken apart again on saving.
    """

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.routed_expert_hidden_size or config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        self.act = gated_activation(config)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """(..., 2F) -> (..., F)."""
        return self.act.glu(gate_up)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Plain form, one slice per expert that was chosen: the definition the faster implementations are held to.

        Args:
            hidden_states: (N, Z). top_k_index: (N, k). top_k_weights: (N, k) fp32.
        Returns:
            (N, Z); expert outputs in the activation dtype, weighted and summed in fp32, one cast.
        """
        out = top_k_weights.new_zeros(hidden_states.shape)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self.num_experts:
                continue
            token, slot = torch.where(top_k_index == expert)
            inner = self._apply_gate(nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]))
            y = nn.functional.linear(inner, self.down_proj[expert])
            out = out.index_add(0, token, y * top_k_weights[token, slot, None])
        return out.to(hidden_states.dtype)


EXPERTS_IMPLEMENTATION = "kimi"


def grouped_experts_forward(
    experts: KimiExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`KimiExperts.forward` by our own operation: pairs sorted once, a token costs k experts, lean backward.

    It is what the models use unless `experts_implementation=` names another ("eager" is the plain form).
    """
    return grouped_experts(
        hidden_states, top_k_index, top_k_weights, experts.gate_up_proj, experts.down_proj, experts._apply_gate
    )


ExpertsInterface.register(EXPERTS_IMPLEMENTATION, grouped_experts_forward)

_build_experts: ContextVar[Callable[..., nn.Module]] = ContextVar("build_experts", default=KimiExperts)


@contextmanager
def experts_built_by(build: Callable[..., nn.Module]) -> Iterator[None]:
    """Within, new models get their routed experts from `build(config)`: a module with the same call as `KimiExperts`."""
    token = _build_experts.set(build)
    try:
        yield
    finally:
        _build_experts.reset(token)


class KimiSparseMoeBlock(nn.Module):
    """Routed experts plus shared experts; with `routed_expert_hidden_size` the routed ones live in a latent (LatentMoE).

    y = up(norm(sum_e w_e expert_e(down(x)))) + shared(x), router and shared experts reading the full-width x.
    Source: Kimi K3 release, `KimiSparseMoeBlock`.
    """

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        latent = config.routed_expert_hidden_size
        self.gate = KimiRouter(config)
        self.experts = _build_experts.get()(config)
        self.shared_experts = None
        if config.num_shared_experts:
            self.shared_experts = KimiMLP(config, width, config.moe_intermediate_size * config.num_shared_experts)
        self.routed_expert_down_proj = self.routed_expert_up_proj = self.routed_expert_norm = None
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(width, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, width, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = KimiRMSNorm(latent, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, indices = self.gate(x)
        z = x if self.routed_expert_down_proj is None else self.routed_expert_down_proj(x)
        y = self.experts(z, indices, weights)
        if self.routed_expert_norm is not None:
            y = self.routed_expert_norm(y)
        if self.routed_expert_up_proj is not None:
            y = self.routed_expert_up_proj(y)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y.view(hidden_states.shape)
