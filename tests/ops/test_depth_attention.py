"""Attention over depth: goldens, doors, every gradient path incl. the shared inverse RMS, what the backward keeps."""

import pytest
import torch
from safetensors.torch import load_file

from kimi_hf.errors import ShapeError
from kimi_hf.ops.depth_attention import depth_attention, eager, inverse_rms

DOORS = ("reference", "eager")
EPS = 1e-5


def transcription(sources, weight, eps=EPS):
    """The specification's four lines, for plain autograd: sources [B, T, D], the last is the open block."""
    v = torch.stack(list(sources), dim=-2)
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return (torch.softmax(keys @ weight, dim=-1).unsqueeze(-2) @ v).squeeze(-2)


def mixed(sources, weight, eps=EPS, **arguments):
    """The operation as the decoder uses it: statistics of the sealed blocks made at sealing, by `inverse_rms`."""
    *bank, prefix = sources
    statistics = [inverse_rms(block, eps, **arguments) for block in bank]
    inv_rms = torch.stack(statistics) if bank else prefix.new_empty(0, *prefix.shape[:2])
    return depth_attention(bank, inv_rms, prefix, weight, eps=eps, **arguments)


def make(sealed, batch=2, tokens=5, width=16, dtype=torch.float64, scale=1.0):
    sources = [(torch.randn(batch, tokens, width, dtype=torch.float64) * scale).to(dtype) for _ in range(sealed + 1)]
    return sources, torch.randn(width, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name, sealed", [("out", 4), ("out_one_block", 1), ("out_bfloat16", 4)])
def test_golden(goldens, door, name, sealed):
    golden = load_file(goldens("module_ops/golden.safetensors"))
    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    blocks = golden["depth_mix.blocks"].to(dtype).unbind(1)[:sealed]
    sources = [source[None] for source in (*blocks, golden["depth_mix.prefix_sum"].to(dtype))]
    norm, proj = (golden[f"depth_mix.{n}_weight"].to(dtype).float() for n in ("norm", "proj"))
    out = mixed(sources, norm * proj[0], backend=door)[0]
    if dtype == torch.bfloat16:
        assert torch.equal(out, golden["depth_mix.out_bfloat16"])
    else:
        torch.testing.assert_close(out, golden[f"depth_mix.{name}"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("sealed", [0, 1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens, width", [(1, 8), (5, 60), (130, 256)])
def test_doors_and_the_definition_agree(sealed, dtype, tokens, width):
    sources, weight = make(sealed, tokens=tokens, width=width, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    truth = transcription([s.to(wide) for s in sources], weight)
    for door in DOORS:
        out = mixed(sources, weight, backend=door)
        assert out.dtype == dtype
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(out.to(wide), truth, rtol=tolerance, atol=tolerance)
        for recording in (False, True):  # decoding, and the pieces that training takes
            same = mixed([s.requires_grad_(recording) for s in sources], weight, backend=door)
            torch.testing.assert_close(same.detach(), out.detach(), rtol=tolerance, atol=tolerance)


def test_no_sealed_block_returns_the_prefix():
    (prefix,), weight = make(0)
    assert depth_attention([], prefix.new_empty(0, 2, 5), prefix, weight, eps=EPS) is prefix


def test_a_stacked_bank_is_the_same_as_a_sequence():
    sources, weight = make(3, dtype=torch.float32)
    bank = torch.stack(sources[:-1]).requires_grad_()
    inv_rms = inverse_rms(bank, EPS)
    out = depth_attention(bank, inv_rms, sources[-1], weight, eps=EPS)
    torch.testing.assert_close(out, mixed(sources, weight))
    out.sum().backward()
    for block in sources[:-1]:
        block.requires_grad_()
    mixed(sources, weight).sum().backward()
    torch.testing.assert_close(bank.grad, torch.stack([block.grad for block in sources[:-1]]))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("piece", [1 << 16, 32])
def test_gradcheck_of_every_input(monkeypatch, door, piece):
    """inv_rms is an input of its own here: its gradient is the path of the scores through the sealed statistics."""
    monkeypatch.setattr(eager, "PIECE", piece)
    sources, weight = make(3, batch=1, tokens=5, width=6)
    inv_rms = torch.rand(3, 1, 5, dtype=torch.float64) + 0.5

    def run(inv_rms, weight, prefix, *bank):
        return depth_attention(bank, inv_rms, prefix, weight, eps=EPS, backend=door)

    inputs = [x.requires_grad_() for x in (inv_rms, weight, sources[-1], *sources[:-1])]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("door", DOORS)
def test_gradcheck_of_inverse_rms(door):
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: inverse_rms(x, EPS, backend=door), x)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_many_readers_share_a_block_and_its_statistic(dtype, tolerance):
    """Two readers of the same sealed blocks: all paths, through inv_rms too, add up to plain autograd's gradients."""
    sources, weight = make(3, tokens=7, dtype=dtype, scale=0.5)
    second = torch.randn_like(weight)
    leaves = [x.requires_grad_() for x in (*sources, weight, second)]

    def ours():
        *bank, prefix = sources
        inv_rms = torch.stack([inverse_rms(block, EPS) for block in bank])
        h = depth_attention(bank, inv_rms, prefix, weight, eps=EPS)
        return depth_attention(bank, inv_rms, prefix + h.sin(), second, eps=EPS)

    def plain():
        *bank, prefix = sources
        return transcription((*bank, prefix + transcription(sources, weight).sin()), second)

    cotangent = torch.randn_like(sources[0])
    ours, plain = (torch.autograd.grad(run(), leaves, cotangent) for run in (ours, plain))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_detaching_the_statistic_loses_a_part_of_the_gradient():
    """Why the docstring forbids it: the missing part is not small."""
    sources, weight = make(2, scale=0.3)
    *bank, prefix = [s.requires_grad_() for s in sources]
    inv_rms = torch.stack([inverse_rms(block, EPS) for block in bank])
    whole, cut = (
        torch.autograd.grad(depth_attention(bank, i, prefix, weight, eps=EPS).sum(), bank[0], retain_graph=True)[0]
        for i in (inv_rms, inv_rms.detach())
    )
    assert (whole - cut).abs().max() > 1e-2 * whole.abs().max()


def test_low_precision_gradients_are_the_fp32_ones_rounded():
    sources, weight = make(4, tokens=33, width=64, dtype=torch.bfloat16)
    cotangent = torch.randn_like(sources[0])
    leaves = [x.requires_grad_() for x in (*sources, weight)]
    low = torch.autograd.grad(mixed(sources, weight), leaves, cotangent)
    wide = [s.detach().float().requires_grad_() for s in sources]
    high = torch.autograd.grad(transcription(wide, weight), (*wide, weight), cotangent.float())
    for a, b in zip(low[:-1], high[:-1], strict=True):
        assert a.dtype == torch.bfloat16
        # sealed blocks get two rounded parts (as a source, and through their statistic) that autograd adds in bf16
        torch.testing.assert_close(a.float(), b, rtol=1.6e-2, atol=1e-2 * b.abs().max().item())
    assert low[-1].dtype == torch.float32
    torch.testing.assert_close(low[-1], high[-1], rtol=1e-3, atol=1e-3)


def test_the_backward_keeps_references_and_statistics_only():
    sources, weight = make(4, tokens=64, width=128, dtype=torch.bfloat16)
    leaves = {x.requires_grad_().data_ptr() for x in (*sources, weight)}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mixed(sources, weight)
    own = [t for t in kept if t.data_ptr() not in leaves]
    assert own and all(t.numel() <= 5 * 2 * 64 for t in own)


def test_gradient_checkpointing_of_both_kinds():
    sources, weight = make(3, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (*sources, weight)]

    def run(weight, *sources):
        return mixed(sources, weight)

    plain = torch.autograd.grad(run(weight, *sources).sum(), leaves)
    for reentrant in (False, True):
        out = torch.utils.checkpoint.checkpoint(run, weight, *sources, use_reentrant=reentrant)
        for leaf in leaves:
            leaf.grad = None
        out.sum().backward()
        assert all(torch.equal(leaf.grad, expected) for leaf, expected in zip(leaves, plain, strict=True))


@pytest.mark.parametrize("door", DOORS)
def test_autocast_does_not_narrow(door):
    sources, weight = make(3, dtype=torch.float32)
    plain = mixed(sources, weight, backend=door)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mixed(sources, weight, backend=door), plain)


def test_tokens_do_not_mix_and_large_values_stay_finite():
    sources, weight = make(3, dtype=torch.float32, scale=1e15)
    out = mixed(sources, weight)
    assert torch.isfinite(out).all()
    sources[1][:, -1] = 0
    torch.testing.assert_close(mixed(sources, weight)[:, :-1], out[:, :-1], rtol=0, atol=0)


def test_traces_into_one_graph():
    sources, weight = make(3, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (*sources, weight)]
    compiled = torch.compile(lambda w, *s: mixed(s, w), backend="aot_eager", fullgraph=True)
    out = compiled(weight, *sources)
    torch.testing.assert_close(out, mixed(sources, weight))
    for a, b in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(mixed(sources, weight).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": torch.randn(15)}, "weight has shape"),
        ({"inv_rms": torch.randn(1, 2, 5)}, "inv_rms has shape"),
        ({"bank": [torch.randn(2, 5, 16), torch.randn(2, 4, 16)]}, r"bank\[1\] has shape"),
        ({"bank": torch.randn(2, 2, 5, 15)}, "bank has shape"),
        ({"prefix": torch.randn(5, 16)}, "prefix has shape"),
        ({"prefix": torch.ones(2, 5, 16, dtype=torch.long)}, "floating"),
    ],
)
def test_errors(changes, message):
    arguments = {
        "bank": [torch.randn(2, 5, 16) for _ in range(2)],
        "inv_rms": torch.rand(2, 2, 5),
        "prefix": torch.randn(2, 5, 16),
        "weight": torch.randn(16),
        "eps": EPS,
    }
    with pytest.raises(ShapeError, match=message):
        depth_attention(**arguments | changes)
