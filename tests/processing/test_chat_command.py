"""`kimi-hf chat`: the terminal and the command, with scripted models and a small real one."""

import io
import json

import pytest
import torch

from kimi_hf import chat
from kimi_hf.cli import main
from kimi_hf.processing import KimiK3Processor, KimiK3VisionProcessor
from kimi_hf.processing.chat_session import ChatSession

from .scripted import ScriptedModel, parse, scripted_terminal


def test_terminal_shows_thinking_calls_and_answers(tokenizer, monkeypatch):
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    script = [
        {"content": "", "reasoning_content": "need it", "tool_calls": [call]},
        {"content": "12 degrees", "reasoning_content": "good"},
        {"content": "bye"},
    ]
    model = ScriptedModel(tokenizer, script)
    session = ChatSession(model, tokenizer)
    lines = [
        "",
        "/help",
        "/effort low",
        "weather?\\",
        "in Z",
        "12C",
        "/reset",
        "/system S",
        "/think on",
        "bye",
        "/quit",
        "no",
    ]
    text = scripted_terminal(session, lines, monkeypatch)
    assert '[thinking] need it [/thinking]\n-> weather({"city": "Zürich"})' in text
    assert "[thinking] good [/thinking]\n12 degrees\n" in text and "/image PATH" in text
    second = tokenizer.decode(model.calls[1]["ids"])
    assert "weather?\nin Z" in second and 'role="tool" tool="weather" index="1"<|sep|>12C<' in second
    assert "thinking_effort=low" in second and model.calls[1]["cache"] == "cache of call 1"
    third = tokenizer.decode(model.calls[2]["ids"])
    assert 'role="system"<|sep|>S<' in third and "weather" not in third
    model.script = [{"content": "x", "reasoning_content": "y"}]
    session.reset()
    assert "\033[2my\033[0m\nx\n" in scripted_terminal(session, ["hi", "/nonsense"], monkeypatch, color=True)


