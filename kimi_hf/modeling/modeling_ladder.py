"""The ladder from GPT-2 to Kimi K3 as one model: this file says which parts a configuration may name, and joins them."""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..checkpoint.headers import check_headers
from ..checkpoint.state_dicts import fuse_expert_names
from ..configuration.configuration_ladder import LadderConfig
from ..errors import ShapeError
from .cache import KimiCache
from .decoder import DecoderLayer
from .feed_forward import GeluMLP, KimiMLP
from .generation import KimiGenerationMixin
from .head import CausalHead
from .initialization import init_decay, init_router, init_short_convolution
from .mixers import (
    DeltaNet,
    GatedDeltaNet,
    KimiDeltaAttention,
    LinearAttention,
    MultiHeadLatentAttention,
    SoftmaxAttention,
)
from .mixers.short_convolution import ShortConvolution
from .modeling_kimi_linear import FLOAT32_NAMES, PACKING_ARGUMENTS, KimiLinearForCausalLM
from .moe import KimiExperts, KimiRouter, KimiSparseMoeBlock
from .norms import KimiGatedRMSNorm, KimiRMSNorm
from .pretrained import KimiPreTrainedMixin
from .residual import BlockAttnRes, DepthNorm, DepthQuery, FullAttnRes, Residual, Stream, SumResidual
from .sequence import build_mask_info, token_positions

MIXERS = {
    "softmax_attention": SoftmaxAttention,
    "linear_attention": LinearAttention,
    "delta_net": DeltaNet,
    "gated_delta_net": GatedDeltaNet,
    "kimi_delta_attention": KimiDeltaAttention,
    "latent_attention": MultiHeadLatentAttention,
}


class _With:
    """A configuration with a few fields replaced; everything else is read from it and written to it."""

    def __init__(self, config: LadderConfig, **fields):
        self.__dict__.update(fields, _config=config)

    def __getattr__(self, name):
        if name == "_config":  # not there yet while being copied
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name, value):
        setattr(self._config, name, value)


def _gelu_mlp(config: LadderConfig) -> nn.Module:
    return GeluMLP(config.hidden_size, config.intermediate_size, config.activation_function, config.bias)


def _swiglu(config: LadderConfig) -> nn.Module:
    return KimiMLP(_With(config, hidden_act="silu"), config.hidden_size, config.intermediate_size)


def _situ_glu(config: LadderConfig) -> nn.Module:
    return KimiMLP(_With(config, hidden_act="situ"), config.hidden_size, config.intermediate_size)


def _moe(config: LadderConfig) -> nn.Module:
    return KimiSparseMoeBlock(_With(config, routed_expert_hidden_size=None))


# Feed-forward -> how it is built, and the released name of its module.
FEED_FORWARDS = {
    "gelu_mlp": (_gelu_mlp, "mlp"),
    "swiglu": (_swiglu, "mlp"),
    "situ_glu": (_situ_glu, "mlp"),
    "moe": (_moe, "block_sparse_moe"),
    "latent_moe": (KimiSparseMoeBlock, "block_sparse_moe"),
}
RESIDUALS = {
    "sum": lambda config, layer_idx: SumResidual(),
    "block_attn_res": lambda config, layer_idx: BlockAttnRes(
        config.hidden_size, config.norm_eps, layer_idx, config.attn_res_block_size
    ),
    "full_attn_res": lambda config, layer_idx: FullAttnRes(config.hidden_size, config.norm_eps, layer_idx),
}
NORMS = {
    "layer_norm": lambda config: nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias),
    "rms_norm": lambda config: KimiRMSNorm(config.hidden_size, config.norm_eps),
}


def build_layer(config: LadderConfig, layer_idx: int) -> DecoderLayer:
    """Layer `layer_idx` (0-based) as the configuration describes it."""
    mixer = MIXERS[config.mixers[layer_idx]](config, layer_idx)
    build, name = FEED_FORWARDS[config.feed_forwards[layer_idx]]
    norms = NORMS[config.norm](config), NORMS[config.norm](config)
    residual: Residual = RESIDUALS[config.residual](config, layer_idx)
    return DecoderLayer(mixer, build(config), name, norms, residual, config.residual_dropout)


