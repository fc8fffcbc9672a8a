"""`apply_chat_template` of a tokenizer of Kimi K3's chat format.

Chats are rendered in Python and tokenised segment by segment. A Jinja template gives one text, in which the boundaries
between segments, and with them the difference between markup and what a user wrote, are lost; so there is none.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import BatchEncoding
from transformers.utils import get_json_schema

from ..errors import ChatError
from .chat_encoding import Rendering, Segment, render
from .chat_errors import ChatTypeError
from .chat_responses import ResponseParsingMixin
from .rendered_chat import RenderedChat, mark_control_tokens, unmark

# What `tokenizer.chat_template` says, so that libraries see that there is a chat format and that it marks what the
# assistant writes; rendering it anyway is an error and not a wrong prompt. Never written to disk.
PYTHON_TEMPLATE = (
    '{{ raise_exception("this chat format is rendered in Python: call tokenizer.apply_chat_template") }}'
    "{% generation %}{% endgeneration %}"
)
_PAD_OPTIONS = {"pad_to_multiple_of", "padding_side", "return_attention_mask", "verbose"}  # of `tokenizer_kwargs`
_CONTINUED = {
    "content": "content",
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "reasoning_content"),
}


class ChatTemplateMixin(ResponseParsingMixin):
    """The chat methods of the tokenizer, which has `encode_ordinary`, `encode_special`, `control_pattern` and `pad`."""

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tokenize: bool | None = None,
        sanitize_control_tokens: bool | None = None,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """A conversation (a list of messages) or a batch (a list of lists) as text, ids or tensors.

        Args:
            tools: JSON schemas, or functions that are described by their signature and docstring.
            add_generation_prompt: default True; False where `return_assistant_tokens_mask` is given, a question about
                training.
            continue_final_message: end inside the last message's content (True) or in the named field.
            tokenize: default False (a `RenderedChat`: the text, which the tokenizer later gives the very ids that True
                would), True where a dict, tensors or a mask is asked for.
            truncation, max_length: cut on the right to `max_length` (default: `model_max_length`).
            padding, return_tensors, tokenizer_kwargs (pad_to_multiple_of, padding_side): as in `pad`.
            return_dict: default False (the ids), True where a mask is asked for.
            return_assistant_tokens_mask: add "assistant_masks", 1 on what the model writes: from the first token after
                the opening of its channel to `<|end_of_msg|>`.
            sanitize_control_tokens: control tokens in messages are ordinary text. No choice here; False turns it off for
                Jinja templates.
            kwargs: thinking, thinking_effort ("max" unless given; None for no message), tool_choice, response_format,
                response_schema, image_prompts (single conversations only), placeholders_in_text: see `render`.
        Raises: ChatError for conversations that cannot be rendered and options that do not go together.
        """
        if (self.chat_template if chat_template is None else chat_template) != PYTHON_TEMPLATE:
            given = {key: value for key, value in locals().items() if key not in ("self", "kwargs", "__class__")}
            return self._apply_jinja(**given, **kwargs)
        if documents:
            raise ChatError("documents: this chat format has no place for them; put their text into a message")
        if tokenize is None:
            tokenize = bool(return_dict or return_tensors or return_assistant_tokens_mask)
        if return_assistant_tokens_mask and (not tokenize or return_dict is False):
            raise ChatError("return_assistant_tokens_mask: needs tokenize and return_dict; leave them out or say True")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message and return_assistant_tokens_mask is None
        chats, batched = _chats(conversation)
        options = _options(kwargs, tools, add_generation_prompt, continue_final_message)
        if batched and options.get("image_prompts") is not None:
            raise ChatError("image_prompts: found with a batch of conversations; render them one by one")
        return self._deliver(
            [render(chat, **options) for chat in chats],
            batched=batched,
            tokenize=tokenize,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            return_dict=bool(return_dict or return_assistant_tokens_mask),
            masks=bool(return_assistant_tokens_mask),
            tokenizer_kwargs=tokenizer_kwargs,
        )

    def _apply_jinja(self, conversation: Sequence[Any], **options: Any) -> Any:
        """For a template of the user's or of another chat format, with the library's defaults.

        With one difference: control tokens that messages, tools and documents spell stay text, unless the caller says
        `sanitize_control_tokens=False`.
        """
        defaults = dict(
            add_generation_prompt=False, tokenize=True, return_dict=True, return_assistant_tokens_mask=False
        )
        defaults["sanitize_control_tokens"] = not options["return_assistant_tokens_mask"]  # the library has not both
        options.update({key: default for key, default in defaults.items() if options[key] is None})
        kept = options.pop("sanitize_control_tokens")
        if options["return_assistant_tokens_mask"]:
            options["tokenizer_kwargs"] = {"split_special_tokens": False, **(options["tokenizer_kwargs"] or {})}
            return super().apply_chat_template(conversation, sanitize_control_tokens=kept, **options)
        chats, batched = _chats(conversation)
        chats, delivery = list(chats), {"masks": options.pop("return_assistant_tokens_mask"), "batched": batched}
        for name in ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"):
            delivery[name] = options.pop(name)
        delivery["tokenizer_kwargs"] = options.pop("tokenizer_kwargs")
        template = options.pop("chat_template")
        if kept:
            chats, options = mark_control_tokens((chats, options), self.control_pattern)
        texts = super().apply_chat_template(chats, chat_template=template, tokenize=False, **options)
        segments = [unmark(text) if kept else [Segment(text, True)] for text in texts]
        return self._deliver([Rendering(its, [False] * len(its)) for its in segments], **delivery)

    def _deliver(
        self,
        renderings: Sequence[Rendering],
        *,
        batched: bool,
        tokenize: bool,
        padding: bool | str,
        truncation: bool | str,
        max_length: int | None,
        return_tensors: str | None,
        return_dict: bool,
        masks: bool,
        tokenizer_kwargs: dict[str, Any] | None,
    ) -> Any:
        """Rendered chats in the form that was asked for."""
        if not tokenize:
            texts = [RenderedChat(rendering.segments) for rendering in renderings]
            return texts if batched else texts[0]
        if unknown := set(tokenizer_kwargs or {}) - _PAD_OPTIONS:
            raise ChatTypeError(
                f"tokenizer_kwargs: found {sorted(unknown)}, expected {sorted(_PAD_OPTIONS)}; padding, truncation and "
                "max_length go straight into apply_chat_template"
            )
        columns = self._columns(renderings, truncation, max_length, masks)
        padded = self.pad(columns, padding=padding, max_length=max_length, **(tokenizer_kwargs or {}))
        if not batched and return_tensors is None:
            padded = {key: value[0] for key, value in padded.items()}
        out = BatchEncoding(dict(padded), tensor_type=return_tensors)
        return out if return_dict else out["input_ids"]

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Token ids of segments, each encoded by itself; control tokens only in the special ones."""
        ids: list[int] = []
        for text, special in segments:
            ids += self.encode_special(text) if special else self.encode_ordinary(text)
        return ids

    def _columns(
        self, renderings: Sequence[Rendering], truncation: Any, max_length: int | None, masks: bool
    ) -> dict[str, list[list[int]]]:
        limit = None
        if truncation not in (False, None, "do_not_truncate"):
            limit = truncation_limit(self, max_length)
        columns: dict[str, list[list[int]]] = {"input_ids": [], **({"assistant_masks": []} if masks else {})}
        for rendering in renderings:
            ids: list[int] = []
            mask: list[int] = []
            for segment, generated in zip(*rendering, strict=True):
                ids += self.encode_segments([segment])
                mask += [int(generated)] * (len(ids) - len(mask))
            columns["input_ids"].append(ids[:limit])
            if masks:
                columns["assistant_masks"].append(mask[:limit])
        return columns


