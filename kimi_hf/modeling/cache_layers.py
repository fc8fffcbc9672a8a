"""The cache's layers: one that grows by a latent (or a key and a value) per token, and one of constant size."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from ..errors import CacheError
from .sequence import padded_layout
from .token_store import TokenStore, decode, encode, held_bytes, out_of_inference_mode

# How many of the newest tokens a recurrent layer can take back while it records, unless told otherwise.
ROLLBACK_TOKENS = 64


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

    def tensors(self) -> list[Tensor]:
        return [*self.parts, *([] if self.real is None else [self.real])]


class GrowingLayer(DynamicLayer):
    """Two tensors that grow along time: latent and shared key of MLA, or keys and values of softmax attention.

    `keys` (B, heads, S, width) and `values` (B, heads, S, width'); appending a token copies that token only.
    """

    is_compileable = False
    names = ("keys", "values")

    def __init__(self, **kwargs):
        self.store: TokenStore | None = None
        self.dtype = self.device = None
        super().__init__(**kwargs)

    @property
    def keys(self) -> Tensor | None:
        return None if self.store is None else self._read()[0]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._refuse(value)

    @property
    def values(self) -> Tensor | None:
        return None if self.store is None else self._read()[1]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._refuse(value)

    def _refuse(self, value: Tensor | None) -> None:
        # transformers' base class sets both to None at first; whatever else is meant must go through the store.
        if value is not None:
            raise CacheError("keys and values of a KimiCache layer are read only; use update, crop or reorder_cache")

    def _write(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """What is stored of new tokens."""
        return [key, value]

    def _read(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, of what is stored."""
        return self.store.views[0], self.store.views[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append T tokens; returns all of them, (B, heads, S + T, width) each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = self._write(key_states, value_states)
        if self.store is None:
            self.store = TokenStore([x[:, :, :0] for x in new])
        self.store.append(new)
        return self._read()

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        return 0 if self.store is None else self.store.length

    @property
    def rows(self) -> int | None:
        """How many rows are held, None before the first token."""
        return None if self.store is None else self.store.rows

    @property
    def shared(self) -> bool:
        """Whether a fork looks at the same memory."""
        return self.store is not None and self.store.shared

    def get_seq_length(self) -> int:
        return self.tokens

    def reset(self) -> None:
        self.store, self.is_initialized = None, False

    def crop(self, tokens_to_remove: int) -> None:
        removed = abs(tokens_to_remove)
        if removed > self.tokens:
            raise CacheError(f"crop({tokens_to_remove}) asks for more than the {self.tokens} cached tokens")
        if removed:
            self.store.crop(self.tokens - removed)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a copy that `function` makes."""
        if self.store is not None:
            self.store.map(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

    def offload(self) -> None:
        if self.store is not None:
            self.store.move("cpu")

    def prefetch(self) -> None:
        if self.store is not None and self.store.device != self.device:
            self.store.move(self.device)

    def fork(self) -> "GrowingLayer":
        """A layer that goes on independently from the same tokens."""
        other = self._empty()
        if self.is_initialized:
            other.dtype, other.device, other.is_initialized = self.dtype, self.device, True
        other.store = None if self.store is None else self.store.fork()
        return other

    def _empty(self) -> "GrowingLayer":
        return type(self)()

    def allocated(self) -> dict[str, int]:
        """Bytes held, spare capacity included."""
        return {"tokens": 0 if self.store is None else self.store.nbytes()}

    def bytes_per_token(self) -> int:
        """Bytes that one more token of one row takes; 0 before the first."""
        if self.store is None:
            return 0
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in self.store.views)

    def stored(self) -> dict[str, Tensor]:
        """The tensors that make up this layer's memory."""
        return {} if self.store is None else dict(zip(self.names, self.store.views, strict=True))

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Take over tensors that `stored` gave; `dtype` is the activations'."""
        if tensors:
            self.store = TokenStore([tensors[name] for name in self.names])
            self.dtype, self.device, self.is_initialized = dtype, self.store.device, True


class QuantizedLayer(GrowingLayer):
    """As `GrowingLayer`, but 8 bits a number, with one scale per token and group of channels (`token_store.encode`).

    A token is rounded once, when it comes, and read back rounded in every forward, its own included: what is computed
    does not depend on how a text was cut into pieces.

    Args:
        kind: a key of `token_store.CODES`.
    """

    names = ("keys", "keys_scale", "values", "values_scale")

    def __init__(self, kind: str = "int8"):
        super().__init__()
        self.kind = kind

    def _write(self, key: Tensor, value: Tensor) -> list[Tensor]:
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise CacheError(
                "a cache with latent_dtype rounds, and no gradient passes through that; use torch.no_grad(), or leave "
                "latent_dtype out"
            )
        return [*encode(key, self.kind), *encode(value, self.kind)]

    def _read(self) -> tuple[Tensor, Tensor]:
        keys, key_scales, values, value_scales = self.store.views
        return (
            decode(keys, key_scales, self.kind, self.dtype),
            decode(values, value_scales, self.kind, self.dtype),
        )

    def _empty(self) -> "QuantizedLayer":
        return QuantizedLayer(self.kind)


class DeltaStateLayer(LinearAttentionLayer):
    """The memory of a recurrent mixer: a state and, where it has convolutions, their window, both of constant size.

    `recurrent_states[0]` (B, H, K, V) fp32 (linear attention: (B, H, K, V + 1), its normaliser being the last column),
    `conv_states[0]` (B, C, W) raw convolution inputs, oldest first, or None.

    After `activate_past_recording` the two stand at a point up to `rollback_tokens` tokens back, and the inputs since
    then are kept: taking tokens back drops their inputs, and the next forward runs over those that remain. That is
    exact, and its memory is bounded.
    """

    is_compileable = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rollback_tokens = ROLLBACK_TOKENS
        self.log: TokenInputs | None = None
        self.settled = False
        self.shared = False
        self.tokens = 0

    def run(self, inputs: TokenInputs, advance, layout) -> Tensor:
        """Continue the recurrence over `inputs` and keep what the next forward needs; returns (B, T, P)."""
        window, state = self._memory()
        if self.record_past:
            o = self._run_recording(inputs, advance, window, state)
        else:
            # A state that a fork or a graph still looks at must not be written over.
            inplace = state is not None and not (self.shared or torch.is_grad_enabled() or state.requires_grad)
            o, window, state = advance(inputs, window, state, layout, keep=True, inplace=inplace)
            self._keep(window, state)
        self.tokens += inputs.length
        return o

    def memory_to_step(self) -> tuple[Tensor, Tensor] | None:
        """(window, state) for one token that the caller runs over them in place, counted here; None if they must stay.

        They must while past tokens can be taken back, while a fork or a graph still looks at them, and before there
        are any.
        """
        window, state = self._memory()
        free = window is not None and not (self.record_past or self.shared or torch.is_grad_enabled())
        if not free or state.requires_grad or not (window.is_contiguous() and state.is_contiguous()):
            return None
        self.tokens += 1
        return window, state

    def _run_recording(self, inputs: TokenInputs, advance, window, state) -> Tensor:
        pending = 0 if self.log is None else self.log.length
        new = inputs.length
        if pending:
            inputs = inputs.after(self.log)
        total = inputs.length
        absorbed = max(pending if self.settled else 0, total - self.rollback_tokens)
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
        for states in (self.conv_states, self.recurrent_states):
            if states[0] is not None:
                states[0] = out_of_inference_mode(states[0])
        return self.conv_states[0], self.recurrent_states[0]

    def _keep(self, window: Tensor | None, state: Tensor) -> None:
        if self.shared:
            self.shared = state is self.recurrent_states[0]
        self.conv_states[0], self.recurrent_states[0] = window, state
        self.is_conv_states_initialized[0] = window is not None
        self.is_recurrent_states_initialized[0] = self.has_previous_state[0] = True
        self.dtype, self.device = state.dtype, state.device
        if window is not None:
            self.conv_kernel_size[0], self.dtype = window.shape[-1], window.dtype

    @property
    def rows(self) -> int | None:
        """How many rows are held, None before the first token."""
        held = self._tensors()
        return held[0].shape[0] if held else None

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens; 0 declares everything so far final."""
        removed = abs(tokens_to_remove)
        if removed and not self.record_past:
            raise CacheError(
                f"crop({tokens_to_remove}): a recurrent state cannot go back unless it was recording. Call "
                "cache.activate_past_recording() before the tokens that may be taken back, or fork() the cache there"
            )
        kept = 0 if self.log is None else self.log.length
        if removed > kept:
            raise CacheError(
                f"crop({tokens_to_remove}) reaches further back than the {kept} tokens a recurrent layer keeps "
                f"(at most rollback_tokens={self.rollback_tokens}, since the last crop); recompute the prefix instead"
            )
        if self.log is not None:
            self.log = self.log.slice(0, kept - removed) if kept > removed else None
        self.settled = True
        self.tokens -= removed

    def reset(self) -> None:
        self.log, self.settled, self.shared, self.tokens = None, False, False, 0
        self.conv_states[0] = self.recurrent_states[0] = None
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = False
        self.has_previous_state[0] = False

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a copy that `function` makes."""
        if self.is_conv_states_initialized[0]:
            self.conv_states[0] = function(self.conv_states[0])
        if self.is_recurrent_states_initialized[0]:
            self.recurrent_states[0] = function(self.recurrent_states[0])
        if self.log is not None:
            self.log = self.log.map(function)
        self.shared = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

    def fork(self) -> "DeltaStateLayer":
        """A layer that goes on independently from the same state; the next token of either makes a new state."""
        other = DeltaStateLayer()
        if self.has_previous_state[0]:
            other._keep(*self._memory())
        other.log, other.settled, other.tokens = self.log, self.settled, self.tokens
        other.record_past, other.rollback_tokens = self.record_past, self.rollback_tokens
        self.shared = other.shared = bool(self._tensors())
        return other

    def _tensors(self) -> list[Tensor]:
        held = [x for x in (self.conv_states[0], self.recurrent_states[0]) if x is not None]
        return held + ([] if self.log is None else self.log.tensors())

    def allocated(self) -> dict[str, int]:
        """Bytes held, by kind."""
        kinds = {"state": self.recurrent_states[0], "window": self.conv_states[0]}
        report = {name: 0 if x is None else held_bytes([x]) for name, x in kinds.items()}
        return report if self.log is None else {**report, "rollback": held_bytes(self.log.tensors())}

    def bytes_per_token(self) -> int:
        """Nothing here grows."""
        return 0

    def stored(self) -> dict[str, Tensor]:
        """The tensors that make up this layer's memory."""
        tensors = {}
        if self.recurrent_states[0] is not None:
            tensors["state"] = self.recurrent_states[0]
        if self.conv_states[0] is not None:
            tensors["window"] = self.conv_states[0]
        if self.log is not None:
            tensors.update({f"log.{i}": x for i, x in enumerate(self.log.parts)})
            if self.log.real is not None:
                tensors["log.real"] = self.log.real
        return tensors

    def restore(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Take over tensors that `stored` gave."""
        if "state" in tensors:
            self._keep(tensors.get("window"), tensors["state"])
        count = sum(name.startswith("log.") and name != "log.real" for name in tensors)
        if count:
            self.log = TokenInputs(tuple(tensors[f"log.{i}"] for i in range(count)), tensors.get("log.real"))
