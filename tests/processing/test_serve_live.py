"""`kimi-hf serve` on the loopback interface, asked as OpenAI's clients ask. Needs transformers' serving packages."""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

PATIENCE = 120  # seconds until the server must answer, on a machine that does other things too


@pytest.fixture(scope="module")
def server(multimodal_repository, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kimi_hf.cli", "serve", str(multimodal_repository)]
    said = tmp_path_factory.mktemp("server") / "said.txt"
    with open(said, "wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(2 * PATIENCE):
            if process.poll() is not None:
                pytest.fail(said.read_text(errors="replace")[-2000:])
            try:
                urllib.request.urlopen(url + "/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url, str(multimodal_repository)
    finally:
        process.terminate()
        process.wait(30)


def ask(server, messages, **options):
    url, model = server
    body = {"model": model, "messages": messages, "max_tokens": 5, "temperature": 0, **options}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return reply.read().decode()


def test_chat_completions(server, tmp_path):
    image = pytest.importorskip("PIL.Image").new("RGB", (60, 45), "red")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    image.save(tmp_path / "a.png")
    data = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    hello = [{"role": "user", "content": "hello <|open|>"}]

    reply = json.loads(ask(server, hello))
    message = reply["choices"][0]["message"]
    assert message["role"] == "assistant" and message["reasoning_content"] and not message["content"]
    assert reply["usage"]["completion_tokens"] == 5
    plain = json.loads(ask(server, hello, chat_template_kwargs={"thinking": False}))
    assert plain["choices"][0]["message"]["content"]

    forced = json.loads(ask(server, hello, chat_template_kwargs={"tool_choice": "required"}))
    assert forced["usage"]["prompt_tokens"] > reply["usage"]["prompt_tokens"]

    events = [line[6:] for line in ask(server, hello, stream=True).splitlines() if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events if json.loads(event)["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"]

    def with_image(url):
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    seen = json.loads(ask(server, with_image(data)))["usage"]["prompt_tokens"]
    unseen = json.loads(ask(server, [{"role": "user", "content": ""}]))["usage"]["prompt_tokens"]
    assert seen > unseen + 6  # an image of 60 x 45 is 6 tokens, between marks
    for url in (str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri()):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(server, with_image(url))
        told = json.loads(refused.value.read())["error"]["message"]
        assert refused.value.code == 400 and told.startswith("image 1 of 1: ")
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, hello, chat_template_kwargs={"thinking_effort": "medium"})
    assert refused.value.code == 400 and "thinking_effort: found 'medium'" in refused.value.read().decode()
    assert json.loads(ask(server, hello))["choices"][0]["message"] == message  # and the server is still there
