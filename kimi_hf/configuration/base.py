"""What every configuration of this package shares: the released schema survives a round trip, field for field.

transformers drops generation fields found in a model config, writes only what differs from a default, and adds
fields of its own. A released file means something to servers exactly as it stands, so a config here remembers
which fields it was given and writes all of them again: with their present value where the field is known, and
verbatim where it is not.

A field may be changed after construction, by assignment or by a keyword of `from_pretrained`. What was only filled in
then follows, and `check` is asked again before a model is built and before a file is written.
"""

import copy
import functools
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from ..errors import ConfigError
from .checks import class_names, dtype

# Written by transformers for its own bookkeeping; never part of what a user gave.
_BOOKKEEPING = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "torch_dtype")


@dataclass
class _Memory:
    """What an instance knows beside its fields.

    Attributes:
        given: the keyword arguments it was built from.
        filled: fields that nobody gave, and what was put there.
        notes: what a class remembers for itself.
        complete: whether construction is over.
    """

    given: dict[str, Any] = field(default_factory=dict)
    filled: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    complete: bool = False


class ReleasedSchemaConfig(PreTrainedConfig):
    """Base of the configs: reads and writes the released schema without losing or inventing fields.

    A subclass fills in what follows from other fields in `_fill` (with `_derive`), and says in `check` what cannot be.
    """

    # Spellings of other implementations, translated to released fields before anything is checked.
    _translated: ClassVar[tuple[str, ...]] = ()
    # The field under which a composite file holds this configuration.
    _part_key: ClassVar[str] = ""

    def __init_subclass__(cls, *args, **kwargs):
        super().__init_subclass__(*args, **kwargs)
        init = cls.__init__

        @functools.wraps(init)
        def __init__(self, *args, **kwargs):
            first = "_memory" not in self.__dict__
            if first:
                given = {k: copy.deepcopy(v) for k, v in kwargs.items() if not isinstance(v, PreTrainedConfig)}
                object.__setattr__(self, "_memory", _Memory(given))
                self._refuse_other_model(kwargs)
            init(self, *args, **kwargs)
            if first:
                self._memory.complete = True

        cls.__init__ = __init__

    def __post_init__(self, **kwargs):
        dtype("dtype", self.dtype)
        dtype("torch_dtype", kwargs.get("torch_dtype"))
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise `ConfigError` if a field contradicts another or names something that does not exist."""
        dtype("dtype", self.dtype)
        class_names("architectures", self.architectures)

    def _fill(self) -> None:
        """Give every field that follows from others its value, and raise `ConfigError` where that cannot be told."""

    def _derive(self, name: str, value: Any) -> None:
        """Fill in `name`, unless somebody gave it."""
        if self.__dict__.get(name) is None or name in self._memory.filled:
            self.__dict__[name] = self._memory.filled[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        memory = self.__dict__.get("_memory")
        if memory is not None and memory.complete:
            self._follow(self.attribute_map.get(name, name))

    def __copy__(self):
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__, _memory=copy.deepcopy(self._memory))
        return twin

    def _follow(self, name: str) -> None:
        """Let what was filled in follow the field `name`, which was changed; nonsense waits for `check`."""
        if name not in self._declared_defaults():
            return
        self._memory.filled.pop(name, None)
        try:
            self._fill()
        except ConfigError:
            return

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        """As transformers', but of a composite file the part that this class reads.

        Raises:
            ConfigError: a file of another model.
        """
        found, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls._own_part(found), unused

    @classmethod
    def _dict_from_json_file(cls, json_file) -> dict[str, Any]:
        found = super()._dict_from_json_file(json_file)
        if not isinstance(found, dict) or not found:
            what = "an empty object" if found == {} else f"a JSON {type(found).__name__}"
            raise ConfigError(f"{json_file} holds {what}, expected the fields of {cls.__name__}; restore the file")
        return found

    @classmethod
    def _own_part(cls, found: dict[str, Any]) -> dict[str, Any]:
        """The fields of this class in those of a file: all of them, or a part of a composite."""
        if not isinstance(found, dict):
            raise ConfigError(f"{cls.__name__} is read from an object of fields, got {found!r}")
        outer, key = found.get("model_type"), cls._part_key
        if outer == cls.model_type or not key or not (key in found or outer == "kimi_k3"):
            cls._refuse_other_model(found)
            return found
        part = found.get(key)
        if not isinstance(part, dict):
            raise ConfigError(
                f"{key} must be an object with the fields of {cls.__name__}, got {part!r}; correct config.json"
            )
        inner = part.get("model_type")
        if inner != cls.model_type and not (inner is None and cls._is_nameless_part(outer)):
            raise ConfigError(
                f"{key}.model_type is {inner!r}, but {cls.__name__} reads {cls.model_type!r}; correct config.json, or name the "
                "right class for the folder"
            )
        return dict(part)

    @classmethod
    def _refuse_other_model(cls, fields: dict[str, Any]) -> None:
        found = fields.get("model_type")
        if found is not None and found != cls.model_type:
            raise ConfigError(
                f"model_type is {found!r}, but {cls.__name__} reads {cls.model_type!r}; correct config.json, or name the class "
                "that belongs to it"
            )

    @classmethod
    def _is_nameless_part(cls, outer: str | None) -> bool:
        """Whether a composite of `model_type` `outer` holds this configuration without a `model_type` of its own."""
        return False

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "ReleasedSchemaConfig":
        """As transformers', and checked again with the fields that `kwargs` change.

        A dictionary for a part or for `linear_attn_config` changes the fields it names and leaves the others.

        Raises:
            ConfigError: a contradiction, in the dictionary or after the changes.
        """
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        known = {*cls._declared_defaults(), *cls.attribute_map, *cls._translated}
        changes = {name: kwargs.pop(name) for name in [*kwargs] if name in known}
        if kwargs.get("dtype") == "auto":
            kwargs.pop("dtype")
        if "quantization_config" in kwargs and kwargs["quantization_config"] is None:
            kwargs.pop("quantization_config")  # says nothing about the checkpoint's own
        own = dict(cls._own_part(config_dict))
        config, unused = super().from_dict(own, return_unused_kwargs=True, **kwargs)
        config._change(changes)
        config.check()
        return (config, unused) if wants_unused else config

    @classmethod
    def refuse_fields_of_parts(cls, changes: dict[str, Any]) -> None:
        """Raise `ConfigError` for a keyword that is a field of a part, which transformers would hand to the model."""
        for key, part in cls.sub_configs.items():
            for name in changes.keys() & part._declared_defaults().keys() - cls._declared_defaults().keys():
                raise ConfigError(f"{name} is a field of {key}; give {key}={{{name!r}: {changes[name]!r}}}")

    def _change(self, changes: dict[str, Any]) -> None:
        """Set fields; of a part or of an object, set those it names."""
        for name, value in changes.items():
            current = getattr(self, name, None)
            if isinstance(value, dict) and isinstance(current, ReleasedSchemaConfig):
                if value.get("model_type", current.model_type) != current.model_type:
                    raise ConfigError(
                        f"{name}.model_type is {value['model_type']!r}, but {type(current).__name__} reads {current.model_type!r}"
                    )
                if value.get("quantization_config") is not None:
                    raise ConfigError(
                        f"quantization_config cannot be given in {name}; give it as an argument of its own"
                    )
                part = copy.deepcopy(current)
                part._change({k: v for k, v in value.items() if k not in ("model_type", "quantization_config")})
                value = part
            elif isinstance(value, dict) and isinstance(current, dict):
                value = {**current, **value}
            setattr(self, name, value)

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """As transformers', after `check`: what is written can be read again.

        Raises:
            ConfigError: a contradiction; nothing is written then.
        """
        self.check()
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """All fields with the released spelling, those that only servers read as they were given, and nothing else.

        Fields that every transformers config has appear where they were given or differ from transformers' default.
        """
        output = super().to_dict()
        output.pop("_memory", None)
        given = self._memory.given
        for name, value in _library_defaults().items():
            if name in output and name not in given and output[name] == value:
                del output[name]
        for key, value in given.items():
            if key not in output and self._is_kept_verbatim(key):
                output[key] = value
        for key, value in self.__dict__.items():
            if isinstance(value, ReleasedSchemaConfig):
                output[key] = value._stamped(value.to_dict())
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds.

        A config read from a file gives back the fields of that file and those changed since; one built by hand
        gives all its fields, because another reader's defaults may differ from ours.
        """
        output, given = self.to_dict(), self._memory.given
        defaults = self._declared_defaults() if "model_type" in given else {}
        for name, value in defaults.items():
            if name not in given and name in output and output[name] == value:
                del output[name]
        output.pop("_name_or_path", None)
        for key, value in self.__dict__.items():
            if isinstance(value, ReleasedSchemaConfig):
                output[key] = value._nested_diff_dict()
        return output

    def _nested_diff_dict(self) -> dict[str, Any]:
        """`to_diff_dict` inside a composite: without what the composite says for its parts, unless the file had it."""
        output = self._stamped(self.to_diff_dict())
        given = self._memory.given
        for key in ("model_type", "dtype"):
            if given and key not in given and (key == "dtype" or self._is_nameless_part("kimi_k3")):
                output.pop(key, None)
        return output

    def _stamped(self, output: dict[str, Any]) -> dict[str, Any]:
        """`output` with the bookkeeping of the file that the part was read from, and none of this process."""
        output.pop("transformers_version", None)
        given = self._memory.given
        output.update({key: given[key] for key in _BOOKKEEPING if key in given and key != "torch_dtype"})
        return output

    @classmethod
    @functools.cache
    def _declared_defaults(cls) -> dict[str, Any]:
        """Default of every field that our own classes declare."""
        ours = [base for base in cls.__mro__ if issubclass(base, ReleasedSchemaConfig)]
        names = {name for base in ours for name in base.__dict__.get("__annotations__", {})}
        return {f.name: f.default for f in fields(cls) if f.name in names and f.default is not MISSING}

    def _is_kept_verbatim(self, key: str) -> bool:
        if key == "quantization_config":  # may have been removed since, by dequantising
            return self._memory.given[key] is None
        return (
            key not in _BOOKKEEPING
            and key not in self._translated
            and key not in self.attribute_map
            and key not in ("attn_implementation", "experts_implementation", "dtype", "output_attentions")
        )


@functools.cache
def _library_defaults() -> dict[str, Any]:
    """What `to_dict` says of fields that every transformers config has."""
    defaults = PreTrainedConfig().to_dict()
    return {name: value for name, value in defaults.items() if name not in ("model_type", "transformers_version")}
