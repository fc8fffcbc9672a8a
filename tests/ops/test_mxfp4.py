"""MXFP4: goldens bit for bit, every code and scale, the quantiser, round trips, packed products, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kimi_hf.errors import CheckpointError, ShapeError
from kimi_hf.ops.mxfp4 import check_scale, eager, pack, packed_matmul, unpack, unpack_rows

DOORS = ("reference", "eager")
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def same_bits(a, b):
    """Equal to the bit, -0 and infinities included; NaN equals NaN of any payload."""
    nan = a.isnan()
    assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(nan, b.isnan())
    as_bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = (x.masked_fill(nan, 0.0).contiguous().view(as_bits) for x in (a, b))
    return torch.equal(a, b)


def random_packed(*shape):
    """packed [*shape / 2] and scale [*shape / 32] with scales that keep products in range."""
    *lead, columns = shape
    packed = torch.randint(0, 256, (*lead, columns // 2), dtype=torch.uint8)
    return packed, torch.randint(118, 130, (*lead, columns // 32), dtype=torch.uint8)


@pytest.fixture
def golden(goldens):
    return load_file(goldens("mxfp4_codec/golden.safetensors"))


@pytest.fixture
def more(goldens):
    return load_file(goldens("mxfp4_codec/golden_more.safetensors"))


@pytest.mark.parametrize("door", DOORS)
def test_golden_decode(golden, door):
    decoded = unpack(golden["packed"], golden["scale"], torch.float32, backend=door)
    assert same_bits(decoded, golden["decoded"])
    every = unpack(golden["all_bytes"], golden["all_bytes_scale"], torch.float32, backend=door)
    assert same_bits(every, golden["all_bytes_decoded"])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden_of_all_scales_by_all_codes(more, door, dtype):
    packed, scale = more["extreme_packed"], more["extreme_scale"]
    decoded = unpack(packed, scale, getattr(torch, dtype), check=False, backend=door)
    assert same_bits(decoded, more[f"extreme_decoded_{dtype}"])


@pytest.mark.parametrize("door", DOORS)
def test_golden_quantiser(more, door):
    packed, scale = pack(more["quantise_weight"], backend=door)
    assert torch.equal(scale, more["quantise_scale_byte"])
    assert torch.equal(packed, more["quantise_packed"])
    assert same_bits(unpack(packed, scale, torch.bfloat16, backend=door), more["quantise_roundtrip_bfloat16"])


@pytest.mark.parametrize("door", DOORS)
def test_published_bytes(door):
    """Field report: 0x21 at scale 127 is 0.5, 1.0; 0x9A at scale 130 is -8, -4."""
    packed = torch.zeros(2, 16, dtype=torch.uint8)
    packed[0, 0], packed[1, 5] = 0x21, 0x9A
    out = unpack(packed, torch.tensor([[127], [130]], dtype=torch.uint8), torch.float32, backend=door)
    assert out[0, :2].tolist() == [0.5, 1.0]
    assert out[1, 10:12].tolist() == [-8.0, -4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_doors_agree_for_every_code_and_scale(dtype):
    packed = torch.arange(256, dtype=torch.uint8).expand(255, 256).contiguous()
    scale = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    a, b = (unpack(packed, scale, dtype, backend=door) for door in DOORS)
    assert same_bits(a, b)
    if dtype != torch.float64:
        assert same_bits(eager._unpack_by_arithmetic(packed, scale, dtype), a)


def test_subnormals_survive_flushing_arithmetic():
    """2^-127 is below fp32's normal range; the table holds it whatever the processor does with subnormals."""
    packed = torch.full((1, 16), 0x92, dtype=torch.uint8)
    scale = torch.zeros(1, 1, dtype=torch.uint8)
    expected = unpack(packed, scale, torch.float32, backend="reference")
    assert expected[0, :2].tolist() == [2.0**-127, -(2.0**-128)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        bits = unpack(packed, scale, torch.float32).view(torch.int32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits, expected.view(torch.int32))


@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 5, 96), (0, 32), (300, 2048)])
def test_shapes_and_pieces(monkeypatch, shape):
    shape = (1, *shape) if len(shape) == 1 else shape
    packed, scale = random_packed(*shape)
    expected = unpack(packed, scale, torch.float32, backend="reference")
    assert same_bits(unpack(packed, scale, torch.float32), expected)
    monkeypatch.setattr(eager, "PIECE", 64)
    assert same_bits(unpack(packed, scale, torch.float32), expected)
    strided = packed.repeat_interleave(2, -1)[..., ::2]
    assert same_bits(unpack(strided, scale, torch.float32), expected)


@pytest.mark.parametrize("door", DOORS)
def test_round_trip_with_the_original_scales_restores_every_byte(door):
    packed = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    scale = torch.randint(0, 254, (64, 4), dtype=torch.uint8)  # 253 and below: no overflow in fp32
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        if dtype != torch.float64:
            scale = scale.clamp(max=252)
        repacked, kept = pack(unpack(packed, scale, dtype), scale=scale, backend=door)
        assert torch.equal(repacked, packed) and torch.equal(kept, scale)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.floats(-30, 30), st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
