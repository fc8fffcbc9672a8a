"""Routed experts that stay in MXFP4: half a byte a weight plus a scale byte for 32, unpacked a block at a time."""

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from ..checkpoint.key_maps import own_key_maps
from ..modeling.disk_experts import refuse_experts_on_disk
from ..modeling.moe import KimiExperts
from ..ops.grouped_experts import grouped_experts
from ..ops.mxfp4 import GROUP, pack, unpack
from ..ops.mxfp4.packed import PackedWeight


class KimiPackedExperts(nn.Module):
    """The experts of a layer as packed bytes; the same call as `KimiExperts`.

    `gate_up_proj_packed` (E, 2F, Z/2), `gate_up_proj_scale` (E, 2F, Z/32), `down_proj_packed` (E, Z, F/2),
    `down_proj_scale` (E, Z, F/32), all uint8 and frozen. Gradients flow to the inputs and the routing weights.
    """

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.routed_expert_hidden_size or config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.act = None
        shapes = {
            "gate_up_proj": (self.num_experts, 2 * self.intermediate_dim, self.hidden_dim),
            "down_proj": (self.num_experts, self.hidden_dim, self.intermediate_dim),
        }
        for name, (experts, rows, columns) in shapes.items():
            for suffix, width in (("packed", columns // 2), ("scale", columns // GROUP)):
                empty = torch.empty(experts, rows, width, dtype=torch.uint8)
                self.register_parameter(f"{name}_{suffix}", nn.Parameter(empty, requires_grad=False))

    @classmethod
    def shaped_like(cls, experts: KimiExperts, config) -> "KimiPackedExperts":
        """Empty packed experts in place of `experts`, on its device and with its activation."""
        with torch.device(experts.gate_up_proj.device):
            packed = cls(config)
        packed.act = experts.act
        return packed

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (N, Z), experts (N, k), weights (N, k) fp32 -> (N, Z). Only experts that were chosen are unpacked."""
        gate_up = PackedWeight(self.gate_up_proj_packed, self.gate_up_proj_scale)
        down = PackedWeight(self.down_proj_packed, self.down_proj_scale)
        return grouped_experts(hidden_states, top_k_index, top_k_weights, gate_up, down, self._apply_gate)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """(..., 2F) -> (..., F)."""
        return self.act.glu(gate_up)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts in MXFP4, {self.hidden_dim} -> {self.intermediate_dim}"


def quantize(model: nn.Module) -> nn.Module:
    """Pack the routed experts of a model in place (round to nearest, scales as compressed-tensors computes them).

    Weights that already lie on the MXFP4 grid keep their values exactly.

    Raises:
        ShapeError: expert widths that are not multiples of 32, or weights that are not finite.
        ConfigError: a model whose experts are on disk.
    """
    from .configuration import KimiMxfp4Config

    refuse_experts_on_disk(model, "quantize")
    text = model.config.get_text_config()
    for name, experts in modules_of(model, KimiExperts):
        packed = KimiPackedExperts.shaped_like(experts, text)
        for which in ("gate_up_proj", "down_proj"):
            for expert, weight in enumerate(getattr(experts, which).detach()):
                codes, scale = pack(weight)
                getattr(packed, f"{which}_packed").data[expert] = codes
                getattr(packed, f"{which}_scale").data[expert] = scale
        model.set_submodule(name, packed)
    model.config.quantization_config = KimiMxfp4Config()
    remember_rules(model)
    return model


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Unpack the routed experts of a model in place, to `dtype` (the model's own by default)."""
    refuse_experts_on_disk(model, "dequantize")
    text = model.config.get_text_config()
    dtype = dtype or model.dtype
    for name, packed in modules_of(model, KimiPackedExperts):
        device = packed.gate_up_proj_packed.device
        with torch.device("meta"):
            experts = KimiExperts(text)
        experts.to(dtype).to_empty(device=device)
        for which in ("gate_up_proj", "down_proj"):
            codes, scale = getattr(packed, f"{which}_packed"), getattr(packed, f"{which}_scale")
            for expert in range(packed.num_experts):
                dense = unpack(codes[expert], scale[expert], dtype, name=f"{name}.{which}")
                getattr(experts, which).data[expert] = dense
        model.set_submodule(name, experts)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    remember_rules(model)
    return model


def remember_rules(model: nn.Module) -> None:
    """Note on the model how it is saved from here on: per expert, packed or plain as its modules are now.

    Prefixes are added on saving only where loading met them, so those rules are kept from the load.
    """
    from .configuration import KimiMxfp4Config
    from .quantizer import KimiMxfp4Quantizer

    used = [rule for rule in getattr(model, "_weight_conversions", None) or [] if isinstance(rule, PrefixChange)]
    with own_key_maps():
        rules = get_model_conversion_mapping(model, add_legacy=False)
    rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    if modules_of(model, KimiPackedExperts):
        rules = KimiMxfp4Quantizer(KimiMxfp4Config()).update_weight_conversions(rules, model)
    model._weight_conversions = used + rules


def modules_of(model: nn.Module, kind: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
