import pytest
import torch
import torch.nn.functional as F

from kimi_hf.errors import ShapeError


def test_equals_the_formula_and_the_golden(tiny):
    p = tiny.projector
    assert set(p.state_dict()) == {"proj.0.weight", "proj.2.weight", "post_norm.weight"}
    for index in range(3):
        rows = tiny.golden[f"merged.{index}"]
        hidden = F.linear(F.gelu(F.linear(rows, p.proj[0].weight)), p.proj[2].weight)
        wanted = F.rms_norm(hidden, (64,), p.post_norm.weight, eps=1e-5)
        assert (p(rows) - wanted).abs().max() < 1e-5
        assert (p(rows) - tiny.golden[f"projected.{index}"]).abs().max() < 1e-5


def test_a_list_is_projected_item_by_item(tiny):
    items = [tiny.golden[f"merged.{i}"].unflatten(1, (4, 48)) for i in range(3)]
    together = tiny.projector(items)
    assert [len(x) for x in together] == [16, 6, 10]
    assert all((a - tiny.projector(b)).abs().max() < 1e-5 for a, b in zip(together, items, strict=True))
    assert tiny.projector([]) == []


def test_wrong_width(tiny):
    with pytest.raises(ShapeError, match="rows of 192 values"):
        tiny.projector(torch.zeros(3, 4, 47))
