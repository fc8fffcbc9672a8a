"""Chats as text that still knows which of it is markup, and how a Jinja template's text comes to know it."""

import re
from collections.abc import Iterable
from typing import Any

from .chat_encoding import Segment

# Put around control tokens that messages spell, before a Jinja template mixes them with its own. Private use, plane 15.
_BEGIN, _END = "\U000ff000", "\U000ff001"
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}|[{_BEGIN}{_END}]")


class RenderedChat(str):
    """A rendered chat: its text, and in `segments` which runs of it are markup.

    The tokenizer and the processor encode it segment by segment, so rendering first and tokenising later gives the ids
    of doing both at once. What is added to it before or behind is text; any other change makes it an ordinary string, in
    which nothing is markup.
    """

    segments: tuple[Segment, ...]

    def __new__(cls, segments: Iterable[Segment]) -> "RenderedChat":
        segments = tuple(Segment(*segment) for segment in segments)
        text = super().__new__(cls, "".join(segment.text for segment in segments))
        text.segments = segments
        return text

    def __add__(self, other: str) -> "RenderedChat":
        return RenderedChat((*self.segments, *_segments(other))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "RenderedChat":  # pipelines put a prefix before every prompt, nearly always ""
        return RenderedChat((*_segments(other), *self.segments)) if isinstance(other, str) else NotImplemented

    def __getnewargs__(self) -> tuple:  # copies and pickles are made of the segments
        return (self.segments,)


def _segments(text: str) -> tuple[Segment, ...]:
    if isinstance(text, RenderedChat):
        return text.segments
    return (Segment(text, False),) if text else ()


def mark_control_tokens(value: Any, control_tokens: re.Pattern) -> Any:
    """`value` (text, or lists and dicts of it) with every control token in its texts marked as text."""
    if isinstance(value, str):
        return control_tokens.sub(rf"{_BEGIN}\g<0>{_END}", re.sub(f"[{_BEGIN}{_END}]", "", value))
    if isinstance(value, dict):
        return {
            mark_control_tokens(k, control_tokens): mark_control_tokens(v, control_tokens) for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [mark_control_tokens(item, control_tokens) for item in value]
    return value


def unmark(rendered: str) -> list[Segment]:
    """What a template made of marked values: marked runs are ordinary text, all else may hold control tokens.

    A mark that lost its partner (templates may split texts) is dropped, and what stands on its two sides stays apart.
    """
    segments, at = [], 0
    for match in _MARKED.finditer(rendered):
        segments += [Segment(rendered[at : match.start()], True), Segment(match[1] or "", False)]
        at = match.end()
    segments.append(Segment(rendered[at:], True))
    return [segment for segment in segments if segment.text]
