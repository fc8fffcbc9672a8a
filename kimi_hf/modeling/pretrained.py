"""What all our models share towards transformers: loading, saving, `load_state_dict`, and the cache of `generate`."""

from transformers.generation import GenerationMixin

from ..errors import CacheError
from .cache import KimiCache


class KimiPreTrainedMixin:
    """Loading and saving in the released layout."""


class KimiGenerationMixin:
    """Makes `generate` use our own cache, and says clearly which caches cannot hold a recurrent state."""

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        kind = generation_config.cache_implementation
        if kind == "quantized":
            raise CacheError(
                "cache_implementation='quantized' keeps quantised keys and values, which a recurrent state is not; leave "
                "it out (the latent cache is already small) or use 'static'"
            )
        ours = model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False
        if not ours or kind not in (None, "dynamic"):
            return GenerationMixin._prepare_cache_for_generation(
                self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        cache = KimiCache(self.config)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache
