"""What is kept along time: one small object per layer, in one cache that knows its length, its bytes and its limits.

Softmax layers keep a compressed latent per token (or keys and values), recurrent layers a state of constant size. The
layers derive from transformers' own, so `generate`, beam search and offloading find what they expect; transformers'
plain `DynamicCache` and `StaticCache` work with the models too, except that a plain recurrent layer cannot be rolled
back.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from ..configuration.cache_plan import LayerMemory, cache_plan
from ..errors import CacheError
from .cache_layers import ROLLBACK_TOKENS, DeltaStateLayer, GrowingLayer, QuantizedLayer, TokenInputs
from .token_store import check_kind, held_bytes

__all__ = ["DeltaStateLayer", "GrowingLayer", "KimiCache", "QuantizedLayer", "TokenInputs", "recurrent_layer"]


class _PlainRecurrentLayer:
    """transformers' own linear-attention layer, with the interface of `DeltaStateLayer`."""

    def __init__(self, layer: LinearAttentionLayer):
        self.layer = layer

    def run(self, inputs: TokenInputs, advance, layout) -> Tensor:
        layer = self.layer
        if layer.record_past:
            raise CacheError(
                "assisted decoding needs to take tokens back, and a plain DynamicCache cannot do that for recurrent "
                "layers. Pass past_key_values=kimi_hf.KimiCache(model.config), or none at all"
            )
        known = layer.has_previous_state[0]
        window = layer.conv_states[0] if known else None
        state = layer.recurrent_states[0] if known else None
        o, window, state = advance(inputs, window, state, layout, keep=True)
        if not known:
            layer.lazy_initialization(conv_states=window, recurrent_states=state)
            layer.device = state.device
        # Copied into place: a static layer's addresses must not change.
        if window is not None:
            layer.conv_states[0].copy_(window)
        layer.recurrent_states[0].copy_(state)
        layer.has_previous_state[0] = True
        return o

    def memory_to_step(self) -> tuple[Tensor, Tensor] | None:
        """See `DeltaStateLayer.memory_to_step`."""
        layer = self.layer
        if not layer.has_previous_state[0] or layer.record_past or torch.is_grad_enabled():
            return None
        window, state = layer.conv_states[0], layer.recurrent_states[0]
        return (window, state) if window.is_contiguous() and state.is_contiguous() else None


def recurrent_layer(cache: Cache | None, layer_idx: int) -> DeltaStateLayer | _PlainRecurrentLayer | None:
    """The cache layer a recurrent mixer continues from.

    Raises:
        CacheError: the cache was made without the model's config, or for a model with other layers.
    """
    if cache is None:
        return None
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if isinstance(layer, DeltaStateLayer):
        return layer
    if isinstance(layer, LinearAttentionLayer):
        return _PlainRecurrentLayer(layer)
    raise CacheError(
        f"layer {layer_idx} keeps a recurrent state, but this {type(cache).__name__} has "
        f"{'no such layer' if layer is None else type(layer).__name__} there. Make it from the model's config: "
        "kimi_hf.KimiCache(model.config)"
    )


