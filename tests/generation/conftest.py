"""One built model per name and session: building takes longer than most tests."""

import functools

import pytest

from .models import MODELS, build

_built = functools.cache(build)


@pytest.fixture(params=MODELS)
def model(request):
    """Every model of the matrix; tests leave it as they found it."""
    return _built(request.param)


@functools.cache
def _built_double(name):
    return build(name).double()


@pytest.fixture(params=MODELS)
def double(request):
    """Every model in float64, where a leak cannot hide behind rounding."""
    return _built_double(request.param)


@pytest.fixture(params=["kimi-k3-text", "gated-delta-net"])
def hybrid_or_recurrent(request):
    """One model with both kinds of layers, one with states only; for what does not depend on the mixer."""
    return _built(request.param)


@pytest.fixture
def k3():
    return _built("kimi-k3-text")
