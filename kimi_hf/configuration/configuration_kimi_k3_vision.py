"""`KimiK3VisionConfig`: the MoonViT3d tower of Kimi K3 and its projector, in the released `vision_config` schema."""

from typing import Any, ClassVar

from transformers.utils import logging

from ..errors import ConfigError
from .base import ReleasedSchemaConfig
from .checks import layer_count, one_of, positive_float, positive_int, spread, string, switch

logger = logging.get_logger(__name__)

_SIZES = (
    "patch_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
    "init_pos_emb_time",
    "vt_hidden_size",
    "vt_num_hidden_layers",
    "vt_num_attention_heads",
    "vt_intermediate_size",
    "qkv_hidden_size",
    "mm_hidden_size",
    "text_hidden_size",
)
_SWITCHES = ("attn_bias", "linear_bias", "patch_embed_proj_bias")
# The one way of computing each part that the release holds weights for.
_ONLY = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
}
# Names the released code carries without reading them: these functions are fixed in it.
_FIXED_ACTIVATIONS = {"activation_func": "gelu_pytorch_tanh", "projector_hidden_act": "gelu"}


class KimiK3VisionConfig(ReleasedSchemaConfig):
    """Configuration of the vision tower and projector (`model_type` "kimi_k3_vision"); defaults are the released values.

    `vt_*` size the tower: width D = `vt_hidden_size`, `vt_num_attention_heads` heads that share `qkv_hidden_size`
    (so the head size is `qkv_hidden_size / vt_num_attention_heads`, not D / heads). `init_pos_emb_*` is the learned
    position grid and the number of frames a clip may have. `merge_kernel_size` patches become one token of
    `text_hidden_size`. `attn_bias` gives `wqkv` and `wo` a bias, `linear_bias` the MLP, `patch_embed_proj_bias` the
    patch embedding; all are off in the release.

    `_attn_implementation` of a released file names the kernel its authors used. It is kept and written back, and
    chooses nothing here: pass `attn_implementation=` to `from_pretrained`, or call `set_attn_implementation`.
    `activation_func` and `projector_hidden_act` are kept too; the release does not read them either.

    Raises:
        ConfigError: a field that contradicts another or asks for a part the release does not have; the message
            starts with the field's name.

    Source: `vision_config` of the released Kimi-K3 `config.json`.
    """

    model_type = "kimi_k3_vision"
    base_config_key = "vision_config"
    attribute_map = {
        "hidden_size": "vt_hidden_size",
        "num_hidden_layers": "vt_num_hidden_layers",
        "num_attention_heads": "vt_num_attention_heads",
        "intermediate_size": "vt_intermediate_size",
    }
    _part_key: ClassVar[str] = "vision_config"
    # Not a released field: readable by default, written to a file only when somebody sets it.
    initializer_range: ClassVar[float] = 0.02

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"
    vt_hidden_size: int = 1024
    vt_num_hidden_layers: int = 27
    vt_num_attention_heads: int = 12
    qkv_hidden_size: int = 1536
    vt_intermediate_size: int = 4096
    norm_type: str = "rmsnorm"
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    merge_kernel_size: list[int] | tuple[int, int] = (2, 2)
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    mm_hidden_size: int = 1024
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5
    text_hidden_size: int = 7168

    def __post_init__(self, **kwargs: Any):
        # A note about somebody's kernel, not a choice for this machine; `_given` keeps it for the round trip.
        kwargs.pop("_attn_implementation", None)
        if isinstance(self.merge_kernel_size, tuple):
            self.merge_kernel_size = list(self.merge_kernel_size)
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def _is_nameless_part(cls, outer: str | None) -> bool:
        return outer == "kimi_k3"

    @property
    def head_dim(self) -> int:
        """Size of one attention head of the tower."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    def check(self) -> None:
        """Raise `ConfigError` if a field contradicts another or names something that does not exist."""
        super().check()
        for name in _SIZES:
            positive_int(name, getattr(self, name))
        layer_count("vt_num_hidden_layers", self.vt_num_hidden_layers)
        for name in _SWITCHES:
            switch(name, getattr(self, name))
        for name, value in _ONLY.items():
            one_of(name, getattr(self, name), (value,))
        for name, value in _FIXED_ACTIVATIONS.items():
            string(name, getattr(self, name))
            if getattr(self, name) != value:
                logger.warning_once(
                    f"{name} is {getattr(self, name)!r}, but like the released model this one always computes {value!r}"
                )
        positive_float("projector_ln_eps", self.projector_ln_eps)
        spread("initializer_range", self.initializer_range)
        kernel = self.merge_kernel_size
        if not isinstance(kernel, (list, tuple)) or len(kernel) != 2:
            raise ConfigError(f"merge_kernel_size must hold two integers (rows, columns), got {kernel!r}")
        for side in kernel:
            positive_int("merge_kernel_size", side)
        self._check_agreement()

    def _check_agreement(self) -> None:
        if self.qkv_hidden_size % self.vt_num_attention_heads:
            raise ConfigError(
                f"qkv_hidden_size {self.qkv_hidden_size} is not divisible by vt_num_attention_heads "
                f"{self.vt_num_attention_heads}; every head needs the same size"
            )
        if self.head_dim % 4:
            raise ConfigError(
                f"qkv_hidden_size {self.qkv_hidden_size} over vt_num_attention_heads {self.vt_num_attention_heads} "
                f"gives a head size of {self.head_dim}; the 2-D rotary embedding needs a multiple of 4"
            )
        if self.vt_hidden_size % 2:
            raise ConfigError(
                f"vt_hidden_size must be even, its halves are the sines and cosines of time, got {self.vt_hidden_size}"
            )
        if self.mm_hidden_size != self.vt_hidden_size:
            raise ConfigError(
                f"mm_hidden_size {self.mm_hidden_size} differs from vt_hidden_size {self.vt_hidden_size}; the projector "
                "reads what the tower writes, so set both to the same value"
            )
