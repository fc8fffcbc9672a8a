"""LoRA on Kimi models: which modules each choice reaches, and adapters over experts that stay packed in MXFP4.

| kind | what gets an adapter |
|---|---|
| attention | the projections of both mixers: q, k, v, o of KDA; q (or q_a, q_b), kv_a, kv_b and o of MLA |
| gates | decay, write and output gates: f_a, f_b, b, g (or g_a, g_b) |
| latent | routed_expert_down_proj and routed_expert_up_proj |
| shared | the shared experts and the dense MLP |
| experts | all routed experts: gate, up and down, through the fused tensors (or packed) |
| all | all of these |

The router, the norms, the decay parameters, the AttnRes queries and `lm_head` are left alone by every kind.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import ConfigError
from ..modeling.disk_experts import refuse_experts_on_disk
from ..quantization import KimiPackedExperts

if TYPE_CHECKING:
    from peft import LoraConfig

_MODULES = {
    "attention": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
    ],
    "gates": ["f_a_proj", "f_b_proj", "b_proj", "g_proj", "g_a_proj", "g_b_proj"],
    "latent": ["routed_expert_down_proj", "routed_expert_up_proj"],
    "shared": ["gate_proj", "up_proj", "down_proj"],
}
_EXPERT_PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
LORA_KINDS = (*_MODULES, "experts", "all")


def lora_config(
    kind: str | list[str] = "attention",
    *,
    model: nn.Module | None = None,
    r: int = 16,
    lora_alpha: int = 32,
    **kwargs: Any,
) -> "LoraConfig":
    """A PEFT `LoraConfig` for Kimi models.

    Args:
        kind: one of `LORA_KINDS`, or several of them.
        model: needed to adapt experts that are packed in MXFP4; harmless otherwise.
        r, lora_alpha, kwargs: passed on to PEFT (`use_dora`, `lora_dropout`, `task_type`, ...).
    Raises:
        ConfigError: an unknown kind, dropout on routed experts, whose fused tensors cannot drop inputs, or adapters on
            experts that are on disk.
    """
    from peft import LoraConfig

    kinds = [kind] if isinstance(kind, str) else list(kind)
    unknown = sorted(set(kinds) - set(LORA_KINDS))
    if unknown or not kinds:
        raise ConfigError(f"kind must be among {', '.join(LORA_KINDS)}, got {unknown or kinds}")
    if "all" in kinds:
        kinds = [*_MODULES, "experts"]
    names = sorted({name for chosen in kinds for name in _MODULES.get(chosen, ())})
    # Only decoder layers: a vision tower or an lm_head of the same names stays as it is.
    targets = rf".*\blayers\.\d+\..*\b({'|'.join(names)})" if names else []
    packed = model is not None and any(isinstance(module, KimiPackedExperts) for module in model.modules())
    parameters = None
    if "experts" in kinds:
        if kwargs.get("lora_dropout"):
            raise ConfigError(
                f"lora_dropout is {kwargs['lora_dropout']}, but adapters on routed experts change the fused weights and cannot "
                "drop inputs; leave it at 0, or leave 'experts' out"
            )
        if model is not None:
            refuse_experts_on_disk(model, "an adapter on routed experts")
        if packed:
            targets = rf".*\blayers\.\d+\..*\b({'|'.join([*names, 'experts'])})"
        else:
            parameters = list(_EXPERT_PARAMETERS)
    config = LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=targets, target_parameters=parameters, **kwargs)
    if packed:
        register_packed_adapters(config)
    return config


def register_packed_adapters(config: "LoraConfig") -> "LoraConfig":
    """Tell a `LoraConfig` how packed experts are adapted.

    PEFT does not store this in the adapter's files: pass a config made by `lora_config(..., model=model)` when loading,
    `PeftModel.from_pretrained(model, folder, config=config)`.
    """
    from .packed_lora import PackedExpertsLora

    config._register_custom_module({KimiPackedExperts: PackedExpertsLora})
    return config
