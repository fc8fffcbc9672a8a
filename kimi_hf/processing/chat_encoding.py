"""Conversations to segments: Kimi K3's chat format (XTML).

A conversation becomes a list of segments, each ordinary text or control tokens, and **each segment is tokenised by
itself**. Only `<|open|>`, `<|close|>`, `<|sep|>`, `<|end_of_msg|>` and image prompts are control segments; tag names,
attributes, contents and arguments are ordinary text, so a marker that a user spells stays text:

    <|open|>message role="user"<|sep|>Hello<|close|>message<|sep|><|end_of_msg|>

Joining the segments and tokenising the whole gives other ids, in which text can forge markers.

Source: the specification of the released encoder, section 7.3; checked on `chat_encoding.json` and
`chat_encoding_more.json`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import ChatError
from .chat_errors import ChatKeyError, ChatTypeError, ThinkingEffortError
from .chat_messages import as_json, as_text, need, order_tool_results, sorted_json, tool_calls, type_name

OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
CONTROL_TOKENS = (OPEN, CLOSE, SEP, END_OF_MESSAGE)
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"  # a marker in text; not a token of the vocabulary
IMAGE_PARTS = ("image", "image_url")
THINKING_EFFORTS = ("low", "high", "max")  # "medium" is named in the text below, but the release refuses it

TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
MORE_TOOLS_TEXT = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOL_CHOICE_TEXTS = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
JSON_TEXT = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
SCHEMA_TEXT = "The JSON data must match the following schema:\n```json\n{}\n```"


class Segment(NamedTuple):
    """A run of text that is tokenised by itself; `special` says whether control tokens in it are recognised."""

    text: str
    special: bool

    @property
    def allow_special(self) -> bool:  # the released name
        return self.special


class Rendering(NamedTuple):
    """Segments, and for each whether the model writes it (everything after the opening that prompts the answer)."""

    segments: list[Segment]
    generated: list[bool]


def build_segments(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | str | None = None,
    response_schema: Any = None,
    add_generation_prompt: bool = True,
    image_prompts: Sequence[str] | None = None,
) -> list[Segment]:
    """The segments of one conversation, as the released encoder gives them.

    Args:
        messages: dicts with "role" (system, user, assistant, tool) and "content" (text, None or a list of parts);
            anything else is skipped. Not modified.
        tools: JSON schemas of the tools, declared in a first system message.
        thinking: whether assistants have a thinking channel, in every turn.
        thinking_effort: "low", "high" or "max" adds a system message; None adds none. Ignored without thinking.
        tool_choice: "required" or "none" adds a system message at the end, other values nothing.
        response_format: a type or {"type": type}; "json_object" and "json_schema" add a system message.
        response_schema: wins over the schema inside `response_format`.
        add_generation_prompt: end inside the channel that the model continues.
        image_prompts: texts of control tokens, one for each image part or placeholder in the order they come. None
            leaves placeholders in place.
    Raises: ChatError (of the released type too): a message lacks a key, a field has a wrong type, tool arguments are
        not an object, a tool result belongs to no call, images and prompts do not match.
    """
    return render(
        messages,
        tools,
        thinking=thinking,
        thinking_effort=thinking_effort,
        tool_choice=tool_choice,
        response_format=response_format,
        response_schema=response_schema,
        add_generation_prompt=add_generation_prompt,
        image_prompts=image_prompts,
    ).segments


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | str | None = None,
    response_schema: Any = None,
    add_generation_prompt: bool = True,
    image_prompts: Sequence[str] | None = None,
    continue_final: str | None = None,
    placeholders_in_text: bool = True,
) -> Rendering:
    """`build_segments`, saying also which segments the model writes; or open at the end of the last message.

    `continue_final` ("content" or "reasoning_content") stops where the last message's field ends, for the model to go
    on from there; it excludes a generation prompt. `placeholders_in_text=False` gives image prompts to image parts alone,
    and leaves placeholders that a text spells as they are.
    """
    writer = _Writer(image_prompts, placeholders_in_text)
    if tools:
        writer.message([("role", "system"), ("type", "tool-declare")], TOOLS_TEXT.format(sorted_json(tools, "tools")))
    if thinking and thinking_effort is not None:
        if thinking_effort not in THINKING_EFFORTS:
            raise ThinkingEffortError(
                f"thinking_effort: found {thinking_effort!r}, expected one of {THINKING_EFFORTS}, or None for no message"
            )
        writer.message([("role", "system"), ("type", "thinking-effort")], EFFORT_TEXT.format(thinking_effort))
    _write_messages(writer, messages, thinking, continue_final)
    if continue_final is None:
        if isinstance(tool_choice, str) and tool_choice in TOOL_CHOICE_TEXTS:
            body = f"The system is invoked with `tool_choice={tool_choice}`.\n{TOOL_CHOICE_TEXTS[tool_choice]}"
            writer.message([("role", "system"), ("type", "tool-choice")], body)
        _write_response_format(writer, response_format, response_schema)
        if add_generation_prompt:
            writer.open("message", [("role", "assistant")])
            writer.open("think" if thinking else "response")
    writer.check_images()
    return Rendering(writer.segments, writer.generated)


class _Writer:
    """Collects segments; knows how tags, attributes and images are written."""

    def __init__(self, image_prompts: Sequence[str] | None, placeholders_in_text: bool = True):
        self.placeholders_in_text = placeholders_in_text
        self.segments: list[Segment] = []
        self.generated: list[bool] = []
        self.answering = False  # inside what the model writes
        self.image_prompts = None if image_prompts is None else list(image_prompts)
        self.images = 0

    def add(self, text: str, special: bool = False, generated: bool | None = None) -> None:
        if text:
            self.segments.append(Segment(text, special))
            self.generated.append(self.answering if generated is None else generated)

    def open(self, tag: str, attributes: Iterable[tuple[str, Any]] = ()) -> None:
        self.add(OPEN, True)
        self.add(tag)
        for key, value in attributes:
            self.add(f" {key}")
            self.add('="')
            self.add(str(value).replace("&", "&amp;").replace('"', "&quot;"))
            self.add('"')
        self.add(SEP, True)

    def close(self, tag: str) -> None:
        self.add(CLOSE, True)
        self.add(tag)
        self.add(SEP, True)

    def end_message(self) -> None:
        self.close("message")
        self.add(END_OF_MESSAGE, True)

    def message(self, attributes: Iterable[tuple[str, Any]], body: str) -> None:
        self.open("message", attributes)
        self.add(body)
        self.end_message()

    def text(self, text: str) -> None:
        """Ordinary text; where image prompts are given, placeholders in it are images."""
        if self.image_prompts is None or not self.placeholders_in_text:
            return self.add(text)
        for at, run in enumerate(text.split(IMAGE_PLACEHOLDER)):
            if at:
                self.image()
            self.add(run)

    def image(self) -> None:
        self.images += 1
        if self.image_prompts is None:
            return self.add(IMAGE_PLACEHOLDER, True, generated=False)
        if self.images > len(self.image_prompts):
            raise ChatError(
                f"image_prompts: found {len(self.image_prompts)}, but the conversation has at least {self.images} "
                "images and placeholders; give one prompt for each"
            )
        self.add(self.image_prompts[self.images - 1], True, generated=False)

    def content(self, content: Any, where: str) -> None:
        if content is None:
            return
        if isinstance(content, str):
            return self.text(content)
        if not isinstance(content, (list, tuple)):
            raise ChatTypeError(f"{where}: found {type(content).__name__}, expected text, None or a list of parts")
        for at, part in enumerate(content):
            place = f"{where}[{at}]"
            if not isinstance(part, Mapping):
                raise ChatTypeError(f"{place}: found {type(part).__name__}, expected a dict with a type")
            kind = need(part, "type", place)
            if kind in IMAGE_PARTS:
                self.image()
            elif "text" not in part and kind != "text":
                raise ChatKeyError(f'{place}: a part of type {kind!r} without "text"; only text and images can be said')
            else:
                self.text(as_text(need(part, "text", place), f'{place}["text"]'))

    def check_images(self) -> None:
        if self.image_prompts is not None and self.images != len(self.image_prompts):
            raise ChatError(
                f"image_prompts: found {len(self.image_prompts)}, but the conversation has {self.images} images and "
                "placeholders; give one prompt for each"
            )


def _write_messages(writer: _Writer, messages: Sequence[Any], thinking: bool, continue_final: str | None) -> None:
    if not isinstance(messages, (list, tuple)):
        raise ChatTypeError(f"messages: found {type(messages).__name__}, expected a list of dicts")
    if continue_final is not None:
        _check_continue(messages, thinking, continue_final)
    calls: list[str] = []  # tool names the last assistant message called
    results = 0  # tool messages since then
    for index, message in order_tool_results(messages):
        where = f"messages[{index}]"
        role = need(message, "role", where)
        if role in ("system", "user"):
            if role == "system" and message.get("tools"):
                body = MORE_TOOLS_TEXT.format(sorted_json(message["tools"], f'{where}["tools"]'))
                writer.message([("role", "system"), ("type", "tool-declare")], body)
                continue
            writer.open("message", [("role", role), *_name(message)])
            writer.content(message.get("content"), f'{where}["content"]')
            writer.end_message()
        elif role == "assistant":
            calls, results = [call["name"] for call in tool_calls(message, where)], 0
            stop = continue_final if index == len(messages) - 1 else None
            _write_assistant(writer, message, where, thinking, stop)
        elif role == "tool":
            results += 1
            name = message["tool"] if "tool" in message else message.get("name")
            if name is None:
                if results > len(calls):
                    raise ChatError(
                        f"{where}: tool result {results} follows an assistant message with {len(calls)} tool calls; "
                        'give it a "tool" or "name", or a tool_call_id of that message'
                    )
                name = calls[results - 1]
            writer.open("message", [("role", "tool"), ("tool", name), ("index", results)])
            writer.content(message.get("content"), f'{where}["content"]')
            writer.end_message()


def _write_assistant(writer: _Writer, message: Mapping, where: str, thinking: bool, stop: str | None) -> None:
    writer.open("message", [("role", "assistant"), *_name(message)])
    if thinking:
        writer.open("think")
        writer.answering = True
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None and as_text(reasoning, f"{where}: the reasoning").strip():
            writer.text(reasoning)
        if stop == "reasoning_content":
            return
        writer.close("think")
    writer.open("response")
    writer.answering = True
    writer.content(message.get("content"), f'{where}["content"]')
    if stop == "content":
        return
    writer.close("response")
    if message.get("tool_calls"):
        writer.open("tools")
        for index, call in enumerate(tool_calls(message, where), 1):
            writer.open("call", [("tool", call["name"]), ("index", index)])
            _write_arguments(writer, call.get("arguments"), f'{where}["tool_calls"][{index - 1}]')
            writer.close("call")
        writer.close("tools")
    writer.end_message()
    writer.answering = False


def _write_arguments(writer: _Writer, arguments: Any, where: str) -> None:
    if arguments is None:
        return
    if isinstance(arguments, str):
        if not arguments.strip():
            return
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            # The model wrote something that is not JSON; it is shown back as it was.
            writer.open("json", [("type", "object")])
            writer.text(arguments)
            writer.close("json")
            return
        if not isinstance(parsed, dict):
            raise ChatError(f"{where}: the arguments parse to {type_name(parsed)}, expected a JSON object")
        arguments = parsed
    if not isinstance(arguments, Mapping):
        raise ChatTypeError(
            f"{where}: arguments are {type(arguments).__name__}, expected a dict, a JSON string or None"
        )
    for key, value in arguments.items():
        writer.open("argument", [("key", key), ("type", type_name(value))])
        writer.text(value if isinstance(value, str) else as_json(value, f"{where}, argument {key!r}"))
        writer.close("argument")


def _write_response_format(writer: _Writer, response_format: Any, response_schema: Any) -> None:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if not isinstance(kind, str) or kind not in ("json_object", "json_schema"):
        return
    body = f"The system is invoked with `response_format={kind}`.\n{JSON_TEXT}"
    if kind == "json_schema":
        schema = response_schema
        if schema is None and isinstance(response_format, Mapping):
            schema = response_format.get("json_schema")
            if isinstance(schema, Mapping):
                schema = schema.get("schema", schema.get("json_schema", schema))
        body += "\n" + SCHEMA_TEXT.format(sorted_json(schema, "response_format"))
    writer.message([("role", "system"), ("type", "response-format")], body)


def _check_continue(messages: Sequence[Any], thinking: bool, field: str) -> None:
    last = messages[-1] if messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise ChatError("continue_final_message: the last message is not the assistant's, so there is none to continue")
    if field not in ("content", "reasoning_content"):
        raise ChatError(f'continue_final_message: found {field!r}, expected "content" or "reasoning_content"')
    if field == "reasoning_content" and not thinking:
        raise ChatError("continue_final_message: without thinking there is no reasoning to continue")
    if field == "content" and last.get("tool_calls"):
        raise ChatError("continue_final_message: the last message has tool calls, which come after its content")


def _name(message: Mapping) -> list[tuple[str, Any]]:
    return [("name", message["name"])] if message.get("name") else []
