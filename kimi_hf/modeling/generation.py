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
        settings = dict(kwargs.pop("model_kwargs", {}))
        settings.pop("cached_tokens", None)  # says nothing about the assistant's cache
        generator = GenerationMixin._get_candidate_generator(
            self, generation_config, *args, model_kwargs=settings, **kwargs
        )
        cache = settings.get("past_key_values")
        if isinstance(cache, KimiCache):
            tokens = getattr(generator, "num_assistant_tokens", None) or getattr(generator, "num_output_tokens", 0)
            longest = _longest_draft(tokens, getattr(generator, "assistant_generation_config", None))
            cache.keep_rollback(max(cache.rollback_tokens, longest))
        return generator

    def _prefill(self, input_ids: Tensor, generation_config, model_kwargs: dict[str, Any], *args, **kwargs):
        """transformers' first forward, refused when the cache already holds all that was given."""
        embeds = model_kwargs.get("inputs_embeds")
        whole = input_ids if embeds is None else embeds
        if embeds is not None or _mask_length(model_kwargs, generation_config) == input_ids.shape[1]:
            _check_something_new(model_kwargs.get("past_key_values"), whole.shape[1])
        return GenerationMixin._prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _assisted_decoding(self, input_ids: Tensor, *args, generation_config: GenerationConfig, **model_kwargs):
        """transformers' assisted decoding, which needs the whole sequence as token ids."""
        if model_kwargs.get("inputs_embeds") is not None:
            # Its first forward would take the embeddings without the draft, and judge the draft by other logits.
            raise CacheError(
                "assisted decoding and prompt lookup need the prompt as input_ids alone; drop inputs_embeds"
            )
        cache = model_kwargs.get("past_key_values")
        held, given = int(cached_length(cache)), input_ids.shape[1]
        covered = _mask_length(model_kwargs, generation_config)
        if held and covered not in (-1, given):
            raise CacheError(
                f"input_ids have {given} tokens and attention_mask {covered}, with {held} cached; assisted decoding goes on "
                "from a cache when both cover the whole sequence, cached tokens included"
            )
        _check_something_new(cache, given)
        if held:
            model_kwargs["cached_tokens"] = held
        return GenerationMixin._assisted_decoding(
            self, input_ids, *args, generation_config=generation_config, **model_kwargs
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values=None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        cached_tokens: int | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        """transformers' inputs of one step.

        `cached_tokens`, how many tokens were cached when assisted decoding began, is ours: its first step would feed
        them a second time.
        """
        if cached_tokens is not None and is_first_iteration and next_sequence_length is None:
            next_sequence_length = input_ids.shape[1] - cached_tokens
        return GenerationMixin.prepare_inputs_for_generation(
            self,
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

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


def _mask_length(model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> int:
    """Columns of the mask that `generate` was given, or made, also when it dropped one of ones only; -1 without any."""
    mask = model_kwargs.get("attention_mask")
    return mask.shape[1] if isinstance(mask, Tensor) else getattr(generation_config, "_mask_length", -1)


def _check_something_new(cache, given: int) -> None:
    """Raise if a sequence of `given` tokens adds nothing to `cache`; transformers would then feed tokens twice."""
    held = cached_length(cache)
    if held and given <= held:
        raise CacheError(
            f"the cache holds {int(held)} tokens and the sequence given has {given}, so there is none to go on from; give "
            "the whole sequence with at least one new token, or the new tokens with an attention_mask over the whole "
            "sequence, or crop the cache"
        )


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
