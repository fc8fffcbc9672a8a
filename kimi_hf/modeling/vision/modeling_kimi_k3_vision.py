"""`KimiK3VisionModel`: the MoonViT3d tower of Kimi K3, from pixels to one row per 2 x 2 patches."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from ...configuration.configuration_kimi_k3_vision import KimiK3VisionConfig
from ...errors import ShapeError
from .layout import MediaLayout, read_layout
from .moonvit import ItemAttention, LearnedPositions, MoonViTBlock, MoonViTEncoder, MoonViTPatchEmbed, merge_patches


class KimiK3VisionModel(PreTrainedModel):
    """The vision tower alone: patches of all images in, merged patches of each image out.

    Attention stays within an image (all frames of a clip attend jointly), so the order and company of images do not
    change what each of them becomes. The projector that follows is `KimiK3PatchMergerV2`.

    Source: K3 specification, section 6; names of the released checkpoint below `vision_tower.`.
    """

    config: KimiK3VisionConfig
    base_model_prefix = "vision_tower"
    main_input_name = "pixel_values"
    input_modalities = ("image", "video")
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoonViTBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": MoonViTBlock, "attentions": ItemAttention}

    def __init__(self, config: KimiK3VisionConfig):
        config.check()  # fields may have been changed since the configuration was made
        super().__init__(config)
        self.patch_embed = MoonViTPatchEmbed(config)
        self.encoder = MoonViTEncoder(config)
        self.gradient_checkpointing = False
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LearnedPositions):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        """Taking the tower out of a full repository leaves the rest of it unread, on purpose.

        Said here, where only the model being loaded is asked, and not in `_keys_to_ignore_on_load_unexpected`, which a
        composite model inherits from its parts: it would then no longer notice unknown text tensors.
        """
        others = ("language_model.", "mm_projector.")
        loading_info.unexpected_keys = {key for key in loading_info.unexpected_keys if not key.startswith(others)}
        super()._adjust_missing_and_unexpected_keys(loading_info)

    def get_input_embeddings(self) -> nn.Module:
        """The patch projection, the first thing that touches pixels."""
        return self.patch_embed.proj

    def read_layout(self, grid_thws: torch.Tensor, num_patches: int | None = None) -> MediaLayout:
        """Check `grid_thws` (M, 3) against this tower's limits; see `layout.read_layout`."""
        return read_layout(
            grid_thws,
            num_patches=num_patches,
            max_frames=self.config.init_pos_emb_time,
            merge_kernel_size=self.config.merge_kernel_size,
        )

    @capture_outputs
    def forward(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor, **kwargs) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values: (N, 3, P, P), the patches of all images one after another, each in order frame, row, column.
            grid_thws: (M, 3) integers, (t, h, w) of each image in patches; N = sum of t * h * w. M may be 0.

        Returns:
            `last_hidden_state` (N, D) after the final norm, and `pooler_output`, a tuple of M tensors
            (h/2 * w/2, 4, D). On request `hidden_states` (the input of the first block, then each block's output, the
            last one normalised) and, with eager attention, `attentions`: per layer a tuple of M tensors (A, L, L).

        Raises:
            ShapeError: wrong shapes, or patches that do not add up.
            MediaError: an image with an impossible grid; the message says which.
        """
        side = self.config.patch_size
        if pixel_values.dim() != 4 or pixel_values.shape[1:] != (3, side, side):
            raise ShapeError(
                f"pixel_values must have shape (patches, 3, {side}, {side}), got {tuple(pixel_values.shape)}; "
                "pass it as the image processor returned it"
            )
        layout = self.read_layout(grid_thws, pixel_values.shape[0])
        # The dtype only: under offloading the weights' device is known inside their own module.
        hidden_states = self.patch_embed(pixel_values.to(self.patch_embed.pos_emb.weight.dtype), layout)
        hidden_states = self.encoder(hidden_states, layout)
        merged = merge_patches(hidden_states, layout, self.config.merge_kernel_size)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=tuple(merged))
