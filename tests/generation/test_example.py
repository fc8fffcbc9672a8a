"""The example that keeps a system prompt's cache, run twice: the second run reads it from disk."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat_prefix_cache.py"


def test_the_system_prompt_is_read_once(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--cache", str(tmp_path / "system.safetensors"), "--max-new-tokens", "4"]
    for source in ("tokens read in", "tokens from"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert source in done.stdout and "kept cache: True" in done.stdout
        turns = [line for line in done.stdout.splitlines() if line.startswith("conversation")]
        cached = [int(line.split(" of them")[0].split()[-1]) for line in turns]
        assert cached[0] == cached[2] > 400 and cached[1] > cached[0] and cached[3] > cached[2]
