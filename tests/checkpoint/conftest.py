"""Copies of golden checkpoints to be damaged."""

import json

import pytest
from safetensors.torch import load_file, save_file

from ..conftest import fixture_path
from ..modeling.golden import KIMI_LINEAR


@pytest.fixture
def damaged(tmp_path):
    """A function that writes a copy of a fixture with changed tensors and config, and gives its folder."""

    def make(case=KIMI_LINEAR, tensors=None, config=None):
        source = fixture_path(case)
        stored = load_file(source / "model.safetensors")
        fields = json.loads((source / "config.json").read_text())
        if tensors:
            tensors(stored)
        if config:
            config(fields)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return make
