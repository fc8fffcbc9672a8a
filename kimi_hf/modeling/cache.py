"""What is kept along time: one small object per layer, in one cache that knows its length, its bytes and its limits.

Softmax layers keep a compressed latent per token (or keys and values), recurrent layers a state of constant size. The
layers derive from transformers' own, so `generate`, beam search and offloading find what they expect; transformers'
plain `DynamicCache` and `StaticCache` work with the models too, except that a plain recurrent layer cannot be rolled
back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from ..errors import CacheError
from .sequence import padded_layout

# How many of the newest tokens a recurrent layer can take back while it records.
ROLLBACK_TOKENS = 64
_FIRST_CAPACITY = 64


@dataclass
class TokenInputs:
    """What a recurrence consumes, token by token, before anything depends on other tokens.

    Attributes:
        parts: tensors (B, T, C), in token order.
        real: (B, T) bool, or None when no token is padding.
    """

    parts: tuple[Tensor, ...]
    real: Tensor | None = None

    @property
    def length(self) -> int:
        return self.parts[0].shape[1]

    def slice(self, start: int, stop: int) -> "TokenInputs":
        """Tokens start..stop."""
        return self.map(lambda x: x[:, start:stop])

    def after(self, earlier: "TokenInputs") -> "TokenInputs":
        """`earlier`'s tokens followed by these."""
        real = None
        if self.real is not None or earlier.real is not None:
            masks = [
                x.parts[0].new_ones(x.parts[0].shape[:2], dtype=torch.bool) if x.real is None else x.real
                for x in (earlier, self)
            ]
            real = torch.cat(masks, dim=1)
        pairs = zip(earlier.parts, self.parts, strict=True)
        return TokenInputs(tuple(torch.cat(pair, dim=1) for pair in pairs), real)

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenInputs":
        """`function` applied to every tensor, the mask included."""
        real = None if self.real is None else function(self.real)
        return TokenInputs(tuple(function(x) for x in self.parts), real)

    def layout(self):
        """How to lay these tokens out, see `sequence.py`."""
        return padded_layout(self.real, self.length)


