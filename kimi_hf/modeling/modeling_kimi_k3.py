"""Kimi K3: a vision tower and a projector in front of the Kimi text decoder.

Image features take the place of placeholder tokens, and from there on everything is text. Text-only calls never touch
the tower. Module names are the released ones: `vision_tower`, `mm_projector`, `language_model`.
"""

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from ..configuration import KimiK3Config, KimiLinearConfig
from ..errors import ConfigError, ShapeError
from .generation import KimiGenerationMixin
from .media_inputs import MediaGenerationMixin, refuse_orphans, remember_images
from .modeling_kimi_linear import KimiLinearForCausalLM, KimiLinearModel, KimiLinearPreTrainedModel
from .vision import KimiK3PatchMergerV2, KimiK3VisionModel, MergedInputs, merge_media


class KimiK3PreTrainedModel(KimiLinearPreTrainedModel):
    """What transformers needs to know about the multimodal models."""

    config: KimiK3Config
    base_model_prefix = ""
    input_modalities = ("image", "video", "text")
    _no_split_modules = ["DecoderLayer", "MoonViTBlock"]
    _has_vision = True
    _keys_to_ignore_on_load_unexpected = None
    _can_record_outputs = {}

    def _build_vision(self, config: KimiK3Config) -> None:
        width, expected = config.vision_config.text_hidden_size, config.text_config.hidden_size
        if width != expected:
            raise ConfigError(
                f"vision_config.text_hidden_size is {width}, but text_config.hidden_size is {expected}: the projector would "
                "not fit. For the text model alone use KimiLinearForCausalLM.from_pretrained(...) on the same folder"
            )
        self.vision_tower = KimiK3VisionModel(config.vision_config)
        self.mm_projector = KimiK3PatchMergerV2(config.vision_config)

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    @can_return_tuple
    def get_image_features(self, pixel_values: Tensor, grid_thws: Tensor, **kwargs) -> BaseModelOutputWithPooling:
        """Encode and project images.

        Args:
            pixel_values: (N, 3, P, P), patches of all images behind one another, N = sum of t h w.
            grid_thws: (M, 3), (t, h, w) of each image in patches.
        Returns:
            `pooler_output`: M tensors (h w / 4, D), one per image, ready for the decoder; `last_hidden_state` and, when
            asked for, `hidden_states` and `attentions` of the tower.
        Raises:
            MediaError, ShapeError: see `KimiK3VisionModel.forward`.
        """
        dtype = self.vision_tower.patch_embed.proj.weight.dtype
        encoded = self.vision_tower(pixel_values.to(dtype), grid_thws, return_dict=True, **kwargs)
        return BaseModelOutputWithPooling(
            last_hidden_state=encoded.last_hidden_state,
            pooler_output=self.mm_projector(encoded.pooler_output),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def placeholders_in(self, inputs_embeds: Tensor) -> Tensor:
        """(B, T, D) embeddings -> (B, T) ids, the placeholder's where a token has its embedding, -1 (no id) elsewhere."""
        placeholder = self.config.media_placeholder_token_id
        own = self.get_input_embeddings()(torch.tensor([placeholder], device=inputs_embeds.device))
        return torch.where((inputs_embeds == own.to(inputs_embeds.dtype)).all(dim=-1), placeholder, -1)

    def merge_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pixel_values: Tensor | None,
        grid_thws: Tensor | None,
        attention_mask: Tensor | dict | None,
        labels: Tensor | None,
        past_key_values=None,
        check_placeholders: bool = True,
    ) -> MergedInputs:
        """Embed the tokens and put image features in place of their placeholders, see `vision/merge.py`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("give exactly one of input_ids and inputs_embeds")
        if (pixel_values is None) != (grid_thws is None):
            raise ShapeError("give pixel_values and grid_thws together; the image processor returns both")
        placeholder, vocabulary = self.config.media_placeholder_token_id, self.config.text_config.vocab_size
        if pixel_values is not None and (placeholder is None or placeholder >= vocabulary):
            raise ConfigError(
                f"media_placeholder_token_id is {placeholder}, no token of text_config.vocab_size ({vocabulary}) that could "
                "stand for an image; give the id of one"
            )
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is None:
            if input_ids is not None and check_placeholders:
                refuse_orphans(input_ids, self.config.media_placeholder_token_id, past_key_values)
            return MergedInputs(inputs_embeds, attention_mask, None, labels)
        if input_ids is None:
            input_ids = self.placeholders_in(inputs_embeds)
        # Masks that are ready made fit the present length only, so nothing may move then.
        ready = isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim == 4)
        merged = merge_media(
            input_ids,
            inputs_embeds,
            None if ready else attention_mask,
            labels,
            self.get_image_features(pixel_values, grid_thws, return_dict=True).pooler_output,
            self.config.media_placeholder_token_id,
            self.config.pad_token_id,
            ignore_index=self.config.ignore_index,
        )
        if not ready:
            return merged
        if merged.inputs_embeds.shape[1] != input_ids.shape[1]:
            raise ShapeError(
                "a 4-D attention_mask (or a static cache) needs input_ids with one placeholder per image feature, so that "
                "lengths agree; expand them with kimi_hf.modeling.vision.expand_placeholders"
            )
        return merged._replace(attention_mask=attention_mask)

    def _remember(self, out: MoeModelOutputWithPast, grid_thws: Tensor | None, merged: MergedInputs) -> None:
        kernel = self.config.vision_config.merge_kernel_size
        remember_images(out.past_key_values, grid_thws, kernel, merged.inputs_embeds.shape[0])


class KimiK3TextStack(KimiLinearPreTrainedModel):
    """The decoder under its released path, `language_model.model`, without a head."""

    def __init__(self, config: KimiLinearConfig):
        super().__init__(config)
        self.model = KimiLinearModel(config)
        self.post_init()

    def forward(self, *args, **kwargs) -> MoeModelOutputWithPast:
        """`KimiLinearModel.forward`."""
        return self.model(*args, **kwargs)


class KimiK3Model(KimiK3PreTrainedModel):
    """Kimi K3 without its head: hidden states of text and images.

    Args:
        config: see `KimiK3Config`.
    """

    _keys_to_ignore_on_load_unexpected = [r"^language_model\.lm_head\."]

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        self._build_vision(config)
        self.language_model = KimiK3TextStack(config.text_config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        check_placeholders: bool = True,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """As `KimiK3ForConditionalGeneration.forward`, without labels and logits."""
        merged = self.merge_inputs(
            input_ids,
            inputs_embeds,
            pixel_values,
            grid_thws,
            attention_mask,
            None,
            past_key_values,
            check_placeholders,
        )
        out = self.language_model(
            inputs_embeds=merged.inputs_embeds,
            attention_mask=merged.attention_mask,
            position_ids=position_ids if merged.position_ids is None else None,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        self._remember(out, grid_thws, merged)
        return out


class KimiK3ForConditionalGeneration(MediaGenerationMixin, KimiK3PreTrainedModel, KimiGenerationMixin, GenerationMixin):
    """Kimi K3 with its language-model head: text and images in, text out.

    Args:
        config: see `KimiK3Config`.
    Raises:
        ConfigError: a projector that does not fit the decoder.
    """

    _tied_weights_keys = {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"}

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        self._build_vision(config)
        self.language_model = KimiLinearForCausalLM(config.text_config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.language_model.lm_head = value

    def set_chunked_loss(self, tokens: int | None = 1024) -> None:
        """See `CausalHead.set_chunked_loss`."""
        self.language_model.set_chunked_loss(tokens)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        check_placeholders: bool = True,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Logits, and the loss when `labels` are given.

        Args:
            input_ids: (B, T), with one placeholder per image or one per image feature.
            pixel_values: (N, 3, P, P), the patches of all images. grid_thws: (M, 3), their (t, h, w).
            attention_mask: (B, T) or, in a continued forward, (B, past + T).
            labels: (B, T); padding and image positions are ignored.
            check_placeholders: refuse placeholders that come without images; `generate` turns it off after the prompt.
        Returns:
            Logits over the merged length L: T plus what the images take beyond their placeholders.
        Raises:
            MediaError: placeholders and images that do not match, or placeholders without images; it says which.
            ShapeError, CacheError: as `KimiLinearModel.forward`.
        """
        merged = self.merge_inputs(
            input_ids,
            inputs_embeds,
            pixel_values,
            grid_thws,
            attention_mask,
            labels,
            past_key_values,
            check_placeholders,
        )
        labels, mask = merged.labels, merged.attention_mask
        if labels is not None and isinstance(mask, Tensor) and mask.ndim == 2:
            labels = labels.masked_fill(mask[:, -labels.shape[1] :] == 0, self.config.ignore_index)
        out = self.language_model(
            inputs_embeds=merged.inputs_embeds,
            attention_mask=mask,
            position_ids=position_ids if merged.position_ids is None else None,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
        self._remember(out, grid_thws, merged)
        return out
