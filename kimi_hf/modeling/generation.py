"""What `generate` needs of our models: the right cache for every way of decoding, or words that say why there is none."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.utils import is_torchdynamo_compiling

from ..errors import CacheError
from .cache import KimiCache
from .cache_layers import ROLLBACK_TOKENS
from .sequence import cached_length

_PAGED = (
    "continuous batching keeps keys and values in pages, and a recurrent state is no list of keys; use generate() with a "
    "left-padded batch (rows give the tokens they give alone), or one KimiCache.fork() per request"
)
_LONGEST_DRAFT = 1024


class CountingStaticCache(StaticCache):
    """A static cache for models of recurrent layers only: their states have a constant size, so it just counts tokens.

    Args:
        config: the model's configuration.
        max_cache_len: ignored by layers without tokens; kept because transformers asks for it.
    """

    def __init__(self, config, max_cache_len: int, **kwargs):
        super().__init__(config=config, max_cache_len=max_cache_len, **kwargs)
        # A tensor, so that a compiled forward is the same for every length.
        self.counted: Tensor | None = None

    def advance(self, tokens: int) -> None:
        """Count the tokens of a finished forward."""
        if self.counted is None:
            device = next((layer.device for layer in self.layers if layer.device is not None), None)
            self.counted = torch.zeros((), dtype=torch.long, device=device)
            if not is_torchdynamo_compiling():
                torch._dynamo.mark_static_address(self.counted)
        self.counted.add_(tokens)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        return 0 if self.counted is None else self.counted

    def reset(self) -> None:
        super().reset()
        if self.counted is not None:
            self.counted.zero_()


class KimiGenerationMixin:
    """Makes `generate` use our own cache, and says clearly what cannot hold a recurrent state."""

    @property
    def generation_config(self) -> GenerationConfig | None:
        """transformers' generation settings.

        A released `text_config` carries the library's own defaults (`max_length` 20 and others), which nobody chose: made
        from the model's configuration, settings leave them unset, or `generate` would warn that two lengths were given.
        """
        return self.__dict__.get("_generation_config")

    @generation_config.setter
    def generation_config(self, value: GenerationConfig | None) -> None:
        if getattr(value, "_from_model_config", False):
            for name, default in value._get_default_generation_params().items():
                if getattr(value, name, None) == default:
                    setattr(value, name, None)
            value._original_object_hash = hash(value)
        self.__dict__["_generation_config"] = value

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict[str, Any], generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        kind = generation_config.cache_implementation
        given = model_kwargs.get("past_key_values") is not None
        if given and not isinstance(model_kwargs["past_key_values"], tuple):
            cached_length(model_kwargs["past_key_values"])  # raises for a cache that could not count
        if given or generation_config.use_cache is False or kind in ALL_STATIC_CACHE_IMPLEMENTATIONS:
            if not given and "offloaded" in (kind or "") and self.device.type == "cpu":
                raise CacheError(
                    f"cache_implementation={kind!r} moves a cache between an accelerator and the CPU, and this model is on "
                    "the CPU; use 'static' or leave it out"
                )
            return GenerationMixin._prepare_cache_for_generation(
                self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        cache = KimiCache(
            self.config,
            latent_dtype=_latent_dtype(kind, generation_config.cache_config),
            # On the CPU everything is where offloading would put it.
            offloading=kind == "offloaded" and self.device.type != "cpu",
        )
        if generation_config.is_assistant:
            cache.activate_past_recording()
            cache.keep_rollback(_longest_draft(generation_config.max_new_tokens, self.generation_config))
        model_kwargs["past_key_values"] = cache
        return None

    def _prepare_static_cache(self, cache_implementation: str, batch_size: int, max_cache_len: int, *args, **kwargs):
        text = self.config.get_text_config(decoder=True)
        if "full_attention" in text.layer_types:
            return GenerationMixin._prepare_static_cache(
                self, cache_implementation, batch_size, max_cache_len, *args, **kwargs
            )
        return CountingStaticCache(text, max_cache_len)

    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        """transformers' candidate generator; recurrent layers are told how long its drafts can get."""
        generator = GenerationMixin._get_candidate_generator(self, generation_config, *args, **kwargs)
        cache = kwargs.get("model_kwargs", {}).get("past_key_values")
        if isinstance(cache, KimiCache):
            tokens = getattr(generator, "num_assistant_tokens", None) or getattr(generator, "num_output_tokens", 0)
            longest = _longest_draft(tokens, getattr(generator, "assistant_generation_config", None))
            cache.keep_rollback(max(cache.rollback_tokens, longest))
        return generator

    def generate_batch(self, *args, **kwargs):
        """Continuous batching is refused: it has pages for keys and values only.

        Raises:
            CacheError: always.
        """
        raise CacheError(f"generate_batch: {_PAGED}")

    def init_continuous_batching(self, *args, **kwargs):
        """See `generate_batch`."""
        raise CacheError(f"init_continuous_batching: {_PAGED}")

    def continuous_batching_context_manager(self, *args, **kwargs):
        """See `generate_batch`."""
        raise CacheError(f"continuous_batching_context_manager: {_PAGED}")


def _longest_draft(tokens: float | None, settings) -> int:
    """How many tokens a recurrent layer must be able to take back when drafts have `tokens` tokens at first."""
    schedule = getattr(settings, "num_assistant_tokens_schedule", None) or "constant"
    # Other schedules lengthen the draft whenever one was accepted whole.
    return max(ROLLBACK_TOKENS, int(tokens or 0) + 2, 0 if schedule == "constant" else _LONGEST_DRAFT)


def _latent_dtype(kind: str | None, options: dict[str, Any] | None) -> str | None:
    """How generation options ask for latents to be stored: `cache_config={"latent_dtype": ...}`; "quantized" is int8."""
    options = dict(options or {})
    default = "int8" if kind == "quantized" else None
    chosen = options.pop("latent_dtype", default)
    if options:
        raise CacheError(
            f"cache_config has {sorted(options)}, which means nothing to a KimiCache; the one key is 'latent_dtype', "
            "'int8' or 'float8_e4m3fn'"
        )
    return chosen
