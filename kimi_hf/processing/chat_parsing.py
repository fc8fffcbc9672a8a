"""Completions to messages: the way back from `chat_encoding`.

A completion begins inside the thinking channel (or the response, without thinking) and goes on

    ...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
    [<|open|>tools<|sep|>calls<|close|>tools<|sep|>]<|close|>message<|sep|><|end_of_msg|>

It may stop anywhere. Inside a channel only that channel's own closing mark counts; everything else is its text, so a
model that quotes markup makes no calls, and nothing after the tools channel is a call.

Source: the specification, section 7.3.
"""

import json
import re
from collections.abc import Iterator, Sequence
from operator import index
from typing import Any

from ..errors import ChatError
from .chat_encoding import CLOSE, END_OF_MESSAGE, OPEN, SEP
from .chat_lexing import TEXT, IdLexer, TextLexer

# Which marks have a meaning inside which element. "" is before the message, "rest" is after the tools channel.
_OPENS = {
    "": ("message", "think", "response", "tools"),
    "message": ("think", "response", "tools"),
    "tools": ("call",),
    "call": ("argument", "json"),
}
_CHANNELS = {"think": "reasoning_content", "response": "content"}  # what their text is called in a message
_VERBATIM = ("think", "response", "argument", "json")  # elements whose content is text and not structure
_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')


def parse_completion(
    text_or_ids: Any, *, tokenizer: Any = None, thinking: bool | None = True, arguments: str = "json"
) -> dict[str, Any]:
    """One completion as an OpenAI chat message.

    Args:
        text_or_ids: decoded text with its control tokens, or token ids (list, array or 1-D tensor). Ids are exact; in
            text, a value that spells a closing mark ends there.
        tokenizer: needed for ids.
        thinking: the completion begins in the thinking channel (True), in the response (False), or with its own
            opening marks, such as a whole assistant message (None).
        arguments: "json" gives each call's arguments as a JSON string, as OpenAI does; "object" as a dict (a string
            only where the model wrote something that is no JSON object).
    Returns: {"role": "assistant", "content": str}, with "reasoning_content" if there is any and "tool_calls" if a
        call was completed; a call cut short is left out.
    Raises: ChatError: ids without a tokenizer of this format, or not a text and not ids.
    """
    parser = StreamingParser(tokenizer, thinking=thinking, arguments=arguments)
    parser.feed(text_or_ids)
    parser.finish()
    return parser.message


