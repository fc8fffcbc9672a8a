"""`KimiK3Config`: the released Kimi K3 repository, text and vision."""

from typing import Any

from ..errors import ConfigError
from .base import ReleasedSchemaConfig, remembers_fields
from .configuration_kimi_k3_vision import KimiK3VisionConfig
from .configuration_kimi_linear import KimiLinearConfig
from .quantization import QUANT_METHOD, released, route


@remembers_fields
class KimiK3Config(ReleasedSchemaConfig):
    """Configuration of Kimi K3 (`model_type` "kimi_k3"): a text decoder, a vision tower, and how they meet.

    `quantization_config` of the released file lies in `text_config`; while the model is in memory it is held here,
    routed to our quantizer, and written back where it was found.

    Source: released `config.json` of Kimi-K3.
    """

    model_type = "kimi_k3"
    keys_to_ignore_at_inference = ["past_key_values"]
    sub_configs_defaults = {"text_config": KimiLinearConfig, "vision_config": KimiK3VisionConfig}

    text_config: dict | KimiLinearConfig | None = None
    vision_config: dict | KimiK3VisionConfig | None = None
    ignore_index: int = -100
    media_placeholder_token_id: int = 163605
    image_placeholder: str = "<|kimi_image_placeholder|>"
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        quantization = kwargs.pop("quantization_config", None)
        super().__post_init__(**kwargs)
        inner = self.text_config.__dict__.pop("quantization_config", None)
        self.text_config.__dict__.get("_given", {}).pop("quantization_config", None)
        if quantization is None:
            quantization = inner
        if quantization is not None:
            self.quantization_config = route(quantization)
        if self.tie_word_embeddings != self.text_config.tie_word_embeddings:
            raise ConfigError(
                f"tie_word_embeddings is {self.tie_word_embeddings}, but text_config.tie_word_embeddings is "
                f"{self.text_config.tie_word_embeddings}; the two must agree"
            )

    def restore_quantization(self) -> None:
        """Take the file's `quantization_config` again if it was overwritten by None.

        `from_pretrained(..., quantization_config=None)` does that, and packed experts would find no place then.
        """
        given = self.__dict__.get("_given", {})
        text = given.get("text_config")
        block = given.get("quantization_config") or (
            text.get("quantization_config") if isinstance(text, dict) else None
        )
        if self.__dict__.get("quantization_config", block) is None and block is not None:
            self.quantization_config = route(block)

    def to_dict(self) -> dict[str, Any]:
        return self._with_released_quantization(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        return self._with_released_quantization(super().to_diff_dict())

    @staticmethod
    def _with_released_quantization(output: dict[str, Any]) -> dict[str, Any]:
        block = output.get("quantization_config")
        if isinstance(block, dict) and block.get("quant_method") == QUANT_METHOD:
            output["text_config"]["quantization_config"] = released(output.pop("quantization_config"))
        return output
