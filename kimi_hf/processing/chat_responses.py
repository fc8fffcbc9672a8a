"""transformers' own names for parsing (`parse_response`, `get_response_parser`) on top of `chat_parsing`."""

from typing import Any

from ..errors import ChatError
from .chat_encoding import OPEN, render
from .chat_parsing import StreamingParser

ASSISTANT_HEADER = '<|open|>message role="assistant"'
# The format in the terms of transformers' streaming parser, for servers that read this and know no other way. It gives
# arguments as text and leaves their types to the tools' schemas; `chat_parsing` restores them from the markup itself.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT_HEADER + "<|sep|>",
    "fields": {
        "reasoning_content": {
            "open": "<|open|>think<|sep|>",
            "close": "<|close|>think<|sep|>",
            "content": "text",
            "content_args": {"strip": False},
        },
        "content": {
            "open": "<|open|>response<|sep|>",
            "close": "<|close|>response<|sep|>",
            "content": "text",
            "content_args": {"strip": False},
        },
        "tool_calls": {
            "open_pattern": r'<\|open\|>call tool="(?P<name>[^"]*)" index="\d+"<\|sep\|>',
            "close": "<|close|>call<|sep|>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<\|open\|>argument key="(?P<key>[^"]*)" type="[^"]*"<\|sep\|>'
                r"(?P<value>.*?)<\|close\|>argument<\|sep\|>"
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


class ResponseParsingMixin:
    """For a tokenizer: generated text or ids to messages, knowing from the prompt where the completion begins."""

    def parse_response(self, response: Any, schema: Any = None, *, prefix: Any = None, tools: Any = None) -> Any:
        """A message (arguments as dicts) from what was generated, or a list of them from a batch.

        Args:
            response: text, token ids, or a batch of either.
            schema: a response template other than this tokenizer's own goes to transformers' parser.
            prefix: the prompt as text or ids, or one for each of a batch; what it opens of the assistant's message is
                part of the message. None: the completion begins in the thinking channel.
            tools: not needed here, the types are in the markup.
        """
        if not self._parses(schema):
            return super().parse_response(response, schema, prefix=prefix, tools=tools)
        response, prefix = _plain(response), _plain(prefix)
        if isinstance(response, (list, tuple)) and response and not isinstance(response[0], int):
            prefixes = list(prefix) if _is_batch(prefix) else [prefix] * len(response)
            if len(prefixes) != len(response):
                raise ChatError(
                    f"prefix: found {len(prefixes)} for {len(response)} responses; give one, or one for each"
                )
            pairs = zip(response, prefixes, strict=True)
            return [self.parse_response(one, prefix=its_prefix) for one, its_prefix in pairs]
        parser = self._parser_after(prefix, as_text=isinstance(response, str))
        parser.feed(response)
        parser.finish()
        return parser.message

    def get_response_parser(self, response_template: Any = None, *, prefix: Any = None, tools: Any = None) -> Any:
        """A parser of text in pieces, with the methods of transformers' `ResponseParser`; arguments as `parse_response`."""
        if not self._parses(response_template):
            return super().get_response_parser(response_template, prefix=prefix, tools=tools)
        return ResponseEvents(self._parser_after(_plain(prefix), as_text=True))

    def _parses(self, template: Any) -> bool:
        return self.response_template == RESPONSE_TEMPLATE and template in (None, RESPONSE_TEMPLATE)

    def _parser_after(self, prefix: Any, as_text: bool) -> StreamingParser:
        """A parser that has read what the prompt already holds of the assistant's message."""
        if _is_batch(prefix):
            prefix = prefix[0]
        if prefix is None or len(prefix) == 0:
            return StreamingParser(self, thinking=True, arguments="object")
        parser = StreamingParser(self, thinking=None, arguments="object")
        if isinstance(prefix, str):
            start = prefix.rfind(ASSISTANT_HEADER)
            tail = prefix[start:] if start >= 0 else ""
            parser.feed(tail if as_text else self.encode_special(tail))
        else:
            header = self.encode_segments(render([]).segments[:5])  # up to the role, before further attributes
            opened = self.convert_tokens_to_ids(OPEN)
            starts = [
                at for at, token in enumerate(prefix) if token == opened and prefix[at : at + len(header)] == header
            ]
            tail = prefix[starts[-1] :] if starts else []
            parser.feed(self.decode(tail) if as_text else tail)
        return parser


class ResponseEvents:
    """A `StreamingParser` behind the interface of `transformers.utils.chat_parsing.ResponseParser`."""

    def __init__(self, parser: StreamingParser):
        self._parser = parser
        self.initial_events = _events(
            [{name: text} for name, text in parser.message.items() if name != "role" and text]
        )

    def feed(self, text: str) -> list[dict]:
        return _events(self._parser.feed(text))

    def finalize(self) -> tuple[dict, list[dict]]:
        events = _events(self._parser.finish())
        return self._parser.message, events


def _events(deltas: list[dict]) -> list[dict]:
    events = []
    for delta in deltas:
        for field, value in delta.items():
            if field != "tool_calls":
                events.append({"type": "region_chunk", "field": field, "text": value, "dirty": False})
                continue
            for call in value:
                call = {key: part for key, part in call.items() if key != "index"}
                events.append({"type": "region_close", "field": field, "value": call})
    return events


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _is_batch(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and not isinstance(value[0], int)
