"""What a user meets first: the import, the command line, the presets."""

import subprocess
import sys

import pytest

import kimi_hf
from kimi_hf import cli
from kimi_hf.configuration import PRESETS


def test_import_brings_no_optional_package():
    code = (
        "import sys, kimi_hf; "
        "print([n for n in ('triton', 'fla', 'peft', 'trl', 'datasets', 'tiktoken', 'matplotlib') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", kimi_hf.__dir__())
def test_every_public_name_resolves(name):
    assert getattr(kimi_hf, name) is not None or name.startswith("__")


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'KimiK4'"):
        _ = kimi_hf.KimiK4


def test_info_prints_the_released_totals(capsys):
    assert cli.main(["info", "kimi-k3"]) == 0
    printed = capsys.readouterr().out
    for number in ("2,779,484,478,208", "104.19 B", "27,648", "22,580", "840", "434,110,464", "1,560,860,324,864"):
        assert number in printed, number


@pytest.mark.parametrize("name", PRESETS)
def test_info_knows_every_preset(name, capsys):
    assert cli.main(["info", name]) == 0
    assert "total" in capsys.readouterr().out


def test_info_on_a_gpt2_folder(goldens, capsys):
    assert cli.main(["info", str(goldens("gpt2_tiny/config.json").parent)]) == 0
    assert "gpt2: 1 files, 40 tensors" in capsys.readouterr().out


def test_info_on_nonsense_says_what_exists(capsys):
    assert cli.main(["info", "kimi-k4"]) == 1
    assert "kimi-linear-48b-a3b" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert command in capsys.readouterr().out
