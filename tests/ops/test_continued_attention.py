"""Attention after a past: two merged parts equal the definition, and no mask is made."""

import pytest
import torch

from kimi_hf.errors import ShapeError
from kimi_hf.ops.continued_attention import continued_attention, worth_continuing

LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def _inputs(queries, keys, width=16, v_width=16, dtype=torch.float32, spread=1.0):
    def draw(*shape):
        return torch.randn(*shape).to(dtype)

    return spread * draw(2, 3, queries, width), draw(2, 3, keys, width), draw(2, 3, keys, v_width)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (7, 7), (5, 64), (64, 65), (130, 700)])
@pytest.mark.parametrize(("width", "v_width"), [(16, 16), (24, 10), (10, 24)])
def test_two_parts_are_the_definition(queries, keys, width, v_width, dtype):
    q, k, v = _inputs(queries, keys, width, v_width, dtype)
    found = continued_attention(q, k, v, scale=0.3)
    expected = continued_attention(q.double(), k.double(), v.double(), scale=0.3, backend="reference")
    assert found.shape == (2, queries, 3, v_width) and found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=LIMITS[dtype])


def test_scores_far_apart_stay_finite():
    for spread in (1e-3, 300.0):
        q, k, v = _inputs(6, 40, spread=spread)
        out = continued_attention(q, k, v, scale=1.0)
        torch.testing.assert_close(
            out, continued_attention(q, k, v, scale=1.0, backend="reference"), rtol=1e-4, atol=1e-4
        )


def test_what_it_does_not_serve():
    q, k, v = _inputs(4, 9)
    with pytest.raises(ShapeError, match="4 queries but 3 keys"):
        continued_attention(q, k[:, :, :3], v[:, :, :3], scale=1.0)
    with pytest.raises(ShapeError, match="no gradients"):
        continued_attention(q.requires_grad_(), k, v, scale=1.0)
    with torch.no_grad():
        assert worth_continuing(q, 4, 5)
        assert not worth_continuing(q, 1, 5) and not worth_continuing(q, 4, 0)
    assert not worth_continuing(q, 4, 5)