def _options(
    kwargs: dict[str, Any], tools: Sequence[Any] | None, add_generation_prompt: bool, continue_final: bool | str
) -> dict[str, Any]:
    """The arguments of `render`: the caller's keywords over the release's defaults."""
    if continue_final and add_generation_prompt:
        raise ChatError("continue_final_message and add_generation_prompt exclude each other; choose one")
    options: dict[str, Any] = {
        "thinking": True,
        "thinking_effort": "max",
        "tool_choice": None,
        "response_format": None,
        "response_schema": None,
        "image_prompts": None,
        "placeholders_in_text": True,
    }
    for name, value in kwargs.items():
        if name == "enable_thinking":  # what servers call it
            options["thinking"] = bool(value)
        elif name in options:
            options[name] = value
        elif value:  # an option that is off asks for nothing
            raise ChatTypeError(f"apply_chat_template: no option {name!r}; found {value!r}, options are {[*options]}")
    options["add_generation_prompt"] = add_generation_prompt
    if isinstance(tools, (str, Mapping)):
        raise ChatTypeError(f"tools: found {type(tools).__name__}, expected a list of JSON schemas or functions")
    options["tools"] = None if tools is None else [_schema(tool) for tool in tools]
    if continue_final:
        field = "content" if continue_final is True else continue_final
        options["continue_final"] = _CONTINUED.get(field, field)
    return options


def truncation_limit(tokenizer: Any, max_length: int | None) -> int:
    """How many tokens truncation leaves.

    Raises: ChatError: less than none.
    """
    if max_length is not None and max_length < 0:
        raise ChatError(f"max_length: found {max_length}, expected 0 or more, or None for the tokenizer's own limit")
    return tokenizer.model_max_length if max_length is None else max_length


def _chats(conversation: Sequence[Any]) -> tuple[list[Any], bool]:
    """Conversations, and whether several were given; the library has an object that holds one as `messages`."""
    conversation = getattr(conversation, "messages", conversation)
    if not isinstance(conversation, (list, tuple)):
        raise ChatTypeError(f"messages: found {type(conversation).__name__}, expected a list of dicts")
    batched = len(conversation) > 0 and (
        isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages")
    )
    return [getattr(chat, "messages", chat) for chat in (conversation if batched else [conversation])], batched


def _schema(tool: Any) -> Any:
    return get_json_schema(tool) if inspect.isfunction(tool) or inspect.ismethod(tool) else tool
