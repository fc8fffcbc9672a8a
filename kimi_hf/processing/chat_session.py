"""A conversation with a model, turn by turn: prompts, generation, and the cache kept between turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..errors import ChatError
from .chat_encoding import CONTROL_TOKENS, END_OF_MESSAGE, build_segments
from .chat_parsing import StreamingParser

Deltas = list[dict[str, Any]]


@dataclass
class ChatSettings:
    """How prompts are rendered; changing any of it starts the next prompt from the beginning."""

    system: str | None = None
    tools: list[Any] | None = None
    thinking: bool = True
    thinking_effort: str | None = "max"


@dataclass
class ChatSession:
    """One conversation with a model of Kimi K3's chat format.

    What the model has read and written is kept as token ids, together with its cache, and the next turn adds to both.
    That is exact: a message that was rendered anew from its text could be cut into other tokens than the model wrote.
    Where ids cannot be continued (an answer was cut short, images came in, settings changed), the whole conversation
    is rendered again and read from the beginning.

    Args:
        model: with `generate()`. tokenizer: `TikTokenTokenizer`.
        processor: for messages with images; None if there is none.
        generation: keyword arguments of `generate()`.
    """

    model: Any
    tokenizer: Any
    processor: Any = None
    settings: ChatSettings = field(default_factory=ChatSettings)
    generation: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        vocabulary = self.tokenizer.get_added_vocab()
        if not all(token in vocabulary for token in CONTROL_TOKENS):
            raise ChatError(
                f"tokenizer: {type(self.tokenizer).__name__} has no control tokens of Kimi K3's chat format"
            )
        rows = self.model.get_input_embeddings().weight.shape[0]
        if rows < len(self.tokenizer):
            raise ChatError(
                f"model: its vocabulary has {rows} entries, the tokenizer {len(self.tokenizer)}; they do not belong "
                "together"
            )
        self.ends = [vocabulary[END_OF_MESSAGE], self.tokenizer.eos_token_id]
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
        self._settings = None

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
        prompt = inputs["input_ids"][0].tolist()
        parser = StreamingParser(self.tokenizer, thinking=self.settings.thinking)
        streamer = _Streamer(lambda ids: show(parser.feed(ids)))
        interrupted = False
        try:
            out = self.model.generate(
                **{key: value.to(self.model.device) for key, value in inputs.items()},
                past_key_values=self._cache,
                streamer=streamer,
                eos_token_id=self.ends,
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
        if written and written[-1] == self.ends[0]:
            self._ids, self._cache = prompt + written, out.past_key_values
            self._seen, self._settings = len(self.messages), self._state()
        else:
            self.forget()
        return answer

    def _state(self) -> tuple:
        return repr(self.settings), id(self.model)

    def _prompt(self) -> dict[str, torch.Tensor]:
        """Inputs of the next turn; drops the cache where it cannot be continued."""
        new = self.messages[self._seen :]
        if self._ids is None or self._settings != self._state() or any(map(_has_images, new)):
            self.forget()
            return self._whole_prompt()
        segments = build_segments(new, thinking=self.settings.thinking)
        ids = torch.tensor([self._ids + self.tokenizer.encode_segments(segments)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _whole_prompt(self) -> dict[str, torch.Tensor]:
        settings = self.settings
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        options = dict(tools=settings.tools, thinking=settings.thinking, thinking_effort=settings.thinking_effort)
        chat = system + self.messages
        if any(map(_has_images, chat)):
            if self.processor is None:
                raise ChatError(
                    "images: the checkpoint has no preprocessor_config.json, so no image can be shown to it"
                )
            return dict(self.processor(messages=chat, return_tensors="pt", **options))
        return dict(self.tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt", **options))


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
    return isinstance(content, list) and any(part.get("type") == "image" for part in content)
