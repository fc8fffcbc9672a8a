"""Short convolution, gated norm, SiTU and attention over depth against their definitions, through the dispatcher."""

import pytest
import torch

from kimi_hf.errors import BackendError
from kimi_hf.ops.depth_attention import depth_attention, inverse_rms
from kimi_hf.ops.gated_norm import gated_norm
from kimi_hf.ops.short_conv import short_conv
from kimi_hf.ops.situ import situ, situ_glu
from tests.kernels.guards import agree, close, guarded, poisoned_outputs

pytestmark = pytest.mark.interpreted

EXACT = {"values": 2e-6, "gradients": 5e-6}  # fp32 sums of at most a few hundred terms
# One rounding to the type; the interpreter truncates fp32 to bf16 where a GPU rounds to nearest.
ROUNDED = {torch.bfloat16: {"values": 8e-3, "gradients": 8e-3}, torch.float16: {"values": 1e-3, "gradients": 1e-3}}


def both(operation, **options):
    """The kernel's and the definition's call of an operation."""
    return (
        lambda **t: operation(**t, **options, backend="triton"),
        lambda **t: operation(**t, **options, backend="reference"),
    )


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("shape", [(3, 5, 24), (7, 100), (2, 3), (1, 4100)])
def test_gated_norm(shape, activation):
    tensors = {"x": torch.randn(shape) * 3, "weight": torch.randn(shape[-1]), "gate": torch.randn(shape) * 3}
    agree(*both(gated_norm, eps=1e-5, activation=activation), tensors, **EXACT)


def test_gated_norm_without_gate_over_many_programs():
    agree(*both(gated_norm, gate=None, eps=1e-5), {"x": torch.randn(70, 130), "weight": torch.randn(130)}, **EXACT)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_gated_norm_low_precision(dtype):
    tensors = {
        "x": torch.randn(6, 32).to(dtype),
        "weight": torch.randn(32),
        "gate": torch.randn(6, 32).to(dtype),
    }
    agree(*both(gated_norm, eps=1e-5), tensors, **ROUNDED[dtype])


@pytest.mark.parametrize("bounds", [(4.0, 25.0), (1.0, None)])
@pytest.mark.parametrize("shape", [(3, 5, 33), (1, 1100), (2, 1)])
def test_situ(shape, bounds):
    tensors = {"gate": torch.randn(shape) * 6, "up": torch.randn(shape) * 20}
    agree(*both(situ, beta=bounds[0], linear_beta=bounds[1]), tensors, **EXACT)


def test_situ_reads_the_halves_of_a_projection_in_place():
    agree(*both(situ_glu, beta=4.0, linear_beta=25.0), {"gate_up": torch.randn(2, 3, 26) * 6}, **EXACT)


def test_situ_is_relatively_exact_near_zero_and_saturated():
    small = torch.logspace(-6, 2, 64)
    y = situ(small, small, beta=4.0, linear_beta=25.0, backend="triton")
    expected = situ(small.double(), small.double(), beta=4.0, linear_beta=25.0, backend="reference")
    assert ((y - expected).abs() / expected.abs()).max() < 2e-6
    y = situ(torch.tensor([3.0, -6.0]), torch.tensor([40.0, -60.0]), beta=4.0, linear_beta=25.0, backend="triton")
    assert torch.allclose(y, torch.tensor([55.763386, 0.220155]), rtol=3e-6)


def test_situ_fp16_is_the_fp32_result_rounded_once():
    gate, up = (torch.randn(400) * 6).half(), (torch.randn(400) * 20).half()
    rounded = situ(gate, up, beta=4.0, linear_beta=25.0, backend="triton")
    assert torch.equal(rounded, situ(gate.float(), up.float(), beta=4.0, linear_beta=25.0, backend="triton").half())


CONV_CASES = {
    "plain": ((2, 37, 5), 4, False, None),
    "shorter than the window": ((3, 2, 70), 4, True, None),
    "wider than a tile, with a window": ((2, 33, 130), 4, True, None),
    "width 3": ((1, 9, 6), 3, True, None),
    "packed": ((1, 40, 6), 4, False, [0, 1, 1, 17, 40]),
    "packed, with windows": ((1, 40, 6), 4, True, [0, 1, 1, 17, 40]),
    "one token": ((3, 1, 130), 4, True, None),
}


