"""`kimi-hf serve PATH`: an OpenAI-compatible endpoint, by `transformers serve` with our classes.

transformers' server takes a checkpoint's model class from its own namespace, where `KimiLinearForCausalLM` is another
model and `KimiK3ForConditionalGeneration` is missing, and knows which models see images from its own table. Both are
completed here, in the server's process only; and completions are parsed by `chat_parsing`.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from .errors import ChatError, MediaError

SERVED = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kimi-hf serve`; what follows the path goes to `transformers serve`."""
    parser.add_argument("path", help="folder or hub name of a checkpoint")
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="options of `transformers serve`, such as --host, --port, --device, --dtype",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted. Returns the exit status."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        print('kimi-hf serve: the server is not installed; pip install "transformers[serving]"', file=sys.stderr)
        return 1
    complete_server()
    from transformers.cli.transformers import app

    app(["serve", args.path, *args.options], standalone_mode=False)
    return 0


def complete_server() -> None:
    """Let transformers' server find our classes, see that one takes images, parse completions and tell what is wrong.

    Images come with the requests; a path in one would be a file of this machine, so none is read.
    """
    import transformers
    from transformers.cli.serving import chat_completion, response, server
    from transformers.models.auto import modeling_auto

    import kimi_hf

    from .processing import KimiK3VisionProcessor

    KimiK3VisionProcessor.reads_paths = False
    for name in SERVED:
        setattr(transformers, name, getattr(kimi_hf, name))
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.setdefault("kimi_k3", SERVED[0])
    for module in (chat_completion, response):
        module.build_response_parser = response_parser
    server.build_server = _telling_errors(server.build_server)


def _telling_errors(build: Callable[..., Any]) -> Callable[..., Any]:
    """`build` with a server that answers 400 and the message where our checks refuse a request."""

    def refuse(request: Any, error: Exception) -> Any:
        from fastapi.responses import JSONResponse

        return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)

    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)
        for kind in (ChatError, MediaError):
            app.add_exception_handler(kind, refuse)
        return app

    return build_server


def response_parser(processor: Any, model: Any, input_ids: Any, tools: Any = None) -> Any:
    """What the server calls before it streams an answer: our parser for our format, else transformers' own."""
    from transformers.cli.serving.utils import build_response_parser

    from .processing.chat_responses import RESPONSE_TEMPLATE

    tokenizer = getattr(processor, "tokenizer", processor)
    if getattr(tokenizer, "response_template", None) == RESPONSE_TEMPLATE:
        return tokenizer.get_response_parser(prefix=input_ids, tools=tools)
    return build_response_parser(processor, model, input_ids, tools=tools)
