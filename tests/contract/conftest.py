"""The contract runs every test once per tiny model."""

import pytest

from .tiny import TINY


@pytest.fixture(params=TINY, ids=lambda tiny: tiny.name)
def tiny(request):
    return request.param