class StreamingParser:
    """`parse_completion` for a completion that arrives in pieces; how it is cut makes no difference.

    `feed` and `finish` return deltas as OpenAI's stream has them ({"reasoning_content": ...}, {"content": ...},
    {"tool_calls": [one whole call with its index]}), which add up to `message`.
    """

    def __init__(self, tokenizer: Any = None, *, thinking: bool | None = True, arguments: str = "json"):
        if arguments not in ("json", "object"):
            raise ChatError(f'arguments: found {arguments!r}, expected "json" or "object"')
        self._tokenizer = tokenizer
        self._as_object = arguments == "object"
        self._lexer: TextLexer | IdLexer | None = None
        if thinking is None:
            self._stack = [""]
        else:
            self._stack = ["message", "think" if thinking else "response"]
        self._header: str | None = None  # the mark being read: OPEN or CLOSE and what follows, up to SEP
        self._end_held = False  # an end of message inside a text: it ends the text if nothing follows
        self._deltas: list[dict[str, Any]] = []
        self._call: dict[str, Any] = {}
        self._attributes: dict[str, str] = {}
        self._value: list[str] = []
        self._parts: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        self._calls: list[dict[str, Any]] = []
        self.complete = False  # the message was closed, or its end was reached

    @property
    def message(self) -> dict[str, Any]:
        """What has been parsed so far, as a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._parts["content"])}
        reasoning = "".join(self._parts["reasoning_content"])
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [dict(call, function=dict(call["function"])) for call in self._calls]
        return message

    def feed(self, piece: Any) -> list[dict[str, Any]]:
        """More text, or more ids (one or several). Returns the deltas that are certain by now."""
        piece, lexer = self._read(piece)
        if self._lexer is None:
            self._lexer = lexer(self._tokenizer) if lexer is IdLexer else lexer()
        elif type(self._lexer) is not lexer:
            raise ChatError("feed: found text and ids in one completion; feed one or the other")
        self._take(self._lexer.feed(piece))
        return self._flush()

    def finish(self) -> list[dict[str, Any]]:
        """No more will come: an opening or closing that was not finished is dropped, and with it what it held."""
        if self._lexer is not None and self._header is None:
            self._take(self._lexer.finish())
        self._header, self._end_held = None, False
        return self._flush()

    @staticmethod
    def _read(piece: Any) -> tuple[Any, type]:
        if isinstance(piece, str):
            return piece, TextLexer
        if hasattr(piece, "tolist"):
            piece = piece.tolist()
        try:
            return [index(token) for token in (piece if isinstance(piece, Sequence) else [piece])], IdLexer
        except TypeError as error:
            raise ChatError(
                f"completion: found {type(piece).__name__} ({error}), expected text or the token ids of one completion"
            ) from error

    def _flush(self) -> list[dict[str, Any]]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _take(self, marks: Iterator[tuple[str, str]]) -> None:
        for kind, text in marks:
            if self.complete:
                continue
            if self._end_held:
                self._end_held = False
                self._verbatim(END_OF_MESSAGE)
            if kind == END_OF_MESSAGE:
                self._end()
            elif self._header is not None:
                self._in_header(kind, text)
            elif kind in (OPEN, CLOSE) and (kind == CLOSE or self._stack[-1] not in _VERBATIM):
                self._header = kind
            else:
                self._verbatim(text)

    def _end(self) -> None:
        header, ambiguous = self._header, isinstance(self._lexer, TextLexer)
        if ambiguous and self._stack[-1] in _VERBATIM:
            self._header = None
            if header is not None:
                self._verbatim(header)
            self._end_held = True
        elif ambiguous and header is not None and _quoted(header):
            self._header = header + END_OF_MESSAGE
        else:
            self.complete = True

    def _in_header(self, kind: str, text: str) -> None:
        header, element = self._header, self._stack[-1]
        if element in _VERBATIM:
            # Only this element's own closing mark may follow; anything else was text all along.
            wanted = CLOSE + element
            if kind == SEP and header == wanted:
                self._header = None
                self._close(element)
            elif kind == TEXT and wanted.startswith(header + text):
                self._header = header + text
            else:
                self._header = CLOSE if kind == CLOSE else None
                self._verbatim(header if kind == CLOSE else header + text)
        elif kind == TEXT or (_quoted(header) and isinstance(self._lexer, TextLexer)):
            self._header = header + text  # between quotes a text that spells a mark is part of the value
        elif kind == SEP:
            self._header = None
            self._structure(header)
        else:
            self._header = kind

    def _structure(self, header: str) -> None:
        """Act on a complete mark between texts; one that has no meaning here is skipped."""
        opening = header.startswith(OPEN)
        mark = header[len(OPEN if opening else CLOSE) :]
        name = mark.split(" ", 1)[0]
        element = self._stack[-1]
        if opening and name in _OPENS.get(element, ()):
            self._stack.append(name)
            self._value = []
            attributes = {key: value for key, value in _ATTRIBUTE.findall(mark)}
            self._attributes = {
                key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in attributes.items()
            }
            if name == "call":
                self._call = {"name": self._attributes.get("tool", ""), "arguments": {}, "raw": None}
        elif not opening and name == "message" and element in ("message", "rest", ""):
            self.complete = True
        elif not opening and name == element and len(self._stack) > 1:
            self._close(element)

    def _close(self, element: str) -> None:
        self._stack.pop()
        if element == "argument":
            self._call["arguments"][self._attributes.get("key", "")] = _typed(
                "".join(self._value), self._attributes.get("type", "string")
            )
        elif element == "json":
            self._call["raw"] = "".join(self._value)
        elif element == "call":
            self._finish_call()
        elif element == "tools":
            self._stack.append("rest")

    def _finish_call(self) -> None:
        call, position = self._call, len(self._calls)
        arguments: Any = call["arguments"]
        if call["raw"] is not None and not arguments:
            arguments = _object_or_text(call["raw"]) if self._as_object else call["raw"]
        elif not self._as_object:
            arguments = _as_json(arguments)
        function = {"name": call["name"], "arguments": arguments}
        entry = {"id": f"call_{position + 1}", "type": "function", "function": function}
        self._calls.append(entry)
        self._deltas.append({"tool_calls": [{"index": position, **entry, "function": dict(function)}]})

    def _verbatim(self, text: str) -> None:
        element = self._stack[-1]
        if element in _CHANNELS:
            field = _CHANNELS[element]
            self._parts[field].append(text)
            if self._deltas and field in self._deltas[-1]:
                self._deltas[-1][field] += text
            else:
                self._deltas.append({field: text})
        elif element in ("argument", "json"):
            self._value.append(text)


def _quoted(header: str) -> bool:
    """Whether the next character of a mark stands between the quotes of an attribute; values hold no bare quotes."""
    return header.count('"') % 2 == 1


def _typed(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _as_json(arguments: dict[str, Any]) -> str:
    """JSON that can be sent on: half a surrogate pair, which JSON can spell but UTF-8 cannot, stays escaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def _object_or_text(text: str) -> Any:
    value = _typed(text, "object")
    return value if isinstance(value, dict) else text
