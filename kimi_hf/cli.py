"""The `kimi-hf` command: one sub-command per module, imported only when it is called."""

import argparse
import importlib
import sys

from .errors import KimiHfError

# name -> (module with add_arguments(parser) and run(args), what it does)
COMMANDS = {
    "info": ("info", "parameters, bytes and cache sizes of a checkpoint, a config.json or a preset"),
    "convert": ("conversion.convert", "rewrite a checkpoint: packed, dequantised, fused, released"),
    "slice": ("conversion.slice", "cut layers, experts or vocabulary rows out of a checkpoint"),
    "make-tiny": ("conversion.make_tiny", "write a small random checkpoint with a real configuration's shape"),
    "verify": ("conversion.verify", "compare two checkpoints, or one with its configuration"),
    "merge-lora": ("conversion.merge_lora", "merge a LoRA adapter into a released-layout checkpoint"),
    "chat": ("chat", "talk with a checkpoint in the terminal"),
    "serve": ("serve", "serve a checkpoint with transformers' own OpenAI-compatible server"),
    "lab": ("lab.command", "measure the claims of the ladder's story, and write a report"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors of ours are printed in one line, without a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="kimi-hf", description="Kimi K3 checkpoints: look, convert, cut, talk.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = argv[0] if argv and argv[0] in COMMANDS else None
    for name, (module, description) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        if name == chosen:
            implementation = importlib.import_module(f".{module}", __package__)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except (KimiHfError, OSError, ValueError) as error:
        print(f"kimi-hf {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
