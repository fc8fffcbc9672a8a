"""Cutting a completion, text or token ids, into text and control marks, however it is split into pieces.

In ids a mark is the control token itself, and text that spells one is text. In text the two cannot be told apart, so
every spelling counts as a mark, and the end of a piece is held back while it may still become one.
"""

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ChatError
from .chat_encoding import CLOSE, CONTROL_TOKENS, END_OF_MESSAGE, OPEN, SEP

TEXT = "text"
Mark = tuple[str, str]  # (TEXT or one of the control tokens, what it says as text)

_MARKS = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
_LONGEST = max(map(len, CONTROL_TOKENS))


class TextLexer:
    """Marks of a text given in pieces."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> Iterator[Mark]:
        text, at = self._held + piece, 0
        for match in _MARKS.finditer(text):
            if match.start() > at:
                yield TEXT, text[at : match.start()]
            yield match.group(), match.group()
            at = match.end()
        keep = _unfinished(text, at)
        self._held = text[keep:]
        if keep > at:
            yield TEXT, text[at:keep]

    def finish(self) -> Iterator[Mark]:
        # A mark is one token, so a completion cannot stop inside of one: what might have become a mark was text.
        held, self._held = self._held, ""
        if held:
            yield TEXT, held


class IdLexer:
    """Marks of token ids given in pieces; bytes become text as soon as a character is complete.

    Args: tokenizer: has the control tokens, and `token_bytes(id)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "token_bytes"):
            raise ChatError(
                f"tokenizer: found {type(tokenizer).__name__}, expected Kimi's TikTokenTokenizer; "
                "pass it to parse token ids, or parse the decoded text"
            )
        vocabulary = tokenizer.get_added_vocab()
        missing = [token for token in CONTROL_TOKENS if token not in vocabulary]
        if missing:
            raise ChatError(f"tokenizer: its vocabulary has no {missing}; it is not one of Kimi K3's chat format")
        self._marks = {vocabulary[token]: token for token in (OPEN, CLOSE, SEP, END_OF_MESSAGE)}
        if tokenizer.eos_token_id is not None:
            self._marks.setdefault(tokenizer.eos_token_id, END_OF_MESSAGE)
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: Sequence[int]) -> Iterator[Mark]:
        for token in piece:
            mark = self._marks.get(token)
            if mark is None:
                text = self._decoder.decode(self._token_bytes(token))
                if text:
                    yield TEXT, text
            else:
                yield from self.finish()
                yield mark, mark

    def finish(self) -> Iterator[Mark]:
        rest = self._decoder.decode(b"", final=True)
        if rest:
            yield TEXT, rest


def _unfinished(text: str, start: int) -> int:
    """Where, from `start` on, the longest ending of `text` begins that a control token may grow from; else its end."""
    for at in range(max(start, len(text) - _LONGEST + 1), len(text)):
        if text[at] == "<" and any(token.startswith(text[at:]) for token in CONTROL_TOKENS):
            return at
    return len(text)
