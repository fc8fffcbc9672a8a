"""`kimi-hf chat PATH`: talk with a checkpoint in the terminal.

Answers are printed as they are written, reasoning dimmed, tool calls shown; the results of tools are asked for. Lines
that begin with a slash are commands (`/help`).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from .errors import ChatError, MediaError
from .processing.chat_encoding import THINKING_EFFORTS

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tiktoken.model")
# What a model writes must not steer the terminal: control characters but for line breaks and tabs are shown as U+FFFD.
HARMLESS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
HELP = """\
/image PATH      show an image with the next message
/system TEXT     set the system message (empty: none)
/think on|off    let the model think before it answers
/effort LEVEL    low, high, max, or none for the model's own habit
/reset           forget the conversation
/quit            leave (or end of input)
A line that ends with a backslash goes on in the next."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kimi-hf chat`."""
    parser.add_argument("path", help="folder or hub name of a checkpoint with a chat format")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--tools", type=tools_file, help="JSON file with a list of tools the model may call")
    parser.add_argument("--no-thinking", action="store_true", help="answer without a thinking channel")
    parser.add_argument("--effort", choices=[*THINKING_EFFORTS, "none"], default="max", help="thinking effort")
    parser.add_argument(
        "--max-new-tokens", type=number(int, 1, 2**31), default=4096, help="longest answer, thinking included"
    )
    parser.add_argument(
        "--temperature", type=number(float, 0, 100), help="0 is greedy; default: the checkpoint's generation config"
    )
    parser.add_argument("--top-p", type=number(float, 1e-6, 1), help="nucleus sampling, above 0 and up to 1")
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), help="seed of sampling")
    parser.add_argument("--device", type=device, default="auto", help="device map or device (auto, cpu, cuda:0)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto is the checkpoint's")
    parser.add_argument(
        "--experts-on-disk", action="store_true", help="read routed experts from their files as they are needed"
    )
    parser.add_argument("--no-color", action="store_true", help="no escape codes; so too without a terminal")


def number(kind: type, least: float, most: float) -> Callable[[str], Any]:
    """A type of options for argparse: an int or float from `least` to `most`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:  # false for NaN as well
            article = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {article} from {least} to {most}")
        return value

    return read


def tools_file(path: str) -> list[Any]:
    """A type of options for argparse: the list of tools in a JSON file."""
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path}: not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise argparse.ArgumentTypeError(
            f"{path}: found {type(tools).__name__}, expected a list of tools (JSON objects)"
        )
    return tools


def device(name: str) -> str:
    """A type of options for argparse: a device map's name, or a device that this machine has."""
    if name in DEVICE_MAPS:
        return name
    import torch

    try:
        torch.empty(0, device=name)
        usable = torch.device(name).type != "meta"
    except (RuntimeError, AssertionError, ValueError):
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(
            f"found {name!r}, expected one of {', '.join(DEVICE_MAPS)}, or a device that torch finds on this machine"
        )
    return name


def run(args: argparse.Namespace) -> int:
    """Load the checkpoint and talk until the input ends. Returns the exit status: 2 for options, 1 for the checkpoint."""
    if args.temperature == 0 and args.top_p is not None:
        print(
            "kimi-hf chat: --top-p has no meaning with --temperature 0, which is greedy; leave one out", file=sys.stderr
        )
        return 2
    try:
        session = open_session(args)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        print(f"kimi-hf chat: {lines[0] if lines else type(error).__name__}", file=sys.stderr)
        return 1
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may write what a terminal cannot show
    color = sys.stdout.isatty() and not args.no_color and "NO_COLOR" not in os.environ
    Terminal(session, sys.stdout, color).loop()
    return 0


def open_session(args: argparse.Namespace) -> Any:
    """A `Session` for the parsed options."""
    import torch
    from transformers import AutoModelForCausalLM, AutoProcessor
    from transformers.utils import cached_file

    from .processing.chat_session import ChatSettings, open_chat

    tokenizer = load_tokenizer(args.path)
    processor = None
    if cached_file(args.path, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False):
        processor = AutoProcessor.from_pretrained(args.path)
    storage = {"expert_storage": "disk"} if args.experts_on_disk else {}
    model = AutoModelForCausalLM.from_pretrained(args.path, dtype=args.dtype, device_map=args.device, **storage).eval()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    settings = ChatSettings(
        system=args.system,
        tools=args.tools,
        thinking=not args.no_thinking,
        thinking_effort=None if args.effort == "none" else args.effort,
    )
    return open_chat(model, tokenizer, processor, settings=settings, generation=generation_options(args))


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint.

    Raises: ChatError: there is no such folder, or no tokenizer in it.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if not folder.is_dir() and (folder.is_absolute() or path.startswith((".", "~")) or folder.exists()):
        raise ChatError(f"{path}: no such folder; give the folder or the hub name of a checkpoint")
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ChatError(
            f"{path}: no tokenizer in this folder, so there is nothing to talk with; copy tiktoken.model and "
            "tokenizer_config.json of the checkpoint's model into it"
        )
    return AutoTokenizer.from_pretrained(path)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `generate()`; what is not given is left to the checkpoint's generation config."""
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
    if args.temperature == 0:
        options["do_sample"] = False
    elif args.temperature is not None or args.top_p is not None:
        options["do_sample"] = True
        options.update({"temperature": args.temperature} if args.temperature is not None else {})
        options.update({"top_p": args.top_p} if args.top_p is not None else {})
    return options