class GrowingLayer(DynamicLayer):
    """Two tensors that grow along time: latent and shared key of MLA, or keys and values of softmax attention.

    `keys` (B, heads, S, width) and `values` (B, heads, S, width') are views into buffers that double when full, so
    appending a token copies that token only. While gradients are recorded the layer concatenates instead.
    """

    is_compileable = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._buffers: list[Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append T tokens; returns all of them, (B, heads, S + T, width) each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[3])
            self.values = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[3])
        if torch.is_grad_enabled() and any(x.requires_grad for x in (key_states, value_states, self.keys)):
            self._buffers = None
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
            return self.keys, self.values
        length, new = self.keys.shape[2], key_states.shape[2]
        if self._buffers is None or not self._fits(length + new):
            self._grow(length + new)
        self._buffers[0][:, :, length : length + new] = key_states
        self._buffers[1][:, :, length : length + new] = value_states
        self.keys, self.values = (buffer[:, :, : length + new] for buffer in self._buffers)
        return self.keys, self.values

    def _fits(self, length: int) -> bool:
        buffer = self._buffers[0]
        return (
            buffer.shape[2] >= length
            and buffer.shape[0] == self.keys.shape[0]
            and buffer.device == self.keys.device
            and buffer.data_ptr() == self.keys.data_ptr()
        )

    def _grow(self, length: int) -> None:
        """Move to buffers that hold at least `length` tokens and as many again."""
        capacity = max(_FIRST_CAPACITY, 1 << (length - 1).bit_length())
        held = self.keys.shape[2]
        buffers = []
        for states in (self.keys, self.values):
            buffer = states.new_empty(*states.shape[:2], capacity, states.shape[3])
            buffer[:, :, :held] = states
            buffers.append(buffer)
        self._buffers = buffers

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def reset(self) -> None:
        self._buffers = None
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        removed = abs(tokens_to_remove)
        if removed > self.get_seq_length():
            raise CacheError(f"crop({tokens_to_remove}) asks for more than the {self.get_seq_length()} cached tokens")
        super().crop(-removed)

    def offload(self) -> None:
        self._buffers = None
        super().offload()

    def allocated(self) -> dict[str, int]:
        """Bytes held, spare capacity included."""
        held = self._buffers or [x for x in (self.keys, self.values) if x is not None]
        return {"tokens": sum(x.numel() * x.element_size() for x in held)}

    def stored(self) -> dict[str, Tensor]:
        """The tensors that make up this layer's memory."""
        return {} if not self.is_initialized else {"keys": self.keys, "values": self.values}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over tensors that `stored` gave."""
        if tensors:
            self.lazy_initialization(tensors["keys"], tensors["values"])
            self.keys, self.values = tensors["keys"], tensors["values"]


class DeltaStateLayer(LinearAttentionLayer):
    """The memory of a recurrent mixer: a state and, where it has convolutions, their window, both of constant size.

    `recurrent_states[0]` (B, H, K, V) fp32 (linear attention: (B, H, K, V + 1), its normaliser being the last column),
    `conv_states[0]` (B, C, W) raw convolution inputs, oldest first, or None.

    After `activate_past_recording` the two stand at a point up to `ROLLBACK_TOKENS` tokens back, and the inputs since
    then are kept: taking tokens back drops their inputs, and the next forward runs over those that remain. That is
    exact, and its memory is bounded.
    """

    is_compileable = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.log: TokenInputs | None = None
        self.settled = False

    def run(self, inputs: TokenInputs, advance, layout) -> Tensor:
        """Continue the recurrence over `inputs` and keep what the next forward needs; returns (B, T, P)."""
        window, state = self._memory()
        if not self.record_past:
            inplace = state is not None and not torch.is_grad_enabled()
            o, window, state = advance(inputs, window, state, layout, keep=True, inplace=inplace)
            self._keep(window, state)
            return o
        return self._run_recording(inputs, advance, layout, window, state)

    def _run_recording(self, inputs, advance, layout, window, state) -> Tensor:
        pending = 0 if self.log is None else self.log.length
        new = inputs.length
        if pending:
            inputs = inputs.after(self.log)
        total = inputs.length
        absorbed = max(pending if self.settled else 0, total - ROLLBACK_TOKENS)
        outputs = []
        if absorbed > 0:
            first = inputs.slice(0, absorbed)
            o, window, state = advance(first, window, state, first.layout(), keep=True)
            self._keep(window, state)
            outputs.append(o)
        if absorbed < total:
            rest = inputs.slice(absorbed, total)
            o, _, _ = advance(rest, window, state, rest.layout(), keep=False)
            outputs.append(o)
            self.log = rest.map(lambda x: x.detach().clone())
        else:
            self.log = None
        self.settled = False
        return torch.cat(outputs, dim=1)[:, -new:]

    def _memory(self) -> tuple[Tensor | None, Tensor | None]:
        """(window, state) as they stand, None before the first token."""
        if not self.has_previous_state[0]:
            return None, None
        return self.conv_states[0], self.recurrent_states[0]

    def _keep(self, window: Tensor | None, state: Tensor) -> None:
        self.conv_states[0], self.recurrent_states[0] = window, state
        self.is_conv_states_initialized[0] = window is not None
        self.is_recurrent_states_initialized[0] = self.has_previous_state[0] = True
        self.dtype, self.device = state.dtype, state.device
        if window is not None:
            self.conv_kernel_size[0], self.dtype = window.shape[-1], window.dtype

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens; 0 declares everything so far final."""
        removed = abs(tokens_to_remove)
        if removed and not self.record_past:
            raise CacheError(
                f"crop({tokens_to_remove}): a recurrent state cannot go back unless it was recording. Call "
                "cache.activate_past_recording() before the tokens that may be taken back"
            )
        kept = 0 if self.log is None else self.log.length
        if removed > kept:
            raise CacheError(
                f"crop({tokens_to_remove}) reaches further back than the {kept} tokens a recurrent layer keeps "
                f"(at most {ROLLBACK_TOKENS}, since the last crop); recompute the prefix instead"
            )
        if self.log is not None:
            self.log = self.log.slice(0, kept - removed) if kept > removed else None
        self.settled = True

    def reset(self) -> None:
        self.log, self.settled = None, False
        self.conv_states[0] = self.recurrent_states[0] = None
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = False
        self.has_previous_state[0] = False

    def _map(self, function) -> None:
        if self.is_conv_states_initialized[0]:
            self.conv_states[0] = function(self.conv_states[0])
        if self.is_recurrent_states_initialized[0]:
            self.recurrent_states[0] = function(self.recurrent_states[0])
        if self.log is not None:
            self.log = self.log.map(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

    def allocated(self) -> dict[str, int]:
        """Bytes held, by kind."""
        size = {name: x.numel() * x.element_size() for name, x in self.stored().items()}
        report = {"state": size.get("state", 0), "window": size.get("window", 0)}
        log = sum(bytes_ for name, bytes_ in size.items() if name.startswith("log."))
        return {**report, "rollback": log} if log else report

    def stored(self) -> dict[str, Tensor]:
        """The tensors that make up this layer's memory."""
        tensors = {}
        if self.is_recurrent_states_initialized[0]:
            tensors["state"] = self.recurrent_states[0]
        if self.is_conv_states_initialized[0]:
            tensors["window"] = self.conv_states[0]
        if self.log is not None:
            tensors.update({f"log.{i}": x for i, x in enumerate(self.log.parts)})
            if self.log.real is not None:
                tensors["log.real"] = self.log.real
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over tensors that `stored` gave."""
        if "state" in tensors:
            self._keep(tensors.get("window"), tensors["state"])
        parts = tuple(tensors[name] for name in sorted(tensors) if name.startswith("log.") and name != "log.real")
        if parts:
            self.log, self.record_past, self.settled = TokenInputs(parts, tensors.get("log.real")), True, True


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
    """

    def __init__(self, config):
        config = config.get_text_config(decoder=True)
        kinds = {"full_attention": GrowingLayer, "linear_attention": DeltaStateLayer}
        Cache.__init__(self, layers=[kinds[kind]() for kind in config.layer_types])
        self.length = 0
        self.padding_mask: Tensor | None = None

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

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest |tokens_to_remove| tokens; 0 declares everything so far final.

        Raises:
            CacheError: more tokens than are cached, or more than the recurrent layers kept; nothing changes then.
        """
        removed = abs(tokens_to_remove)
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
        self.length, self.padding_mask = 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_mask(lambda mask: mask.index_select(0, beam_idx.to(mask.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_mask(lambda mask: mask.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_mask(lambda mask: mask[indices])

    def _map_mask(self, function) -> None:
        if self.padding_mask is not None:
            self.padding_mask = function(self.padding_mask)

    @property
    def is_compileable(self) -> bool:
        return False

    def memory_report(self) -> dict[str, Any]:
        """Bytes per layer and kind, and their sum, as allocated now."""
        layers = [{"layer": i, "kind": type(x).__name__, **x.allocated()} for i, x in enumerate(self.layers)]
        totals: dict[str, int] = {}
        for row in layers:
            for kind, size in row.items():
                if kind not in ("layer", "kind"):
                    totals[kind] = totals.get(kind, 0) + size
        return {"layers": layers, "by_kind": totals, "total": sum(totals.values()), "length": self.length}