def test_terminal_survives_errors(tokenizer, monkeypatch, tmp_path):
    session = ChatSession(ScriptedModel(tokenizer, [{"content": "fine"}]), tokenizer)
    (tmp_path / "x.png").write_bytes(b"")
    text = scripted_terminal(session, [f"/image {tmp_path / 'x.png'}", "without"], monkeypatch)
    assert "error: the checkpoint has no preprocessor_config.json" in text and "fine" in text
    pillow = pytest.importorskip("PIL.Image")
    gone = tmp_path / "gone.png"
    pillow.new("RGB", (30, 20)).save(gone)
    session = ChatSession(
        ScriptedModel(tokenizer, [{"content": "fine"}]), tokenizer, KimiK3Processor(KimiK3VisionProcessor(), tokenizer)
    )
    paths = [
        tmp_path / "none.png",
        tmp_path / "x.png",
        tmp_path,
        "~nobody/x.png",
        "x" * 5000,
        "a\0b",
        f"'{gone}'",
        gone,
    ]

    def lines():
        yield from (f"/image {path}" for path in paths)
        gone.unlink()
        yield from ("look", "/think", "without", "/image")

    text = scripted_terminal(session, lines(), monkeypatch)
    assert text.count("error: no such file") == 5 and "is not a readable image" in text
    assert "error: image 1 of 2: " in text and text.count("fine") == 1
    assert [message["content"] for message in session.messages] == ["without", "fine"]

    def broken(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(session.model, "generate", broken)
    assert "error: no memory left" in scripted_terminal(session, ["again"], monkeypatch)
    assert len(session.messages) == 2


def test_what_a_model_writes_does_not_steer_the_terminal(tokenizer, monkeypatch):
    call = {"function": {"name": "f\x1b[2J", "arguments": {}}}
    said = {"content": "a\x1b]0;title\x07\tb\n\x9b31mc", "tool_calls": [call]}
    session = ChatSession(ScriptedModel(tokenizer, [said]), tokenizer)
    text = scripted_terminal(session, ["hi"], monkeypatch)
    assert "a\ufffd]0;title\ufffd\tb\n\ufffd31mc" in text and "f\ufffd[2J" in text and "\x1b" not in text
    assert session.messages[1]["content"] == said["content"]


def test_lines_that_are_not_text_are_passed_over(tokenizer, monkeypatch):
    session = ChatSession(ScriptedModel(tokenizer, [{"content": "fine"}]), tokenizer)
    replies = [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "hi", EOFError()]

    def read(prompt=""):
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    chat.Terminal(session, out, False).loop()
    assert "not text in this terminal's encoding" in out.getvalue() and "fine" in out.getvalue()


@pytest.fixture
def checkpoint(tokenizer_folder, text_model, tmp_path):
    for path in tokenizer_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text_model.save_pretrained(tmp_path)
    return tmp_path


def test_command_talks_with_a_checkpoint(checkpoint, monkeypatch, capsys):
    lines = iter(["hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    tools = checkpoint / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "f"}}]))
    options = (
        "--max-new-tokens",
        4,
        "--temperature",
        0.7,
        "--top-p",
        0.9,
        "--seed",
        1,
        "--tools",
        tools,
        "--device",
        "cpu",
        "--experts-on-disk",
    )
    assert chat.run(parse(checkpoint, *options)) == 0
    assert "[thinking]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "foo"], "invalid choice: 'foo'"),
        (["--top-p", "5"], "found '5', expected a number from 1e-06 to 1"),
        (["--top-p", "0"], "found '0'"),
        (["--temperature", "-1"], "found '-1', expected a number from 0"),
        (["--temperature", "nan"], "found 'nan'"),
        (["--temperature", "warm"], "found 'warm'"),
        (["--max-new-tokens", "0"], "expected an integer from 1"),
        (["--max-new-tokens", "1.5"], "found '1.5'"),
        (["--seed", "9" * 30], "expected an integer from 0"),
        (["--device", "toaster"], "found 'toaster', expected one of auto"),
        (["--device", "cuda:99"], "a device that torch finds on this machine"),
        (["--device", "meta"], "found 'meta'"),
        (["--effort", "medium"], "invalid choice"),
        (["--tools", "nowhere.json"], "nowhere.json: No such file"),
        (["--tools", "broken.json"], "broken.json: not JSON"),
        (["--tools", "object.json"], "object.json: found dict, expected a list of tools"),
        (["--tools", "numbers.json"], "numbers.json: found list, expected a list of tools"),
        (["--temperature", "0", "--top-p", "0.5"], "no meaning with --temperature 0"),
    ],
    ids=lambda value: "".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_options_are_one_line_and_status_2(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("broken", "[{"), ("object", "{}"), ("numbers", "[1]")):
        (tmp_path / f"{name}.json").write_text(text)
    try:
        status = main(["chat", "somewhere", *options])
    except SystemExit as stop:
        status = stop.code
    last = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and words in last and last.startswith("kimi-hf chat:")


def test_checkpoints_that_cannot_talk_are_one_line_and_status_1(checkpoint, tmp_path, capsys):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())

    def said(path):
        assert main(["chat", str(path)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert "bare: no tokenizer in this folder" in said(folder)
    assert "no such folder" in said(tmp_path / "nowhere") and "no such folder" in said(folder / "config.json")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    assert "bare" in said(folder)  # no weights
    (folder / "tiktoken.model").write_bytes(b"not base64!")
    assert "tiktoken.model, line 1" in said(folder)


def test_generation_options():
    assert chat.generation_options(parse("x")) == {"max_new_tokens": 4096}
    assert chat.generation_options(parse("x", "--temperature", 0)) == {"max_new_tokens": 4096, "do_sample": False}
    assert chat.generation_options(parse("x", "--top-p", 0.5, "--max-new-tokens", 3)) == {
        "max_new_tokens": 3,
        "do_sample": True,
        "top_p": 0.5,
    }