def test_quantiser_properties(seed, exponent, dtype):
    torch.manual_seed(seed)
    weight = torch.randn(4, 64) * 2.0**exponent
    weight[0, :32] = 0
    weight[1] = (weight[1] / 2.0**exponent).round() * 2.0**exponent  # ties
    weight = weight.to(getattr(torch, dtype)).nan_to_num(posinf=0, neginf=0)
    (packed, scale), (other, other_scale) = (pack(weight, backend=door) for door in DOORS)
    assert torch.equal(packed, other) and torch.equal(scale, other_scale)
    decoded = unpack(packed, scale, torch.float64)
    step = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    error = (decoded - weight.double()).abs() / step
    # the largest magnitude is below 7 steps: codes up to 6 are at most 1 off (between 4 and 6), and 6 for up to 7
    assert error.max() <= 1.0 + 2.0**-7
    again, _ = pack(decoded, scale=scale)
    assert torch.equal(again, packed)


@pytest.mark.parametrize("door", DOORS)
def test_ties_go_to_the_even_code_and_zeros_keep_their_sign(door):
    middles = [(a + b) / 2 for a, b in zip(MAGNITUDES, MAGNITUDES[1:], strict=False)]
    weight = torch.zeros(1, 32)
    weight[0, :7], weight[0, 7:14] = torch.tensor(middles), -torch.tensor(middles)
    weight[0, 14], weight[0, 15], weight[0, 16] = 6.0, -0.0, -0.2
    packed, scale = pack(weight, backend=door)
    assert scale.item() == 127
    decoded = unpack(packed, scale, torch.float32, backend=door)[0]
    assert decoded[:7].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert decoded[7:14].tolist() == [-x for x in decoded[:7].tolist()]
    assert torch.signbit(decoded[15:17]).all() and (decoded[15:17] == 0).all()


@pytest.mark.parametrize("door", DOORS)
def test_scale_rounds_up_from_a_mantissa_of_1_75(door):
    for largest, byte in ((4.0, 127), (6.96, 127), (7.0, 128), (7.99, 128), (8.0, 128)):
        weight = torch.zeros(1, 32)
        weight[0, 3] = -largest
        assert pack(weight, backend=door)[1].item() == byte


def test_rows_are_the_chosen_rows():
    packed, scale = random_packed(5, 8, 64)
    whole = unpack(packed, scale, torch.float32)
    assert same_bits(unpack_rows(packed, scale, 3, torch.float32), whole[3])
    assert same_bits(unpack_rows(packed, scale, torch.tensor([4, 0, 4]), torch.float32), whole[[4, 0, 4]])
    assert same_bits(unpack_rows(packed, scale, slice(1, 3), torch.float32), whole[1:3])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [1 << 20, 200])
def test_packed_matmul(monkeypatch, door, dtype, block):
    monkeypatch.setattr(eager, "BLOCK", block)
    packed, scale = random_packed(24, 96)
    x = torch.randn(2, 3, 96).to(dtype).requires_grad_()
    weight = unpack(packed, scale, torch.float64)
    out = packed_matmul(x, packed, scale, backend=door)
    cotangent = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, x, cotangent)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    for got, truth in ((out, x.double() @ weight.T), (grad, cotangent.double() @ weight)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), truth, rtol=rtol, atol=rtol * truth.abs().max().item())


def test_packed_matmul_keeps_bytes_only():
    packed, scale = random_packed(24, 96)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        packed_matmul(torch.randn(3, 96, requires_grad=True), packed, scale)
    assert {t.data_ptr() for t in kept} == {packed.data_ptr(), scale.data_ptr()}


def test_packed_matmul_under_autocast_and_compile():
    packed, scale = random_packed(24, 96)
    x = torch.randn(3, 96)
    plain = packed_matmul(x, packed, scale)
    compiled = torch.compile(packed_matmul, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, packed, scale), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = packed_matmul(x, packed, scale)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), plain, rtol=2e-2, atol=2e-2 * plain.abs().max().item())


def test_scale_byte_255_is_refused_by_name():
    packed, scale = random_packed(4, 64)
    scale[2, 1] = 255
    name = "model.layers.3.block_sparse_moe.experts.7.w1.weight"
    for call in (lambda: unpack(packed, scale, name=name), lambda: check_scale(scale, name)):
        with pytest.raises(CheckpointError, match=rf"{name}_scale holds 1 byte\(s\) 255 \(first at \(2, 1\)\)"):
            call()
    assert not torch.isfinite(unpack(packed, scale, check=False)[2, 32:]).any()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p, s: unpack(p.int(), s), "weight_packed is torch.int32"),
        (lambda p, s: unpack(p[:, :20], s), "divisible by 32"),
        (lambda p, s: unpack(p[0], s[0]), r"weight_packed is torch.uint8 \(32,\)"),
        (lambda p, s: unpack(p, s[:, :1]), r"weight_scale is torch.uint8 \(4, 1\), expected uint8 \(4, 2\)"),
        (lambda p, s: unpack(p, s.float()), "weight_scale is torch.float32"),
        (lambda p, s: unpack(p, s, torch.int8), "torch.int8"),
        (lambda p, s: pack(torch.randn(4, 33)), "divisible by 32"),
        (lambda p, s: pack(torch.full((1, 32), float("nan"))), "infinities or NaN"),
        (lambda p, s: pack(torch.randn(4, 64), scale=s[:2]), "scale is torch.uint8"),
        (lambda p, s: packed_matmul(torch.randn(2, 63), p, s), "packed"),
        (lambda p, s: packed_matmul(torch.ones(2, 64, dtype=torch.long), p, s), "x is torch.int64"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ShapeError, match=message):
        call(*random_packed(4, 64))
