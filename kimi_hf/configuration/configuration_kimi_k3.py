"""`KimiK3Config`: the released Kimi K3 repository, text and vision."""

import copy
from typing import Any

from ..errors import ConfigError
from .base import ReleasedSchemaConfig
from .checks import special_tokens, string, switch, token_id, whole_number
from .configuration_kimi_k3_vision import KimiK3VisionConfig
from .configuration_kimi_linear import KimiLinearConfig
from .quantization import agreed, check_block, is_released_mxfp4, released, route

_PARTS = {"text_config": KimiLinearConfig, "vision_config": KimiK3VisionConfig}


class KimiK3Config(ReleasedSchemaConfig):
    """Configuration of Kimi K3 (`model_type` "kimi_k3"): a text decoder, a vision tower, and how they meet.

    `quantization_config` of the released file lies in `text_config`; re-exports have it at the top. While the model is in
    memory it is held here, routed to our quantizer, and written back where it was found.

    Raises:
        ConfigError: a field that contradicts another, of either part too; the message names it.

    Source: released `config.json` of Kimi-K3.
    """

    model_type = "kimi_k3"
    keys_to_ignore_at_inference = ["past_key_values"]
    sub_configs_defaults = dict(_PARTS)

    text_config: dict | KimiLinearConfig | None = None
    vision_config: dict | KimiK3VisionConfig | None = None
    ignore_index: int = -100
    media_placeholder_token_id: int | None = 163605
    image_placeholder: str = "<|kimi_image_placeholder|>"
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        quantization = kwargs.pop("quantization_config", None)
        check_block(quantization)
        self._check_given_parts()
        super().__post_init__(**kwargs)
        self._hold_quantization(quantization)
        self.check()

    def _check_given_parts(self) -> None:
        """Raise unless both parts are what a file or a caller may give; their fields are checked by their own classes."""
        given = self._memory.given
        for name, cls in _PARTS.items():
            part = getattr(self, name)
            from_file = "model_type" in given and name in given
            if not isinstance(part, (dict, cls)) and (part is not None or from_file):
                raise ConfigError(
                    f"{name} must be an object with the fields of {cls.__name__}, got {part!r}; correct config.json (for text "
                    "alone, load the folder with KimiLinearForCausalLM)"
                )
            if isinstance(part, dict):
                found = part.get("model_type")
                nameless = found is None and (not from_file or cls._is_nameless_part(self.model_type))
                if found != cls.model_type and not nameless:
                    raise ConfigError(
                        f"{name}.model_type is {found!r}, but {cls.__name__} reads {cls.model_type!r}; correct config.json"
                    )

    def _hold_quantization(self, outer: Any) -> None:
        """Take the block out of the text part, where transformers would not look for it, and note where it stood."""
        inner = self.text_config.__dict__.pop("quantization_config", None)
        self.text_config._memory.given.pop("quantization_config", None)
        found = {"": outer, "text_config": inner}
        block = agreed(outer, inner)
        if block is not None:
            self._memory.notes["quantization_places"] = [place for place, value in found.items() if value is not None]
            self.quantization_config = route(block)

    def check(self) -> None:
        """Raise `ConfigError` if a field contradicts another or names something that does not exist."""
        super().check()
        for name, cls in _PARTS.items():
            part = getattr(self, name)
            if not isinstance(part, cls):
                raise ConfigError(f"{name} must be a {cls.__name__} or an object with its fields, got {part!r}")
            part.check()
        special_tokens(self)
        token_id("media_placeholder_token_id", self.media_placeholder_token_id)
        whole_number("ignore_index", self.ignore_index)
        string("image_placeholder", self.image_placeholder)
        switch("tie_word_embeddings", self.tie_word_embeddings)
        if self.tie_word_embeddings != self.text_config.tie_word_embeddings:
            raise ConfigError(
                f"tie_word_embeddings is {self.tie_word_embeddings}, but text_config.tie_word_embeddings is "
                f"{self.text_config.tie_word_embeddings}; the two must agree"
            )
        check_block(self.__dict__.get("quantization_config"))

    def to_dict(self) -> dict[str, Any]:
        return self._with_released_quantization(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        return self._with_released_quantization(super().to_diff_dict())

    def _with_released_quantization(self, output: dict[str, Any]) -> dict[str, Any]:
        """Put the block where it was found; a new one of ours where the release has it, a foreign one at the top."""
        block = self.__dict__.get("quantization_config")
        if block is None:
            return output
        output.pop("quantization_config", None)
        block = released(block)
        default = "text_config" if is_released_mxfp4(block) else ""
        for place in self._memory.notes.get("quantization_places", [default]):
            (output[place] if place else output)["quantization_config"] = copy.deepcopy(block)
        return output
