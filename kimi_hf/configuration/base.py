"""What every configuration of this package shares: the released schema survives a round trip, field for field.

transformers drops generation fields found in a model config, writes only what differs from a default, and adds
fields of its own. A released file means something to servers exactly as it stands, so a config here remembers
which fields it was given and writes all of them again: with their present value where the field is known, and
verbatim where it is not.
"""

import copy
import functools
from dataclasses import MISSING, fields
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from ..errors import ConfigError

# Written by transformers for its own bookkeeping; never part of what a user gave.
_BOOKKEEPING = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "torch_dtype")


def remembers_fields(cls: type) -> type:
    """Class decorator: keep a copy of the keyword arguments that an instance was built from, in `_given`."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        given = {k: copy.deepcopy(v) for k, v in kwargs.items() if not isinstance(v, PreTrainedConfig)}
        object.__setattr__(self, "_given", given)
        init(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


class ReleasedSchemaConfig(PreTrainedConfig):
    """Base of the configs: reads and writes the released schema without losing or inventing fields."""

    # Spellings of other implementations, translated to released fields before anything is checked.
    _translated: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields, with the released spelling, and the fields that only servers read as they were given."""
        output = super().to_dict()
        given = output.pop("_given", {})
        for key, value in given.items():
            if key not in output and self._is_kept_verbatim(key):
                output[key] = value
        for key, value in self.__dict__.items():
            if isinstance(value, ReleasedSchemaConfig):
                output[key] = value.to_dict()
                output[key].pop("transformers_version", None)
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds.

        A config read from a file gives back the fields of that file and those changed since; one built by hand
        gives all its fields, because another reader's defaults may differ from ours.
        """
        full = self.to_dict()
        given = self.__dict__.get("_given", {})
        defaults = {} if "model_type" not in given else self._declared_defaults()
        output = {}
        for key, value in {
            **super().to_diff_dict(),
            **{k: full[k] for k in self._declared_defaults() if k in full},
        }.items():
            if key in given or key not in defaults or value != defaults[key]:
                output[key] = value
        output.pop("_given", None)
        for key in given:
            if key in full and key not in output and key not in _BOOKKEEPING:
                output[key] = full[key]
        for key, value in self.__dict__.items():
            if isinstance(value, ReleasedSchemaConfig):
                output[key] = value._nested_diff_dict()
        if output.get("dtype", "") is None and "dtype" not in given:
            output.pop("dtype")
        return output

    def _nested_diff_dict(self) -> dict[str, Any]:
        """`to_diff_dict` inside a composite: without what transformers writes for itself, unless the file had it."""
        output = self.to_diff_dict()
        given = self.__dict__.get("_given", {})
        output.pop("transformers_version", None)
        if given:
            # The released vision part has neither; the composite says both for it.
            for key in {"model_type", "dtype"} - given.keys():
                output.pop(key, None)
        output.update({key: given[key] for key in _BOOKKEEPING if key in given and key != "torch_dtype"})
        return output

    @classmethod
    def _declared_defaults(cls) -> dict[str, Any]:
        """Default of every field that our own classes declare."""
        ours = [base for base in cls.__mro__ if issubclass(base, ReleasedSchemaConfig)]
        names = {name for base in ours for name in base.__dict__.get("__annotations__", {})}
        return {f.name: f.default for f in fields(cls) if f.name in names and f.default is not MISSING}

    def _is_kept_verbatim(self, key: str) -> bool:
        return (
            key not in _BOOKKEEPING
            and key not in self._translated
            and key not in self.attribute_map
            and key not in ("attn_implementation", "experts_implementation", "dtype", "output_attentions")
            and key != "quantization_config"  # may have been removed since, by dequantising
        )


def positive_int(name: str, value: Any, minimum: int = 1) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def positive_float(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")


def fraction(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be a number in [0, 1), got {value!r}")


def one_of(name: str, value: Any, allowed: tuple) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
