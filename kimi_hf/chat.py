"""`kimi-hf chat PATH`: talk with a checkpoint in the terminal.

Answers are printed as they are written, reasoning dimmed, tool calls shown; the results of tools are asked for. Lines
that begin with a slash are commands (`/help`).
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from .errors import ChatError, KimiHfError
from .processing.chat_encoding import THINKING_EFFORTS

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
    parser.add_argument("--tools", type=Path, help="JSON file with a list of tools the model may call")
    parser.add_argument("--no-thinking", action="store_true", help="answer without a thinking channel")
    parser.add_argument("--effort", choices=[*THINKING_EFFORTS, "none"], default="max", help="thinking effort")
    parser.add_argument("--max-new-tokens", type=int, default=4096, help="longest answer, thinking included")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the checkpoint's generation config")
    parser.add_argument("--top-p", type=float, help="nucleus sampling")
    parser.add_argument("--seed", type=int, help="seed of sampling")
    parser.add_argument("--device", default="auto", help="device map or device (auto, cpu, cuda:0)")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")
    parser.add_argument("--no-color", action="store_true", help="no escape codes; so too without a terminal")


def run(args: argparse.Namespace) -> int:
    """Load the checkpoint and talk until the input ends. Returns the exit status."""
    try:
        session = open_session(args)
    except (KimiHfError, OSError) as error:
        print(f"kimi-hf chat: {error}", file=sys.stderr)
        return 1
    color = sys.stdout.isatty() and not args.no_color and "NO_COLOR" not in os.environ
    Terminal(session, sys.stdout, color).loop()
    return 0


def open_session(args: argparse.Namespace) -> Any:
    """A `Session` for the parsed options."""
    import torch
    from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer
    from transformers.utils import cached_file

    from .processing.chat_session import ChatSettings, open_chat

    tools = None
    if args.tools is not None:
        tools = json.loads(args.tools.read_text(encoding="utf-8"))
        if not isinstance(tools, list):
            raise ChatError(f"{args.tools}: found {type(tools).__name__}, expected a list of tools")
    tokenizer = AutoTokenizer.from_pretrained(args.path)
    processor = None
    if cached_file(args.path, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False):
        processor = AutoProcessor.from_pretrained(args.path)
    model = AutoModelForCausalLM.from_pretrained(args.path, dtype=args.dtype, device_map=args.device).eval()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    settings = ChatSettings(
        system=args.system,
        tools=tools,
        thinking=not args.no_thinking,
        thinking_effort=None if args.effort == "none" else args.effort,
    )
    return open_chat(model, tokenizer, processor, settings=settings, generation=generation_options(args))


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
            except (KimiHfError, OSError) as error:
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
            if not Path(value).expanduser().is_file():
                return self._say(f"no such file: {value}\n")
            self.images.append(str(Path(value).expanduser()))
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
                        shown = f"-> {call['function']['name']}({call['function']['arguments']})"
                        self._say((f"{self.CALL}{shown}{self.PLAIN}" if self.color else shown) + "\n")
                else:
                    self._enter_channel(field)
                    self._say(value)

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