class LadderPreTrainedModel(KimiPreTrainedMixin, PreTrainedModel):
    """What transformers needs to know about the ladder's models."""

    config: LadderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keys_to_ignore_on_load_unexpected = None
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Recurrent states can be rolled back (see KimiCache), so assisted decoding need not be refused.
    _is_stateful = False
    _keep_in_fp32_modules_strict = FLOAT32_NAMES
    _can_record_outputs = {
        "router_logits": OutputRecorder(KimiRouter, index=0),
        "hidden_states": OutputRecorder(DecoderLayer, index=0),
        "attentions": [OutputRecorder(SoftmaxAttention, index=1), OutputRecorder(MultiHeadLatentAttention, index=1)],
    }

    def _check_checkpoint(self, checkpoint, reading) -> None:
        """Compare the file's names and shapes with this, still empty, model's."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.base_model.state_dict().items()}
        check_headers(checkpoint, shapes, reading)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As GPT-2: normal(0, std), and what is written to a summed stream smaller by the root of the number of writes."""
        super()._init_weights(module)
        config = self.config
        std = config.initializer_range
        if isinstance(module, (KimiDeltaAttention, GatedDeltaNet)):
            init_decay(module.A_log, module.dt_bias, getattr(module, "lower_bound", None))
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
        elif isinstance(module, DecoderLayer) and config.residual == "sum":
            written = [module.self_attn.o_proj.weight]
            if isinstance(module.feed_forward, (GeluMLP, KimiMLP)):
                written.append(module.feed_forward.down_proj.weight)
            for weight in written:
                init.normal_(weight, mean=0.0, std=std / (2 * config.num_hidden_layers) ** 0.5)


def _fuse_expert_names(
    model: "LadderModel", state_dict: dict, prefix: str, metadata, strict, missing: list, *args
) -> None:
    """Let `load_state_dict` take what `save_pretrained` wrote; Trainer resumes that way."""
    fuse_expert_names(model, state_dict, prefix, missing)


class LadderModel(LadderPreTrainedModel):
    """The decoder without its head.

    Args:
        config: see `LadderConfig`.
    """

    def __init__(self, config: LadderConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_positions = None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(build_layer(config, i) for i in range(config.num_hidden_layers))
        self.residual = RESIDUALS[config.residual](config, 0)
        self.residual.build_output(self)
        self.norm = NORMS[config.norm](config)
        self.gradient_checkpointing = False
        self.register_load_state_dict_pre_hook(_fuse_expert_names)
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
            input_ids: (B, T). Exactly one of this and `inputs_embeds` (B, T, D), to which positions are added too.
            attention_mask: (B, S), 1 for real tokens, padding anywhere; S counts cached tokens too, or is T.
            position_ids: (B, T); counted over the real tokens when left out. A restart at 0 marks a packed document.
            past_key_values: a `KimiCache`; made when `use_cache` asks for one.
            cu_seq_lens_q, cu_seq_lens_k, seq_idx: packed documents, as collators emit them.
        Raises:
            ShapeError: both or neither input, masks and boundaries that do not fit, or more tokens than positions.
            CacheError: a cache made for another model, or one together with packed documents.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        packing = {name: kwargs.get(name) for name in PACKING_ARGUMENTS}
        kwargs.pop("seq_idx", None)
        mask_info = build_mask_info(self.config, inputs_embeds, attention_mask, past_key_values, position_ids, packing)
        packed = mask_info.layout is not None and mask_info.layout.cu_seqlens is not None
        hidden = inputs_embeds
        if self.embed_positions is not None:
            positions = token_positions(mask_info, position_ids, past_key_values, hidden.shape[1], hidden.device)
            hidden = hidden + self.embed_positions(self._checked(positions))
        if use_cache and past_key_values is None and not packed:
            past_key_values = KimiCache(self.config)
            past_key_values.remember_padding(attention_mask)
        stream = (self.dropout(hidden),)
        for layer in self.layers[: self.config.num_hidden_layers]:
            stream = layer(*stream, mask_info=mask_info, past_key_values=past_key_values, **kwargs)
        hidden = self.norm(self.residual.read_output(self, Stream(stream[0], stream[1:])))
        if hasattr(past_key_values, "advance"):
            past_key_values.advance(inputs_embeds.shape[1])
        return MoeModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)

    def _checked(self, positions: Tensor) -> Tensor:
        """Raise before an out-of-range lookup; elsewhere than on the CPU the question would cost a host sync."""
        limit = self.embed_positions.num_embeddings
        if positions.device.type == "cpu" and not is_torchdynamo_compiling() and positions.numel():
            last = int(positions.max())
            if last >= limit:
                raise ShapeError(
                    f"a token stands at position {last}, but max_position_embeddings is {limit}; shorten the input, or use a "
                    'model with positions="none"'
                )
        return positions


class LadderForCausalLM(CausalHead, LadderPreTrainedModel, KimiGenerationMixin, GenerationMixin):
    """The decoder with its language-model head.

    Args:
        config: see `LadderConfig`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LadderConfig):
        super().__init__(config)
        self.model = LadderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    # The head is the same on every decoder.
    forward = KimiLinearForCausalLM.forward
