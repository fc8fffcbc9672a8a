"""Errors of chat rendering that are also of the type the released encoder raises.

The release lets Python's own errors through (a missing key is a KeyError, an unknown effort an AssertionError). Code
that catches those keeps working, and code that catches `KimiHfError` catches them all.
"""

from ..errors import ChatError


class ChatKeyError(ChatError, KeyError):
    """A message, content part or tool call lacks a key it must have."""

    def __str__(self) -> str:  # KeyError would show the message in quotes, with its line breaks escaped
        return ChatError.__str__(self) if not self.args else str(self.args[0])


class ChatTypeError(ChatError, TypeError):
    """A field of a message has a type that cannot be rendered."""


class ThinkingEffortError(ChatError, AssertionError):
    """`thinking_effort` is not one the model was trained with."""
