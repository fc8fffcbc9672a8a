"""The one exception hierarchy: every error a user can cause derives from `KimiHfError`.

Messages name the field or tensor, say what was found and what was expected, and end with what to do.
"""


class KimiHfError(ValueError):
    """Root of all errors that kimi_hf raises for bad input."""


class ConfigError(KimiHfError):
    """A configuration contradicts itself or asks for something that does not exist."""


class ShapeError(KimiHfError):
    """A tensor handed to an operation or a model has the wrong shape, dtype or device."""


class CheckpointError(KimiHfError):
    """A checkpoint on disk is damaged, incomplete, or not in a layout that can be read."""


class CacheError(KimiHfError):
    """A cache is asked for something it does not hold, or was made for another model."""


class BackendError(KimiHfError):
    """A named backend cannot serve the call; the message says why."""


class ChatError(KimiHfError):
    """A conversation, tool call or completion cannot be rendered or parsed."""


class MediaError(KimiHfError):
    """An image cannot be read, is too large, or does not fit the text that names it."""
