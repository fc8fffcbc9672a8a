"""The example that keeps a system prompt's cache, run twice: the second run reads it from disk."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat_prefix_cache.py"


def test_the_system_prompt_is_read_once(tmp_path, monkeypatch, capsys):
    arguments = ["--cache", str(tmp_path / "system.safetensors"), "--max-new-tokens", "4"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    for source in ("tokens read in", "tokens from"):
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        assert done.value.code == 0
        printed = capsys.readouterr().out
        assert source in printed and "kept cache: True" in printed
        turns = [line for line in printed.splitlines() if line.startswith("conversation")]
        cached = [int(line.split(" of them")[0].split()[-1]) for line in turns]
        assert cached[0] == cached[2] > 400 and cached[1] > cached[0] and cached[3] > cached[2]
