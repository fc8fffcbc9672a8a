"""The third of three rows lies 2^31 elements from the first, by strides that fit 32 bits: offsets are 64-bit.

The memory in between is never touched, so it costs nothing.
"""

import pytest
import torch

from kimi_hf.ops.latent_attention import latent_attention
from kimi_hf.ops.situ import situ
from tests.kernels.guards import close

pytestmark = pytest.mark.interpreted

FAR = 2**30 + 64


def far_rows(rows: torch.Tensor) -> torch.Tensor:
    """The same values with FAR elements between the three entries of the first axis."""
    buffer = torch.empty(2 * FAR + rows[0].numel(), dtype=rows.dtype)
    view = buffer.as_strided(rows.shape, (FAR, *rows.stride()[1:]))
    return view.copy_(rows)


def test_rows_of_a_wide_projection():
    gate, up = torch.randn(3, 24).half(), torch.randn(3, 24).half()
    expected = situ(gate, up, beta=4.0, linear_beta=25.0, backend="triton")
    assert torch.equal(situ(far_rows(gate), up, beta=4.0, linear_beta=25.0, backend="triton"), expected)


def test_a_cache_of_long_rows():
    tensors = [torch.randn(3, 1, 3, 8), torch.randn(3, 1, 3, 4), torch.randn(3, 9, 16), torch.randn(3, 9, 4)]
    tensors = [t.half() for t in (*tensors, torch.randn(3 * 20, 16))]
    options = {"v_head_dim": 12, "scale": 0.3, "backend": "triton"}
    with torch.no_grad():
        expected, _ = latent_attention(*tensors, **options)
        tensors[2:4] = far_rows(tensors[2]), far_rows(tensors[3])
        close(latent_attention(*tensors, **options)[0], expected, 1e-6, "context")