class KimiCache(DynamicCache):
    """The cache of a hybrid decoder: a growing latent per softmax layer, a constant state per recurrent layer.

    A `DynamicCache` by type, since libraries ask for that, but with layers of our own.

    `generate` makes one by itself. Its length is counted once per forward, so every layer sees the same number.

    Args:
        config: the model's configuration (a composite one is asked for its text part).
        latent_dtype: None keeps latents, keys and values as computed; "int8" or "float8_e4m3fn" rounds them to 8 bits.
        rollback_tokens: how many tokens `crop` can take back after `activate_past_recording` on a recurrent model.
        offloading: keep what grows in CPU memory between uses (on an accelerator).
    Raises:
        CacheError: an unknown `latent_dtype`, or no positive `rollback_tokens`.
    """

    def __init__(
        self,
        config,
        *,
        latent_dtype: str | None = None,
        rollback_tokens: int = ROLLBACK_TOKENS,
        offloading: bool = False,
    ):
        self.latent_dtype = check_kind(latent_dtype)
        self.plan = cache_plan(config)
        Cache.__init__(self, layers=[self._new_layer(memory) for memory in self.plan], offloading=offloading)
        self.length = 0
        self.image_tokens = 0.0  # feature rows of images among the cached tokens, per row on average
        self.padding_mask: Tensor | None = None
        self._fits: tuple | None = None
        self.keep_rollback(rollback_tokens)

    def _new_layer(self, memory: LayerMemory) -> GrowingLayer | DeltaStateLayer:
        if memory.kind == "state":
            return DeltaStateLayer()
        return GrowingLayer() if self.latent_dtype is None else QuantizedLayer(self.latent_dtype)

    @property
    def rows(self) -> int | None:
        """How many rows (sequences) are held, None before the first token."""
        return next((layer.rows for layer in self.layers if layer.rows is not None), None)

    @property
    def batch_size(self) -> int:
        return self.rows or -1

    def check_model(self, config, batch: int) -> None:
        """Raise unless this cache belongs to a model of `config` and holds `batch` rows, all layers equally far.

        Raises:
            CacheError: what does not fit, and what to do.
        """
        if self._fits is None or self._fits[0] is not config or self._fits[1] != config.num_hidden_layers:
            check_plans(self.plan, cache_plan(config), "this cache")
            self._fits = config, config.num_hidden_layers
        if self.rows not in (None, batch):
            raise CacheError(
                f"the cache holds {self.rows} rows and the input has {batch}; use batch_repeat_interleave or "
                "batch_select_indices, or start from an empty cache"
            )
        astray = [i for i, layer in enumerate(self.layers) if layer.tokens != self.length]
        if astray:
            raise CacheError(
                f"layer {astray[0]} holds {self.layers[astray[0]].tokens} tokens and the cache {self.length}: an earlier "
                "forward with this cache did not finish. Go on from a fork() made before it, or reset() and start again"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer that grows; returns all it holds.

        Raises:
            CacheError: that layer keeps a recurrent state, or does not exist; or `offloading` with tensors on the CPU.
        """
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, GrowingLayer):
            raise CacheError(
                f"layer {layer_idx} attends to all tokens, but this KimiCache has "
                f"{'no such layer' if layer is None else type(layer).__name__} there: it was made for another model. "
                "Make it from the model's config: kimi_hf.KimiCache(model.config)"
            )
        if self.offloading and key_states.device.type == "cpu":
            raise CacheError(
                "offloading=True keeps tokens in CPU memory while an accelerator computes, but this model is on the CPU; "
                "leave it out, everything is in CPU memory already"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def remember_padding(self, attention_mask: Tensor | dict | None) -> None:
        """Keep which cached tokens are padding, for later forwards that come without a mask; (B, length) or None."""
        plain = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
        self.padding_mask = attention_mask.bool() if plain else None

    def advance(self, tokens: int) -> None:
        """Count the tokens of a finished forward."""
        self.length += tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def keep_rollback(self, tokens: int) -> None:
        """Let recurrent layers take back up to `tokens` tokens while they record."""
        if not isinstance(tokens, int) or tokens < 1:
            raise CacheError(f"rollback_tokens is {tokens!r}, expected a positive number of tokens")
        self.rollback_tokens = tokens
        for layer in self._recurrent():
            layer.rollback_tokens = tokens

    def _recurrent(self) -> list[DeltaStateLayer]:
        return [layer for layer in self.layers if isinstance(layer, DeltaStateLayer)]

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: crop(-n) removes n; crop(0) declares everything so far final.

        Raises:
            CacheError: a positive number, more tokens than are cached, or more than the recurrent layers kept; nothing
                changes then.
        """
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop({tokens_to_remove}): give minus the number of tokens to take back, as transformers does"
            )
        removed = -tokens_to_remove
        if removed > self.length:
            raise CacheError(f"crop({tokens_to_remove}) asks for more than the {self.length} cached tokens")
        # Recurrent layers may refuse, and refuse before they change; asked first, they leave the cache whole.
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, DeltaStateLayer)):
            layer.crop(-removed)
        self.length -= removed
        if self.padding_mask is not None:
            self.padding_mask = self.padding_mask[:, : self.length]

    def reset(self) -> None:
        super().reset()
        self.length, self.image_tokens, self.padding_mask = 0, 0.0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_mask(lambda mask: mask.index_select(0, beam_idx.to(mask.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_mask(lambda mask: mask.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_mask(lambda mask: mask[indices.to(mask.device) if isinstance(indices, Tensor) else indices])

    def _map_mask(self, function) -> None:
        if self.padding_mask is not None:
            self.padding_mask = function(self.padding_mask)

    @property
    def is_compileable(self) -> bool:
        return False

    def fork(self) -> "KimiCache":
        """A second cache that goes on independently from the same tokens.

        Nothing is copied now: what is there stays shared until one side writes. This cache goes on appending in place
        behind what the fork sees; the fork copies when its first token comes.
        """
        return self._rebuilt([layer.fork() for layer in self.layers], self.padding_mask)

    def __deepcopy__(self, memo: dict) -> "KimiCache":
        """A cache that shares nothing; graphs are left behind, so it works under autograd too."""
        layers = []
        for memory, layer in zip(self.plan, self.layers, strict=True):
            other = self._new_layer(memory)
            other.restore({name: x.detach().clone() for name, x in layer.stored().items()}, layer.dtype)
            if isinstance(layer, DeltaStateLayer):
                other.record_past, other.settled, other.tokens = layer.record_past, layer.settled, layer.tokens
                other.rollback_tokens = layer.rollback_tokens
            layers.append(other)
        mask = None if self.padding_mask is None else self.padding_mask.clone()
        other = memo[id(self)] = self._rebuilt(layers, mask)
        return other

    def _rebuilt(self, layers: list, padding_mask: Tensor | None) -> "KimiCache":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, layers=layers, padding_mask=padding_mask)
        return other

    def to_safetensors(self, path: str | os.PathLike) -> Path:
        """Write everything a fresh process needs to go on identically; see `cache_files.write_cache`."""
        from .cache_files import write_cache

        return write_cache(self, path)

    @classmethod
    def from_safetensors(
        cls, path: str | os.PathLike, config, *, device: str | torch.device | None = None
    ) -> "KimiCache":
        """Read what `to_safetensors` wrote, for a model of `config`; see `cache_files.read_cache`.

        Raises:
            CacheError: the file is no such cache, is damaged, or belongs to another model.
        """
        from .cache_files import read_cache

        return read_cache(cls, path, config, device)

    def memory_report(self) -> dict[str, Any]:
        """What is allocated now, in bytes, and what one more token costs.

        Returns:
            `layers` (one row per layer), `by_kind` (tokens, state, window, rollback, padding), `total`, `length`,
            `bytes_per_token` of one row, and `shared`: how much of it a fork looks at too.
        """
        layers = [{"layer": i, "kind": type(x).__name__, **x.allocated()} for i, x in enumerate(self.layers)]
        totals: dict[str, int] = {}
        shared = 0
        for row, layer in zip(layers, self.layers, strict=True):
            sizes = {kind: size for kind, size in row.items() if kind not in ("layer", "kind")}
            for kind, size in sizes.items():
                totals[kind] = totals.get(kind, 0) + size
            shared += sum(sizes.values()) if layer.shared else 0
        if self.padding_mask is not None:
            totals["padding"] = held_bytes([self.padding_mask])
        return {
            "layers": layers,
            "by_kind": totals,
            "total": sum(totals.values()),
            "length": self.length,
            "bytes_per_token": sum(layer.bytes_per_token() for layer in self.layers),
            "shared": shared,
        }


def check_plans(found: tuple[LayerMemory, ...], expected: tuple[LayerMemory, ...], what: str) -> None:
    """Raise `CacheError` naming the first difference between a cache's layers and a model's."""
    advice = "Make one from the model's config: kimi_hf.KimiCache(model.config)"
    if len(found) != len(expected):
        raise CacheError(f"{what} is for {len(found)} layers, the model has {len(expected)}. {advice}")
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, value in theirs.to_dict().items():
            if getattr(ours, name) != value:
                raise CacheError(f"{what} has {name}={getattr(ours, name)} in layer {i}, the model {value}. {advice}")
