"""LoRA over experts that stay packed in MXFP4: W_e + s B_e A_e, the first term unpacked block by block, never stored."""

import math
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..errors import ConfigError
from ..ops.mxfp4 import packed_matmul
from ..quantization import KimiPackedExperts


class PackedExpertsLora(nn.Module, LoraLayer):
    """Adapters on the gate-and-up and the down projection of every packed expert of a layer.

    `lora_A` holds (E, r, Z) and (E, r, F), `lora_B` (E, 2F, r) and (E, Z, r), under "<adapter>" and "<adapter>_down";
    B starts at zero. The packed bytes never change.
    """

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base_layer: KimiPackedExperts, adapter_name: str, **kwargs: Any):
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, **kwargs)

    def update_layer(self, adapter_name: str, r: int = 8, lora_alpha: int = 16, **kwargs: Any) -> None:
        """Add an adapter of rank `r`."""
        if kwargs.get("use_dora") or kwargs.get("lora_dropout"):
            raise ConfigError("adapters over packed experts take neither use_dora nor lora_dropout; leave them out")
        base = self.get_base_layer()
        device = base.gate_up_proj_packed.device
        shapes = {
            adapter_name: (base.hidden_dim, 2 * base.intermediate_dim),
            f"{adapter_name}_down": (base.intermediate_dim, base.hidden_dim),
        }
        for name, (inputs, outputs) in shapes.items():
            a = torch.empty(base.num_experts, r, inputs, device=device)
            nn.init.uniform_(a, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))
            self.lora_A[name] = nn.Parameter(a)
            self.lora_B[name] = nn.Parameter(torch.zeros(base.num_experts, outputs, r, device=device))
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if kwargs.get("use_rslora") else r)
        self.set_adapter(self.active_adapters)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Choose which adapters act and train."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        for table in (self.lora_A, self.lora_B):
            for key, parameter in table.items():
                parameter.requires_grad_(key.removesuffix("_down") in names and not inference_mode)
        self._active_adapter = names

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (N, Z), experts (N, k), weights (N, k) fp32 -> (N, Z)."""
        base = self.get_base_layer()
        active = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.scaling]
        if not active:
            return base(hidden_states, top_k_index, top_k_weights)
        out = top_k_weights.new_zeros(hidden_states.shape)
        for expert in torch.unique(top_k_index).tolist():
            token, slot = torch.where(top_k_index == expert)
            x = hidden_states[token]
            gate_up = packed_matmul(x, base.gate_up_proj_packed[expert], base.gate_up_proj_scale[expert])
            inner = base._apply_gate(gate_up + self._delta(x, expert, active, ""))
            y = packed_matmul(inner, base.down_proj_packed[expert], base.down_proj_scale[expert])
            y = y + self._delta(inner, expert, active, "_down")
            out = out.index_add(0, token, y * top_k_weights[token, slot, None])
        return out.to(hidden_states.dtype)

    def _delta(self, x: Tensor, expert: int, active: list[str], suffix: str) -> Tensor:
        """Sum over the active adapters of s B_e A_e x, in x.dtype."""
        total = 0
        for name in active:
            a, b = self.lora_A[name + suffix][expert], self.lora_B[name + suffix][expert]
            total = total + (x.to(a.dtype) @ a.T @ b.T * self.scaling[name]).to(x.dtype)
        return total

    def merge(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "an adapter over packed experts cannot be merged: the sum is not on the MXFP4 grid. Load the base unpacked "
            "(KimiMxfp4Config(dequantize=True)) and merge there, or use `kimi-hf merge-lora`"
        )

    def unmerge(self) -> None:
        """Nothing is ever merged."""
