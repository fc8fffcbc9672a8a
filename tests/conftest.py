"""Where the golden tensors lie, and the settings every test shares."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("KIMI_HF_FIXTURES", HERE.parent.parent / "shared" / "fixtures"))
LOCAL = HERE / "data"

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def fixture_path(name: str) -> Path:
    """Folder or file `name` of the golden data: the copy in tests/data first, else the shared folder."""
    for root in (LOCAL, SHARED):
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(f"{name} lies neither in {LOCAL} nor in {SHARED}; set KIMI_HF_FIXTURES")


@pytest.fixture
def goldens():
    return fixture_path


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
