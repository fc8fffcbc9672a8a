"""The quantizer that transformers calls for checkpoints whose experts are in MXFP4."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from ..checkpoint.check import check_scales
from ..checkpoint.sources import being_read
from ..errors import CheckpointError, ConfigError
from ..modeling.disk_experts import refuse_experts_on_disk
from ..modeling.moe import KimiExperts
from ..ops.mxfp4 import GROUP, unpack
from .packed_experts import KimiPackedExperts, dequantize, modules_of, remember_rules

NAN_SCALE = 255


def _refuse_nan_scales(name: str) -> NoReturn:
    """Raise for a scale that is NaN, by the tensor and file that hold it if that is known, else by `name`."""
    checkpoint = being_read()
    if checkpoint is not None:
        with checkpoint:
            check_scales(checkpoint)
    raise CheckpointError(f"{name} holds an MXFP4 scale of 255, which is NaN in E8M0; fetch the checkpoint again")


def _check_split(config) -> None:
    """Refuse tensor parallelism that would cut a group of 32 weights from its scale."""
    distributed = getattr(config, "distributed_config", None)
    if distributed is None or distributed.tp_size == 1 or distributed.ep_size > 1:
        return
    inner, size = config.get_text_config().moe_intermediate_size, distributed.tp_size
    if inner % (GROUP * size):
        raise ConfigError(
            f"moe_intermediate_size is {inner}, which tp_size {size} does not split into whole MXFP4 groups of {GROUP}; "
            f"split the experts by number instead, DistributedConfig(tp_size={size}, ep_size={size})"
        )


class UnpackExperts(ConversionOps):
    """`w.weight_packed` and `w.weight_scale` of each expert -> its dense weight, before the experts are stacked."""

    def __init__(self, hf_quantizer: "KimiMxfp4Quantizer"):
        self.hf_quantizer = hf_quantizer

    @torch.no_grad
    def convert(self, input_dict: dict[str, Any], **kwargs) -> dict[str, Any]:
        model = kwargs.get("model")
        dtype = getattr(model, "dtype", None) or torch.bfloat16
        output = {}
        for pattern in [pattern for pattern in input_dict if pattern.endswith("weight_packed")]:
            scales = input_dict.get(pattern.removesuffix("packed") + "scale", [])
            codes = input_dict[pattern]
            if len(scales) != len(codes):
                raise CheckpointError(f"{pattern}: {len(codes)} packed tensors but {len(scales)} scales")
            # An error raised here would end in transformers' loading report, so it waits until the load is through.
            if model is not None and any(bool((scale == NAN_SCALE).any()) for scale in scales):
                model.__dict__["_nan_scale"] = kwargs.get("full_layer_name") or pattern
            pairs = zip(codes, scales, strict=True)
            output[pattern] = [unpack(c, s, dtype, name=pattern, check=False) for c, s in pairs]
        return output or input_dict


class KimiMxfp4Quantizer(HfQuantizer):
    """Loads MXFP4 experts packed (the default) or unpacked (`KimiMxfp4Config(dequantize=True)`)."""

    requires_calibration = False
    serialized_names = {"weight": ["weight_packed", "weight_scale"]}

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": UnpackExperts}

    def _process_model_before_weight_loading(self, model, **kwargs) -> None:
        if not self.pre_quantized:
            raise ConfigError(
                "quantization_config is KimiMxfp4Config, but the checkpoint's experts are not packed. Load it without, then "
                "call kimi_hf.quantize(model)"
            )
        if self.quantization_config.dequantize:
            refuse_experts_on_disk(model, "KimiMxfp4Config(dequantize=True)")
            return
        _check_split(model.config)
        for name, experts in modules_of(model, KimiExperts):
            model.set_submodule(name, KimiPackedExperts.shaped_like(experts, model.config.get_text_config()))

    def update_parallel_plan(self, model, plan: dict[str, str]) -> None:
        """Shard packed experts as dense ones: bytes and scales go where the weight would.

        Rows of `down_proj` are split between groups of 32 only, so that each process has whole groups with their scales.
        """
        super().update_parallel_plan(model, plan)
        if self.quantization_config.dequantize:
            return
        for key in [key for key in plan if key.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
            for suffix in ("_packed", "_scale"):
                plan[key + suffix] = plan[key]
            del plan[key]

    def _process_model_after_weight_loading(self, model, **kwargs):
        if "_nan_scale" in model.__dict__:
            _refuse_nan_scales(model.__dict__.pop("_nan_scale"))
        if self.quantization_config.dequantize:
            remember_rules(model)
            return model
        for name, packed in modules_of(model, KimiPackedExperts):
            for which in ("gate_up_proj_scale", "down_proj_scale"):
                scale: Tensor = getattr(packed, which)
                if not scale.is_meta and bool((scale == NAN_SCALE).any()):
                    _refuse_nan_scales(f"{name}.{which}")
        return model

    def _dequantize(self, model, dtype=None):
        return dequantize(model, dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True
