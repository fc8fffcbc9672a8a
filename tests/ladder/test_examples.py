"""The ladder's examples run, and say what they promise."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "ladder"


def _main(name, *arguments):
    return runpy.run_path(str(EXAMPLES / name))["main"](list(arguments))


@pytest.mark.parametrize(("rung", "change"), [("gpt2", "positions=none"), ("kimi-k3", "residual=full_attn_res")])
def test_train_a_rung(capsys, rung, change):
    _main("train_a_rung.py", "--rung", rung, "--steps", "2", "--width", "32", "--set", change)
    said = capsys.readouterr().out
    assert rung in said and "nats a byte" in said and "def main(" in said


def test_one_change_at_a_time(capsys):
    _main("one_change_at_a_time.py", "--steps", "1", "--width", "32")
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 12 and lines[1].startswith("GPT-2") and lines[-1].startswith("attention over depth")


def test_your_gpt2(goldens, capsys):
    _main("your_gpt2.py", str(goldens("gpt2_tiny")))
    said = capsys.readouterr().out
    assert "LadderForCausalLM" in said and float(said.split("GPT-2: ")[1].split()[0]) < 1e-4
