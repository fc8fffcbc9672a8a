"""What a field may hold. Every function raises `ConfigError` with the field's name, its value and what is expected."""

import difflib
import math
from collections.abc import Collection
from typing import Any

from ..errors import ConfigError

# Sizes are products of these in 64-bit indices, and no model is near it.
LARGEST = 2**31 - 1
MOST_LAYERS = 100_000
# Names of the dtypes that weights can have; configs must do without torch.
DTYPES = ("float64", "double", "float32", "float", "float16", "half", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether `value` is a number that a float can hold: neither infinite, nor NaN, nor a bool."""
    if isinstance(value, float):
        return math.isfinite(value)
    return _is_int(value) and abs(value) <= LARGEST


def positive_int(name: str, value: Any, minimum: int = 1, maximum: int = LARGEST) -> None:
    """An integer from `minimum` to `maximum`."""
    if not _is_int(value) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    if value > maximum:
        raise ConfigError(f"{name} must be an integer of at most {maximum}, got {value!r}")


def layer_count(name: str, value: Any) -> None:
    """A number of layers, of which there are lists."""
    positive_int(name, value, maximum=MOST_LAYERS)


def optional_int(name: str, value: Any, minimum: int = 1) -> None:
    """None, or an integer as `positive_int` takes it."""
    if value is not None:
        positive_int(name, value, minimum)


def whole_number(name: str, value: Any) -> None:
    """An integer of any sign."""
    if not _is_int(value) or abs(value) > LARGEST:
        raise ConfigError(f"{name} must be an integer, got {value!r}")


def positive_float(name: str, value: Any) -> None:
    """A finite number above zero."""
    if not _is_number(value) or not value > 0:
        raise ConfigError(f"{name} must be a number above 0 and finite, got {value!r}")


def spread(name: str, value: Any) -> None:
    """A finite number of at least zero, as a standard deviation is."""
    if not _is_number(value) or not value >= 0:
        raise ConfigError(f"{name} must be a number of at least 0 and finite, got {value!r}")


def fraction(name: str, value: Any) -> None:
    """A number in [0, 1)."""
    if not _is_number(value) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be a number in [0, 1), got {value!r}")


def lower_bound(name: str, value: Any) -> None:
    """A bound of KDA's log decay: None for the softplus gate, else a number in [-5, 0)."""
    if value is not None and not (_is_number(value) and -5.0 <= value < 0):
        raise ConfigError(f"{name} must lie in [-5, 0), or be null for the softplus gate, got {value!r}")


def switch(name: str, value: Any) -> None:
    """True or False; 1 and "true" are neither."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def string(name: str, value: Any) -> None:
    """A string."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, got {value!r}")


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """One of the strings in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def known_names(given: Collection[str], known: Collection[str], what: str) -> None:
    """Names of which each is one of `known`; `what` says what they name."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"{name} is not {what}{f'; did you mean {near[0]}?' if near else '; leave it out'}")


def kinds(name: str, value: Any, allowed: Collection[str], layers: int) -> None:
    """A list that names one of `allowed` for each of the `layers` layers."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} must be a list with an entry per layer, got {value!r}")
    for kind in value:
        one_of(f"every entry of {name}", kind, allowed)
    if len(value) != layers:
        raise ConfigError(f"{name} holds {len(value)} entries, but num_hidden_layers is {layers}; give one per layer")


def token_id(name: str, value: Any) -> None:
    """None, or the id of a token."""
    if value is not None and not (_is_int(value) and 0 <= value <= LARGEST):
        raise ConfigError(f"{name} must be a token's id (an integer of at least 0) or null, got {value!r}")


def token_ids(name: str, value: Any) -> None:
    """None, the id of a token, or a list of at least one id."""
    if not isinstance(value, (list, tuple)):
        return token_id(name, value)
    if not value:
        raise ConfigError(f"{name} is an empty list; give the ids of the tokens that end a text, or null for none")
    for one in value:
        if one is None:
            raise ConfigError(f"{name} must hold token ids, got {value!r}")
        token_id(f"every entry of {name}", one)


def special_tokens(config: Any, vocab_size: int | None = None) -> None:
    """`pad_token_id`, `bos_token_id` and `eos_token_id` of `config`.

    The padding token must stand in the vocabulary, if one is given: its embedding is held at zero.
    """
    token_id("pad_token_id", config.pad_token_id)
    token_id("bos_token_id", config.bos_token_id)
    token_ids("eos_token_id", config.eos_token_id)
    if vocab_size is not None and config.pad_token_id is not None and config.pad_token_id >= vocab_size:
        raise ConfigError(
            f"pad_token_id is {config.pad_token_id}, outside vocab_size ({vocab_size}); give the id of a token, or null"
        )


def class_names(name: str, value: Any) -> None:
    """None, or a list of strings."""
    if value is not None and not (isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)):
        raise ConfigError(f"{name} must be a list of class names or null, got {value!r}")


def dtype(name: str, value: Any) -> None:
    """None, a name, or torch's own object."""
    own = type(value).__module__ == "torch" and type(value).__name__ == "dtype"  # without importing torch
    if value is not None and not own and value not in DTYPES:
        raise ConfigError(f"{name} must be one of {', '.join(DTYPES)}, got {value!r}")
