"""A conversation with a model, turn by turn: prompts, generation, and the cache kept between turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..errors import ChatError
from .chat_encoding import CONTROL_TOKENS, END_OF_MESSAGE, IMAGE_PARTS, build_segments
from .chat_parsing import StreamingParser

Deltas = list[dict[str, Any]]


@dataclass
class ChatSettings:
    """How prompts are rendered; changing any of it starts the next prompt from the beginning."""

    system: str | None = None
    tools: list[Any] | None = None
    thinking: bool = True
    thinking_effort: str | None = "max"


def open_chat(model: Any, tokenizer: Any, processor: Any = None, **options: Any) -> "Session":
    """The session that fits the tokenizer: Kimi K3's chat format, or another one's Jinja template.

    Args: options: `settings` and `generation`, see `Session`.
    Raises: ChatError: the tokenizer has no chat format, or does not belong to the model.
    """
    if all(token in tokenizer.get_added_vocab() for token in CONTROL_TOKENS):
        return ChatSession(model, tokenizer, processor, **options)
    if tokenizer.chat_template is None:
        raise ChatError(
            f"{type(tokenizer).__name__}: neither Kimi K3's control tokens nor a chat template; this checkpoint "
            "continues text, use generate()"
        )
    return TemplateSession(model, tokenizer, processor, **options)


@dataclass
class Session:
    """One conversation. What the model has read and written is kept as token ids, together with its cache.

    Args:
        model: with `generate()`. tokenizer: with a chat format.
        processor: for messages with images; None if there is none.
        generation: keyword arguments of `generate()`.
    Raises: ChatError: the tokenizer has more tokens than the model.
    """

    model: Any
    tokenizer: Any
    processor: Any = None
    settings: ChatSettings = field(default_factory=ChatSettings)
    generation: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = self.model.get_input_embeddings().weight.shape[0]
        if rows < len(self.tokenizer):
            raise ChatError(
                f"model: its vocabulary has {rows} entries, the tokenizer {len(self.tokenizer)}; they do not belong "
                "together"
            )
        self.unknown = list(range(len(self.tokenizer), rows)) or None  # ids that no text has
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages.clear()
        self.forget()

    def forget(self) -> None:
        """Keep the messages, but read them anew at the next turn."""
        self._ids: list[int] | None = None
        self._cache: Any = None
        self._seen = 0  # how many messages `_ids` holds
        self._settings = ""

    def turn(self, messages: Sequence[dict[str, Any]], show: Callable[[Deltas], None]) -> dict[str, Any]:
        """Add `messages`, let the model answer, and add its answer.

        Args: show: called with the parser's deltas while they come.
        Returns: the answer, a chat message; also when it was interrupted from the keyboard.
        Raises: what rendering or the model raises; the conversation is then as it was before.
        """
        before = len(self.messages)
        self.messages += messages
        try:
            return self._answer(show)
        except Exception:
            del self.messages[before:]
            self.forget()
            raise

    def _answer(self, show: Callable[[Deltas], None]) -> dict[str, Any]:
        inputs = self._prompt()
        prompt, ends, parser = inputs["input_ids"][0].tolist(), self._ends(), self._parser()
        interrupted = False
        try:
            out = self.model.generate(
                **{key: value.to(self.model.device) for key, value in inputs.items()},
                past_key_values=self._cache,
                streamer=_Streamer(lambda ids: show(parser.feed(ids))),
                eos_token_id=ends,
                pad_token_id=self.tokenizer.pad_token_id,
                suppress_tokens=self.unknown,
                return_dict_in_generate=True,
                **self.generation,
            )
        except KeyboardInterrupt:
            interrupted = True
        show(parser.finish())
        answer = parser.message
        self.messages.append(answer)
        written = [] if interrupted else out.sequences[0, len(prompt) :].tolist()
        if written and written[-1] == ends[0]:
            self._ids, self._cache = prompt + written, out.past_key_values
            self._seen, self._settings = len(self.messages), repr(self.settings)
        else:
            self.forget()
        return answer

    def _chat(self) -> list[dict[str, Any]]:
        system = self.settings.system
        return self.messages if system is None else [{"role": "system", "content": system}, *self.messages]

    def _ends(self) -> list[int]:
        """Tokens that end an answer; after the first of them the conversation can be continued."""
        raise NotImplementedError

    def _parser(self) -> Any:
        """Reads ids as `StreamingParser` does."""
        raise NotImplementedError

    def _prompt(self) -> dict[str, torch.Tensor]:
        """Inputs of the next turn; forgets the cache where it cannot be continued."""
        raise NotImplementedError


class ChatSession(Session):
    """A session in Kimi K3's chat format.

    The next turn adds to the very ids the model wrote. That is exact: a message that was rendered anew from its text
    could be cut into other tokens. Where ids cannot be continued (an answer was cut short, images came in, settings
    changed), the whole conversation is rendered again and read from the beginning.
    """

    def _ends(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(END_OF_MESSAGE), self.tokenizer.eos_token_id]

    def _parser(self) -> StreamingParser:
        return StreamingParser(self.tokenizer, thinking=self.settings.thinking)

    def _prompt(self) -> dict[str, torch.Tensor]:
        new = self.messages[self._seen :]
        if self._ids is None or self._settings != repr(self.settings) or any(map(_has_images, new)):
            self.forget()
            return self._whole_prompt()
        segments = build_segments(new, thinking=self.settings.thinking)
        ids = torch.tensor([self._ids + self.tokenizer.encode_segments(segments)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _whole_prompt(self) -> dict[str, torch.Tensor]:
        chat, settings = self._chat(), self.settings
        options = dict(tools=settings.tools, thinking=settings.thinking, thinking_effort=settings.thinking_effort)
        if any(map(_has_images, chat)):
            if self.processor is None:
                raise ChatError(
                    "images: the checkpoint has no preprocessor_config.json, so no image can be shown to it"
                )
            return dict(self.processor(messages=chat, return_tensors="pt", **options))
        return dict(self.tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt", **options))


class TemplateSession(Session):
    """A session in a format that only its Jinja template knows: answers are plain text.

    The template renders the whole conversation each time; the cache is kept if what it renders begins with the ids
    that the cache holds.
    """

    def _ends(self) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        ends = list(ends) if isinstance(ends, (list, tuple)) else [ends]
        known = [end for end in (*ends, self.tokenizer.eos_token_id) if end is not None]
        return list(dict.fromkeys(known))

    def _parser(self) -> "_PlainText":
        return _PlainText(self.tokenizer)

    def _prompt(self) -> dict[str, torch.Tensor]:
        if any(map(_has_images, self.messages)):
            raise ChatError("images: only checkpoints of Kimi K3's chat format are shown images here")
        inputs = self.tokenizer.apply_chat_template(
            self._chat(),
            tools=self.settings.tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = inputs["input_ids"][0].tolist()
        if self._ids is None or len(ids) <= len(self._ids) or ids[: len(self._ids)] != self._ids:
            self.forget()
        return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


class _PlainText:
    """A parser for which everything is content."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._text = ""

    @property
    def message(self) -> dict[str, Any]:
        return {"role": "assistant", "content": self._text}

    def feed(self, ids: Sequence[int]) -> Deltas:
        self._ids += ids
        return self._grow(unfinished=True)

    def finish(self) -> Deltas:
        return self._grow(unfinished=False)

    def _grow(self, unfinished: bool) -> Deltas:
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if unfinished:
            text = text.rstrip("\ufffd")  # the rest of the character is still to come
        new, self._text = text[len(self._text) :], max(self._text, text, key=len)
        return [{"content": new}] if new else []


class _Streamer(BaseStreamer):
    """Hands on the ids that `generate()` writes, without the prompt it begins with."""

    def __init__(self, take: Callable[[list[int]], None]):
        self._take = take
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
        else:
            self._take(value.flatten().tolist())

    def end(self) -> None:
        pass


def _has_images(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") in IMAGE_PARTS for part in content)
