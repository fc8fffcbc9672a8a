"""The tiny models of the contract: one entry per class and style, each small enough to run in milliseconds.

To bring another model under the contract, add a `TinyModel` to `TINY`. Weights are spread wide (logits of unit scale,
no parameter at its neutral initial value), so that a mistake shows instead of hiding below the tolerance.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kimi_hf

VOCAB, HIDDEN = 99, 32
PLACEHOLDER = 3
IMAGE_GRID = (1, 4, 4)
IMAGE_PATCHES, IMAGE_TOKENS = 16, 4


@dataclass(frozen=True)
class TinyModel:
    """A model under the contract.

    Attributes:
        name: what pytest shows.
        make_config: a fresh tiny config.
        model, base: names of the head class and of the base class in `kimi_hf`.
        vision: whether inputs may carry images.
    """

    name: str
    make_config: Callable[[], Any]
    model: str
    base: str
    vision: bool = False

    @property
    def model_class(self) -> type:
        return getattr(kimi_hf, self.model)

    @property
    def base_class(self) -> type:
        return getattr(kimi_hf, self.base)

    def config(self, **changes: Any):
        """A fresh config; `changes` are set on its text part."""
        config = self.make_config()
        for name, value in changes.items():
            setattr(config.get_text_config(), name, value)
        return config

    def build(self, *, base: bool = False, attention: str = "eager", seed: int = 0, **changes: Any):
        """A model with spread weights in eval mode; equal arguments give equal weights."""
        cls = self.base_class if base else self.model_class
        model = cls._from_config(self.config(**changes), attn_implementation=attention).eval()
        spread_weights(model, seed)
        # No model stops early here: lengths are part of what is checked.
        if hasattr(model, "generation_config"):
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        return model

    def ids(self, batch: int = 2, length: int = 7, seed: int = 1) -> Tensor:
        """(batch, length) token ids without special tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, VOCAB, (batch, length), generator=generator)

    def images(self, batch: int = 2, length: int = 7) -> dict[str, Tensor]:
        """Model inputs with one image before the text of each row (for models with `vision`)."""
        ids = torch.cat([torch.full((batch, IMAGE_TOKENS), PLACEHOLDER), self.ids(batch, length)], dim=1)
        generator = torch.Generator().manual_seed(2)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(batch * IMAGE_PATCHES, 3, 14, 14, generator=generator),
            "grid_thws": torch.tensor([IMAGE_GRID] * batch),
        }

    @property
    def has_positions(self) -> bool:
        """Whether positions are part of the input."""
        return getattr(self.config(), "positions", "none") == "learned"

    def layers_of(self, kind: str) -> int:
        """How many layers are of one of transformers' layer types."""
        return self.config().get_text_config().layer_types.count(kind)


def spread_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every weight a value that matters; only depends on names, shapes and `seed`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.2 * noise)
            elif tensor.ndim <= 1:
                tensor.copy_(0.5 * noise)
            elif name.endswith("conv1d.weight"):
                tensor.copy_(0.4 * noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    if hasattr(model, "tie_weights"):
        model.tie_weights()


def _text_fields(**fields: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        **fields,
    }


def kimi_linear_config():
    """Kimi-Linear style: softplus gate, low-rank output gate, SiLU, experts at full width, plain residuals."""
    linear = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}
    return kimi_hf.KimiLinearConfig(
        **_text_fields(
            num_hidden_layers=2, linear_attn_config=linear, num_shared_experts=1, routed_scaling_factor=2.446
        )
    )


def kimi_k3_text_config():
    """K3 style: bounded gate, full-rank output gate, gated MLA, latent experts, SiTU, Block AttnRes."""
    linear = {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }
    return kimi_hf.KimiLinearConfig(
        **_text_fields(
            num_hidden_layers=4,
            linear_attn_config=linear,
            hidden_act="situ",
            activation_situ_beta=4.0,
            activation_situ_linear_beta=25.0,
            q_lora_rank=24,
            mla_use_output_gate=True,
            attn_res_block_size=2,
            routed_expert_hidden_size=16,
            latent_moe_use_norm=True,
            num_shared_experts=2,
        )
    )


def kimi_k3_config():
    """The composite: the text decoder above behind a two-block vision tower."""
    vision = kimi_hf.KimiK3VisionConfig(
        init_pos_emb_height=4,
        init_pos_emb_width=4,
        vt_hidden_size=16,
        vt_num_hidden_layers=2,
        vt_num_attention_heads=2,
        vt_intermediate_size=24,
        qkv_hidden_size=16,
        mm_hidden_size=16,
        text_hidden_size=HIDDEN,
    )
    return kimi_hf.KimiK3Config(
        text_config=kimi_k3_text_config(),
        vision_config=vision,
        media_placeholder_token_id=PLACEHOLDER,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def ladder_mixture():
    """K3's mixers and latent experts beside GPT-2's parts, reading every sub-layer's output."""
    mixture = {"mixer": ["kimi_delta_attention", "latent_attention"], "feed_forward": ["gelu_mlp", "latent_moe"]}
    return ladder_config("kimi-k3", residual="full_attn_res", **mixture)


def ladder_config(rung: str, **changes: Any):
    """A rung of the ladder; its head is untied here, as on the other models."""
    fields = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False, "max_position_embeddings": 512}
    return kimi_hf.LadderConfig.rung(rung, **{**fields, **ids, **changes})


TINY = [
    TinyModel("kimi-linear", kimi_linear_config, "KimiLinearForCausalLM", "KimiLinearModel"),
    TinyModel("kimi-k3-text", kimi_k3_text_config, "KimiLinearForCausalLM", "KimiLinearModel"),
    TinyModel("kimi-k3", kimi_k3_config, "KimiK3ForConditionalGeneration", "KimiK3Model", vision=True),
    *(
        TinyModel(rung, partial(ladder_config, rung), "LadderForCausalLM", "LadderModel")
        for rung in ("gpt2", "linear-transformer", "gated-delta-net")
    ),
    TinyModel("ladder-mixture", ladder_mixture, "LadderForCausalLM", "LadderModel"),
]


def only(*chosen: TinyModel):
    """Marks a test that runs on some of the models: `@only(*WITH_VISION)`."""
    return pytest.mark.parametrize("tiny", chosen, indirect=True, ids=lambda tiny: tiny.name)


WITH_VISION = [tiny for tiny in TINY if tiny.vision]
# Between them they hold every kind of layer.
COMPILED = [tiny for tiny in TINY if tiny.name in ("kimi-k3-text", "gpt2")]


def clone(value):
    """A deep copy, for inputs and configs that a call may change."""
    return copy.deepcopy(value)
