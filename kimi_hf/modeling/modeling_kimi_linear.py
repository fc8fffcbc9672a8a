"""The Kimi text decoder: Kimi-Linear and the language model of Kimi K3, by configuration.

A layer mixes over time by Kimi Delta Attention or by gated latent attention, over channels by a dense or a sparse
feed-forward, on a plain or a depth-attending residual stream. This file only chooses.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..checkpoint.state_dicts import fuse_released_names
from ..configuration import KimiLinearConfig
from ..errors import ShapeError
from .cache import KimiCache
from .decoder import DecoderLayer
from .feed_forward import KimiMLP
from .generation import KimiGenerationMixin
from .head import CausalHead
from .initialization import init_decay, init_router, init_short_convolution
from .mixers import KimiDeltaAttention, MultiHeadLatentAttention
from .mixers.short_convolution import ShortConvolution
from .moe import KimiExperts, KimiRouter, KimiSparseMoeBlock
from .norms import KimiGatedRMSNorm, KimiRMSNorm
from .pretrained import KimiPreTrainedMixin
from .residual import BlockAttnRes, DepthNorm, DepthQuery, Stream, SumResidual
from .sequence import build_mask_info

MIXERS = {"linear_attention": KimiDeltaAttention, "full_attention": MultiHeadLatentAttention}
PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
# Whole names of tensors that stay fp32 under bf16 loading; none of them is part of another parameter's name.
FLOAT32_NAMES = ["A_log", "dt_bias", "e_score_correction_bias", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm"]


def build_layer(config: KimiLinearConfig, layer_idx: int) -> DecoderLayer:
    """Layer `layer_idx` (0-based) as the configuration describes it."""
    width, eps = config.hidden_size, config.rms_norm_eps
    mixer = MIXERS[config.layer_types[layer_idx]](config, layer_idx)
    if config.is_moe_layer(layer_idx):
        feed_forward, name = KimiSparseMoeBlock(config), "block_sparse_moe"
    else:
        feed_forward, name = KimiMLP(config, width, config.intermediate_size), "mlp"
    norms = KimiRMSNorm(width, eps), KimiRMSNorm(width, eps)
    return DecoderLayer(mixer, feed_forward, name, norms, build_residual(config, layer_idx))


def build_residual(config: KimiLinearConfig, layer_idx: int) -> SumResidual | BlockAttnRes:
    """How layer `layer_idx` reads the stream."""
    if config.attn_res_block_size is None:
        return SumResidual()
    return BlockAttnRes(config.hidden_size, config.rms_norm_eps, layer_idx, config.attn_res_block_size)


class KimiLinearPreTrainedModel(KimiPreTrainedMixin, PreTrainedModel):
    """What transformers needs to know about the Kimi text models."""

    config: KimiLinearConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # The recurrent state can be rolled back (see KimiCache), so assisted decoding need not be refused.
    _is_stateful = False
    _keep_in_fp32_modules_strict = FLOAT32_NAMES
    _can_record_outputs = {
        "router_logits": OutputRecorder(KimiRouter, index=0),
        "hidden_states": OutputRecorder(DecoderLayer, index=0),
        "attentions": OutputRecorder(MultiHeadLatentAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.get_text_config().initializer_range
        if isinstance(module, KimiDeltaAttention):
            init_decay(module.A_log, module.dt_bias, module.lower_bound)
        elif isinstance(module, ShortConvolution):
            init_short_convolution(module.weight)
        elif isinstance(module, KimiRouter):
            init_router(module.weight, module.e_score_correction_bias)
        elif isinstance(module, KimiExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, DepthQuery):
            init.zeros_(module.weight)
        elif isinstance(module, (DepthNorm, KimiRMSNorm, KimiGatedRMSNorm)):
            init.ones_(module.weight)


def _fuse_released_names(
    model: "KimiLinearModel", state_dict: dict, prefix: str, metadata, strict, missing: list, *args
) -> None:
    """Let `load_state_dict` take what `save_pretrained` wrote; Trainer resumes that way."""
    fuse_released_names(model, state_dict, prefix, missing)


def _drop_composite_prefix(model: "KimiLinearForCausalLM", state_dict: dict, prefix: str, *args) -> None:
    """Let `load_state_dict` of the text model take the state dict of a composite repository."""
    inner = f"{prefix}language_model."
    for name in [name for name in state_dict if name.startswith(inner)]:
        state_dict[prefix + name.removeprefix(inner)] = state_dict.pop(name)


class KimiLinearModel(KimiLinearPreTrainedModel):
    """The decoder without its head.

    Args:
        config: see `KimiLinearConfig`.
    """

    def __init__(self, config: KimiLinearConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(build_layer(config, i) for i in range(config.num_hidden_layers))
        self.residual = build_residual(config, 0)
        self.residual.build_output(self)
        self.norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.register_load_state_dict_pre_hook(_fuse_released_names)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """Run the decoder.

        Args:
            input_ids: (B, T). Exactly one of this and `inputs_embeds` (B, T, D).
            attention_mask: (B, S), 1 for real tokens, padding anywhere; S counts cached tokens too, or is T.
            position_ids: (B, T); nothing depends on positions, but a restart at 0 marks a packed document.
            past_key_values: a `KimiCache`; made when `use_cache` asks for one.
            cu_seq_lens_q, cu_seq_lens_k, seq_idx: packed documents, as collators emit them.
        Raises:
            ShapeError: both or neither input, or masks and boundaries that do not fit.
            CacheError: a cache made for another model, or one together with packed documents.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if inputs_embeds.shape[1] == 0:
            raise ShapeError(f"the input has shape {tuple(inputs_embeds.shape[:2])}: give at least one token a row")
        packing = {name: kwargs.get(name) for name in PACKING_ARGUMENTS}
        kwargs.pop("seq_idx", None)
        mask_info = build_mask_info(self.config, inputs_embeds, attention_mask, past_key_values, position_ids, packing)
        packed = mask_info.layout is not None and mask_info.layout.cu_seqlens is not None
        if use_cache and past_key_values is None and not packed:
            past_key_values = KimiCache(self.config)
            past_key_values.remember_padding(attention_mask)
        stream = (inputs_embeds,)
        for layer in self.layers[: self.config.num_hidden_layers]:
            stream = layer(*stream, mask_info=mask_info, past_key_values=past_key_values, **kwargs)
        hidden = self.norm(self.residual.read_output(self, Stream(stream[0], stream[1:])))
        if hasattr(past_key_values, "advance"):
            past_key_values.advance(inputs_embeds.shape[1])
        return MoeModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


class KimiLinearForCausalLM(CausalHead, KimiLinearPreTrainedModel, KimiGenerationMixin, GenerationMixin):
    """The decoder with its language-model head.

    Args:
        config: see `KimiLinearConfig`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: KimiLinearConfig):
        super().__init__(config)
        self.model = KimiLinearModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_load_state_dict_pre_hook(_drop_composite_prefix)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Logits (B, T, vocabulary), and the loss when `labels` (B, T) are given (shifted here; -100 is ignored).

        The other arguments are `KimiLinearModel.forward`'s; `logits_to_keep` limits which positions get logits.

        Raises:
            ShapeError: labels that do not have one entry per position with logits; and as `KimiLinearModel.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits, loss = self._logits_and_loss(outputs.last_hidden_state, labels, logits_to_keep, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )
