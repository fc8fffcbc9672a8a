"""`kimi-hf serve`: what transformers' server is told, and what it then streams. No server is started here."""

import argparse
import sys
import types

import torch
import transformers
from transformers.cli import transformers as transformers_cli
from transformers.cli.serving.utils import (
    DirectStreamer,
    ReasoningText,
    ToolCall,
    build_response_parser,
    parse_assistant_message,
)
from transformers.models.auto import modeling_auto
from transformers.utils import import_utils

import kimi_hf.processing
from kimi_hf import serve
from kimi_hf.errors import ChatError, MediaError
from kimi_hf.processing.chat_encoding import render

MESSAGE = {
    "role": "assistant",
    "content": "sure 漢",
    "reasoning_content": "hm",
    "tool_calls": [{"function": {"name": "f", "arguments": {"n": 3, "s": "3"}}}],
}


def arguments(*words):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


def test_command_needs_the_server(monkeypatch, capsys):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    assert serve.run(arguments("folder")) == 1
    assert "transformers[serving]" in capsys.readouterr().err


def test_command_completes_the_server_and_starts_it(monkeypatch):
    modules = {name: types.ModuleType(name) for name in ("chat_completion", "response", "server")}
    refused = {}
    app = types.SimpleNamespace(add_exception_handler=refused.__setitem__)
    modules["server"].build_server = lambda: app
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"transformers.cli.serving.{name}", module)
        monkeypatch.setattr(transformers.cli.serving, name, module, raising=False)
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: True)
    for name in serve.SERVED:
        monkeypatch.setattr(transformers, name, None, raising=False)
    names = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    monkeypatch.setattr(modeling_auto, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", names)
    started = []
    monkeypatch.setattr(transformers_cli, "app", lambda words, standalone_mode: started.append(words))
    monkeypatch.setattr(kimi_hf.processing.KimiK3VisionProcessor, "reads_paths", True)
    assert serve.run(arguments("folder", "--port", "8000")) == 0
    assert kimi_hf.processing.KimiK3VisionProcessor.reads_paths is False  # of the machine, for whoever sends requests
    assert started == [["serve", "folder", "--port", "8000"]]
    assert all(getattr(transformers, name) is getattr(kimi_hf, name) for name in serve.SERVED)
    assert names["kimi_k3"] == "KimiK3ForConditionalGeneration"
    told = modules.pop("server").build_server()
    assert told is app and set(refused) == {ChatError, MediaError}  # answered with their messages
    assert all(module.build_response_parser is serve.response_parser for module in modules.values())


def streamed(tokenizer, ids, parser):
    """What the server's streamer puts on its queue for generated `ids`."""
    items = []
    queue = types.SimpleNamespace(put_nowait=items.append)
    loop = types.SimpleNamespace(call_soon_threadsafe=lambda call, *values: call(*values))
    streamer = DirectStreamer(tokenizer._tokenizer, loop, queue, response_parser=parser)
    streamer.put(torch.tensor([[0]]))
    for index in ids:
        streamer.put(torch.tensor([index]))
    streamer.end()
    assert items.pop() is None
    return items


def test_stream_of_the_server(tokenizer):
    segments, generated = render([MESSAGE], add_generation_prompt=False)
    ids = tokenizer.encode_segments([s for s, mine in zip(segments, generated, strict=True) if mine])
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], return_tensors="pt", return_dict=True)
    items = streamed(tokenizer, ids, serve.response_parser(tokenizer, None, prompt["input_ids"]))
    assert "".join(item for item in items if isinstance(item, ReasoningText)) == "hm"
    assert "".join(item for item in items if type(item) is str) == "sure 漢"
    assert [item for item in items if isinstance(item, ToolCall)] == [ToolCall("f", '{"n": 3, "s": "3"}')]
    # Without our command the server builds its own parser from the template that the tokenizer hands out.
    plain = build_response_parser(tokenizer, None, prompt["input_ids"])
    items = streamed(tokenizer, ids, plain)
    assert "".join(item for item in items if type(item) is str) == "sure 漢"
    assert [item.name for item in items if isinstance(item, ToolCall)] == ["f"]
    # Not streamed, it asks the tokenizer.
    content, reasoning, calls = parse_assistant_message(tokenizer, None, torch.tensor(ids), prompt["input_ids"])
    assert (content, reasoning, calls) == ("sure 漢", "hm", [ToolCall("f", '{"n": 3, "s": "3"}')])


def test_other_formats_keep_the_parser_of_transformers(tokenizer):
    other = types.SimpleNamespace(response_template=None, decode=tokenizer.decode)
    model = types.SimpleNamespace(config=types.SimpleNamespace(model_type="gpt2"))
    assert serve.response_parser(other, model, [97]) is None