@pytest.mark.parametrize("case, activation", [*((case, "silu") for case in CONV_CASES), ("plain", None)])
def test_short_conv(case, activation):
    (B, T, C), W, with_state, bounds = CONV_CASES[case]
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    sequences = B if bounds is None else len(bounds) - 1
    tensors = {"x": torch.randn(B, T, C), "weight": torch.randn(C, W)}
    if with_state:
        tensors["initial_state"] = torch.randn(sequences, C, W)
    options = {"activation": activation, "output_final_state": True, "cu_seqlens": cu_seqlens}
    agree(*both(short_conv, **options), tensors, **EXACT)


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("with_state", [True, False])
def test_short_conv_without_gradients_carries_the_window_exactly(tokens, with_state):
    x, weight = torch.randn(3, tokens, 130).bfloat16(), torch.randn(130, 1, 4)
    state = torch.randn(3, 130, 4).bfloat16() if with_state else None
    options = {"initial_state": state, "output_final_state": True}
    with poisoned_outputs(), torch.no_grad():
        y, window = short_conv(
            guarded(x), guarded(weight), initial_state=guarded(state), output_final_state=True, backend="triton"
        )
        y, window = y.clone(), window.clone()
    expected, expected_window = short_conv(x, weight, **options, backend="reference")
    close(y, expected, 8e-3, "y")
    assert torch.equal(window, expected_window)


def test_short_conv_window_in_place():
    x, weight, state = torch.randn(2, 1, 40), torch.randn(40, 4), torch.randn(2, 40, 4)
    expected = short_conv(x, weight, initial_state=state, output_final_state=True, backend="reference")
    with torch.no_grad():
        y, window = short_conv(x, weight, initial_state=state, inplace_state=True, backend="triton")
    assert window is state
    close(y, expected[0], 2e-6, "y")
    assert torch.equal(window, expected[1])


@pytest.mark.parametrize("M, D", [(1, 24), (3, 130)])
def test_depth_attention(M, D):
    tensors = {f"block{m}": torch.randn(2, 3, D) * 3 for m in range(M)}
    tensors |= {"inv_rms": torch.rand(M, 2, 3) + 0.2, "prefix": torch.randn(2, 3, D), "weight": torch.randn(D)}

    def call(backend):
        def run(inv_rms, prefix, weight, **blocks):
            return depth_attention(list(blocks.values()), inv_rms, prefix, weight, eps=1e-5, backend=backend)

        return run

    agree(call("triton"), call("reference"), tensors, **EXACT)


def test_depth_attention_of_a_stacked_bank_and_of_none():
    bank, prefix, weight = torch.randn(2, 1, 4, 20), torch.randn(1, 4, 20), torch.randn(20) * 8
    inverse = inverse_rms(bank, 1e-5, backend="triton")
    close(inverse, inverse_rms(bank.double(), 1e-5, backend="reference"), 1e-6, "inverse_rms")
    y = depth_attention(bank, inverse, prefix, weight, eps=1e-5, backend="triton")
    expected = depth_attention(bank, inverse, prefix, weight, eps=1e-5, backend="reference")
    close(y, expected, 2e-6, "y")
    assert depth_attention([], inverse[:0], prefix, weight, eps=1e-5, backend="triton") is prefix


def test_inverse_rms_gradient():
    agree(*both(inverse_rms, eps=1e-5), {"x": torch.randn(3, 50)}, **EXACT)


def test_what_the_kernels_decline():
    wide = torch.randn(2, 8, dtype=torch.float64)
    with pytest.raises(BackendError, match="fp32, bf16 and fp16"):
        situ(wide, wide, backend="triton")
    prefix = torch.randn(1, 1, 4)
    with pytest.raises(BackendError, match="17 sealed blocks"):
        depth_attention([prefix] * 17, torch.ones(17, 1, 1), prefix, torch.randn(4), eps=1e-5, backend="triton")