class Terminal:
    """Reads lines, runs commands, prints what the session shows.

    Args: session: `Session`. out: where to print. color: dim reasoning by escape codes; else label it.
    """

    DIM, CALL, PLAIN = "\033[2m", "\033[36m", "\033[0m"

    def __init__(self, session: Any, out: TextIO, color: bool):
        self.session = session
        self.out = out
        self.color = color
        self.images: list[str] = []
        self._channel: str | None = None

    def loop(self) -> None:
        self._say("Talk to the model; /help shows the commands.\n")
        while True:
            try:
                line = self._read("> ")
            except (EOFError, KeyboardInterrupt):
                self._say("\n")
                return
            except UnicodeDecodeError as error:
                self._say(f"error: that line is not text in this terminal's encoding ({error})\n")
                continue
            if line.startswith("/"):
                if line.strip() == "/quit":
                    return
                self.command(line)
            elif line.strip():
                self.ask(line)

    def ask(self, text: str) -> None:
        """One message of the user, and turns of the model until it calls no more tools."""
        content: Any = text
        if self.images:
            images = [{"type": "image", "image": path} for path in self.images]
            content, self.images = [*images, {"type": "text", "text": text}], []
        messages = [{"role": "user", "content": content}]
        while messages:
            try:
                answer = self.session.turn(messages, self._show)
            except (OSError, ValueError, RuntimeError) as error:  # the talk goes on as if nothing had been said
                self._leave_channel()
                self._say(f"error: {error}\n")
                return
            self._leave_channel()
            self._say("\n")
            messages = self._results(answer.get("tool_calls", []))

    def command(self, line: str) -> None:
        """Run a line that begins with a slash."""
        name, _, value = line[1:].strip().partition(" ")
        value = value.strip()
        settings = self.session.settings
        if name == "image" and value:
            self._add_image(value)
        elif name == "system":
            settings.system = value or None
        elif name == "think" and value in ("on", "off"):
            settings.thinking = value == "on"
        elif name == "effort" and value in (*THINKING_EFFORTS, "none"):
            settings.thinking_effort = None if value == "none" else value
        elif name == "reset" and not value:
            self.session.reset()
            self.images = []
        else:
            self._say(HELP + "\n")

    def _add_image(self, path: str) -> None:
        """Keep an image for the next message, if there is one and the model can be shown it."""
        from .processing.media_loading import load_image

        if self.session.processor is None:
            return self._say("error: the checkpoint has no preprocessor_config.json, so no image can be shown to it\n")
        if path[0] == path[-1] and path[0] in "'\"":  # as terminals paste names of files
            path = path[1:-1]
        path = os.path.expanduser(path)
        if not os.path.isfile(path):
            return self._say(f"error: no such file: {path}\n")
        try:
            load_image(path)
        except MediaError as error:
            return self._say(f"error: {error}\n")
        self.images.append(path)

    def _results(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        results = []
        for call in calls:
            name = call["function"]["name"]
            try:
                text = self._read(f"result of {name}> ")
            except (EOFError, KeyboardInterrupt):
                self._say("\n")
                return []
            results.append({"role": "tool", "tool_call_id": call["id"], "tool": name, "content": text})
        return results

    def _show(self, deltas: list[dict[str, Any]]) -> None:
        for delta in deltas:
            for field, value in delta.items():
                if field == "tool_calls":
                    self._leave_channel()
                    for call in value:
                        shown = f"-> {call['function']['name']}({call['function']['arguments']})".translate(HARMLESS)
                        self._say((f"{self.CALL}{shown}{self.PLAIN}" if self.color else shown) + "\n")
                else:
                    self._enter_channel(field)
                    self._say(value.translate(HARMLESS))

    def _enter_channel(self, field: str) -> None:
        if field != self._channel:
            self._leave_channel()
            self._channel = field
            if field == "reasoning_content":
                self._say(self.DIM if self.color else "[thinking] ")

    def _leave_channel(self) -> None:
        if self._channel == "reasoning_content":
            self._say((self.PLAIN if self.color else " [/thinking]") + "\n")
        elif self._channel is not None:
            self._say("\n")
        self._channel = None

    def _read(self, prompt: str) -> str:
        lines = [input(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("  "))
        return "\n".join(lines)

    def _say(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
