"""Reading conversations: the fields of messages, the calls of an assistant, tool results in the order of their calls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import ChatError
from .chat_errors import ChatKeyError, ChatTypeError


def order_tool_results(messages: Sequence[Any]) -> Iterator[tuple[int, Mapping]]:
    """(index, message) of every dict in `messages`, with each run of tool results in the order of its calls.

    A run is matched by tool_call_id (or id) against the calls of the nearest assistant message before it, ids compared
    as text, the first of equal ids. If all match, the run is sorted by call, stably, and takes the calls' names;
    otherwise it stays as it is.
    """
    positions: dict[str, int] = {}
    names: list[str] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        if not isinstance(message, Mapping):
            at += 1
            continue
        if message.get("role") != "tool":
            if message.get("role") == "assistant":
                calls = tool_calls(message, f"messages[{at}]")
                names = [call["name"] for call in calls]
                positions = {}
                for position, call in enumerate(calls):
                    if call["id"] is not None:
                        positions.setdefault(str(call["id"]), position)
            yield at, message
            at += 1
            continue
        end = at
        while end < len(messages) and isinstance(messages[end], Mapping) and messages[end].get("role") == "tool":
            end += 1
        yield from _order_run([(index, messages[index]) for index in range(at, end)], positions, names)
        at = end


def _order_run(run: list[tuple[int, Mapping]], positions: dict[str, int], names: list[str]) -> list:
    matched = []
    for index, message in run:
        call_id = message.get("tool_call_id")
        if call_id is None:
            call_id = message.get("id")
        if call_id is None or str(call_id) not in positions:
            return run
        position = positions[str(call_id)]
        named = dict(message, tool=names[position])
        if "name" in named:
            named["name"] = names[position]
        matched.append((position, index, named))
    return [(index, message) for _, index, message in sorted(matched, key=lambda item: item[0])]


def tool_calls(message: Mapping, where: str) -> list[dict[str, Any]]:
    """The calls of an assistant message as {"id", "name", "arguments"}; nested under "function" or flat."""
    calls = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        place = f'{where}["tool_calls"][{index}]'
        if not isinstance(call, Mapping):
            raise ChatTypeError(f"{place}: found {type(call).__name__}, expected a dict")
        function = call.get("function") or call
        if not isinstance(function, Mapping):
            raise ChatTypeError(f'{place}["function"]: found {type(function).__name__}, expected a dict')
        name = need(function, "name", place)
        calls.append({"id": call.get("id"), "name": name, "arguments": function.get("arguments")})
    return calls


def need(mapping: Mapping, key: str, where: str) -> Any:
    if key not in mapping:
        raise ChatKeyError(f'{where}: no "{key}"; found the keys {sorted(map(str, mapping))}')
    return mapping[key]


def as_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ChatTypeError(f"{where}: found {type(value).__name__}, expected text")
    return value


def type_name(value: Any) -> str:
    """The JSON type that an argument is marked with; bool before number, because True is an int."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def as_json(value: Any, where: str, **options: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **options)
    except TypeError as error:
        raise ChatTypeError(f"{where}: cannot be written as JSON ({error})") from error
    except (ValueError, RecursionError) as error:
        raise ChatError(f"{where}: cannot be written as JSON ({error})") from error


def sorted_json(value: Any, where: str) -> str:
    """Keys sorted at every level, lists as they are, no spaces."""
    return as_json(value, where, sort_keys=True, separators=(",", ":"))
