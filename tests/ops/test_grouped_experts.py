"""Routed experts: doors, gradients, dense and packed stacks, what the backward keeps, plans, transformers' results."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kimi_hf.errors import ShapeError
from kimi_hf.ops.grouped_experts import grouped_experts, library, plan, stack, whole
from kimi_hf.ops.mxfp4 import pack, unpack
from kimi_hf.ops.mxfp4.packed import PackedWeight
from kimi_hf.ops.situ import situ_glu

DOORS = ("reference", "eager")


def act(gate_up):
    return situ_glu(gate_up, beta=4.0, linear_beta=25.0)


def make(tokens, experts=6, top_k=3, width=32, inner=64, dtype=torch.float32):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = torch.randn(tokens, width).to(dtype)
    indices = torch.rand(tokens, experts).topk(top_k).indices
    weights = torch.rand(tokens, top_k, dtype=wide)
    gate_up = (torch.randn(experts, 2 * inner, width) * width**-0.5).to(dtype)
    down = (torch.randn(experts, width, inner) * inner**-0.5).to(dtype)
    return hidden, indices, weights, gate_up, down


def leaves_of(arguments):
    return [a.requires_grad_() for a in arguments if a.is_floating_point()]


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("segment", [1 << 20, 1 << 9])
def test_doors_agree_in_values_and_gradients(monkeypatch, tokens, dtype, segment):
    monkeypatch.setattr(plan, "SEGMENT", segment)
    arguments = make(tokens, dtype=dtype)
    leaves = leaves_of(arguments)
    cotangent = torch.randn_like(arguments[0])
    results = []
    for door in DOORS:
        out = grouped_experts(*arguments, act, backend=door)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out, leaves, cotangent) if tokens else ()
        results.append((out.detach(), *grads))
        with torch.no_grad():
            alone = grouped_experts(*arguments, act, backend=door)
        size = out.abs().max().item() if tokens else 0.0
        torch.testing.assert_close(alone, out, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-6 * size)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        size = a.abs().max().item() if a.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("door", DOORS)
def test_gradcheck(door):
    arguments = make(4, experts=3, top_k=2, width=3, inner=2, dtype=torch.float64)
    hidden, indices, weights, gate_up, down = arguments

    def run(hidden, weights, gate_up, down):
        return grouped_experts(hidden, indices, weights, gate_up, down, act, backend=door)

    assert torch.autograd.gradcheck(run, leaves_of(arguments))


@pytest.mark.parametrize("trained", range(4))
def test_each_input_alone(trained):
    arguments = make(9)
    floats = [a for a in arguments if a.is_floating_point()]
    floats[trained].requires_grad_()
    ours, reference = (
        torch.autograd.grad(grouped_experts(*arguments, act, backend=door).square().sum(), floats[trained])[0]
        for door in ("eager", "reference")
    )
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("thin", [64, 4])
@pytest.mark.parametrize("tokens", [4, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thin_experts_together_equal_one_by_one(monkeypatch, thin, tokens, dtype):
    monkeypatch.setattr(stack, "THIN", thin)
    hidden, indices, weights, gate_up, down = make(tokens, experts=8, dtype=dtype)
    indices[indices == 3] = 8  # a gap
    leaves = leaves_of((hidden, weights, gate_up, down))
    results = []
    for threads, torch_can in ((1, False), (1, True), (2, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(stack, "_torch_can_group", lambda *a, torch_can=torch_can: torch_can)
        out = grouped_experts(hidden, indices, weights, gate_up, down, act)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * a.abs().max().item())


@given(st.lists(st.integers(0, 90), max_size=12))
def test_runs_keep_every_expert_and_pad_at_most_twofold(counts):
    start, experts = 0, []
    for expert, count in enumerate(counts):
        if count:
            experts.append((expert, slice(start, start + count)))
            start += count
    for dtype in (torch.float32, torch.bfloat16):
        runs = list(stack.thin_runs(tuple(experts), dtype))
        assert [member for run in runs for member in run] == experts
    runs = list(stack.neighbours(tuple(experts)))
    assert [member for run in runs for member in run] == experts
    for run in runs:
        sizes = [rows.stop - rows.start for _, rows in run]
        assert [expert for expert, _ in run] == list(range(run[0][0], run[0][0] + len(run)))
        assert len(run) == 1 or (max(sizes) <= stack.THIN and max(sizes) * len(run) <= 2 * sum(sizes))


def test_bfloat16_sums_in_fp32_and_casts_once():
    """Expert outputs are rounded to bf16, their weighted sum is not: equal to the last bit to the same sum by hand."""
    hidden, indices, weights, gate_up, down = make(5, top_k=4, dtype=torch.bfloat16)
    total = torch.zeros(5, 32)
    for expert in range(6):  # in the order the operation adds
        for token, slot in (indices == expert).nonzero().tolist():
            y = down[expert] @ act(gate_up[expert] @ hidden[token])
            total[token] += y.float() * weights[token, slot]
    out = grouped_experts(hidden, indices, weights, gate_up, down, act)
    torch.testing.assert_close(out, total.bfloat16(), rtol=8e-3, atol=1e-3)
    assert (out != total.bfloat16()).float().mean() < 0.05  # a product's own order of sums may move a bit


@pytest.mark.parametrize("door", DOORS)
def test_one_token_with_entries_of_no_expert(door):
    hidden, indices, weights, gate_up, down = make(1)
    indices[0, 1] = 6
    out = grouped_experts(hidden, indices, weights, gate_up, down, act, backend=door)
    weights[0, 1], indices[0, 1] = 0.0, indices[0, 0]
    torch.testing.assert_close(out, grouped_experts(hidden, indices, weights, gate_up, down, act, backend="reference"))


@pytest.mark.parametrize("door", DOORS)
def test_entries_of_no_expert_contribute_nothing(door):
    hidden, indices, weights, gate_up, down = make(8)
    leaves = leaves_of((hidden, weights, gate_up, down))
    absent = torch.rand(8, 3) > 0.5
    marked = indices.masked_fill(absent, 6)
    marked[0, 0], absent[0, 0] = -1, True
    out = grouped_experts(hidden, marked, weights, gate_up, down, act, backend=door)
    expected = grouped_experts(hidden, indices, weights * ~absent, gate_up, down, act)
    torch.testing.assert_close(out, expected)
    for a, b in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1 << 20, 300])
def test_packed_stacks_equal_their_dense_form(monkeypatch, door, dtype, block):
    monkeypatch.setattr(stack, "BLOCK", block)
    hidden, indices, weights, gate_up, down = make(20, dtype=dtype)
    packed = [PackedWeight(*pack(w)) for w in (gate_up, down)]
    dense = [unpack(p.packed, p.scale, dtype) for p in packed]
    assert packed[0].shape == tuple(gate_up.shape)
    leaves = leaves_of((hidden, weights))
    results = []
    for stacks in (packed, dense):
        out = grouped_experts(hidden, indices, weights, *stacks, act, backend=door)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for a, b in zip(*results, strict=True):
        size = b.abs().max().item()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * size)


def test_the_backward_keeps_inputs_and_one_projection():
    arguments = make(40)
    leaves = leaves_of(arguments)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_experts(*arguments, act)
    own = [t for t in kept if t.data_ptr() not in {leaf.data_ptr() for leaf in leaves}]
    assert [tuple(t.shape) for t in own] == [(40 * 3, 2 * 64)]


def test_only_chosen_experts_are_touched():
    """A token costs k experts: everything else may as well be NaN."""
    hidden, indices, weights, gate_up, down = make(1, experts=16, top_k=2)
    for w in (gate_up, down):
        w[[e for e in range(16) if e not in indices[0].tolist()]] = float("nan")
    arguments = hidden, indices, weights, gate_up, down
    leaves = leaves_of(arguments)
    out = grouped_experts(*arguments, act)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert torch.isfinite(out).all() and all(torch.isfinite(g).all() for g in grads)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_plans_cover_every_pair_once(tokens, experts, data):
    top_k = data.draw(st.integers(1, 4))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    indices = torch.randint(-1, experts + 1, (tokens, top_k))
    width = data.draw(st.sampled_from([1, plan.SEGMENT // 8, plan.SEGMENT]))
    made = plan.make_plan(indices, experts, width)
    seen = []
    for segment in made.segments:
        assert sum(rows.stop - rows.start for _, rows in segment.experts) == segment.span.stop - segment.span.start
        assert segment.span.stop - segment.span.start <= max(1, plan.SEGMENT // width)
        for expert, rows in segment.experts:
            pairs = made.pair[segment.span][rows]
            assert (indices.reshape(-1)[pairs] == expert).all()
            assert torch.equal(made.token[segment.span][rows], pairs // top_k)
            seen += pairs.tolist()
    valid = ((indices >= 0) & (indices < experts)).reshape(-1).nonzero().flatten().tolist()
    assert sorted(seen) == valid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_the_form_of_gpus_and_compiled_graphs(dtype, packed):
    hidden, indices, weights, gate_up, down = make(30, dtype=dtype)
    indices[3, 1], indices[4, 0] = 6, -1
    leaves = leaves_of((hidden, weights) if packed else (hidden, weights, gate_up, down))
    stacks = [PackedWeight(*pack(w)) for w in (gate_up, down)] if packed else (gate_up, down)
    truth = grouped_experts(hidden, indices, weights, *stacks, act, backend="reference")
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(hidden, indices, weights):
        return grouped_experts(hidden, indices, weights, *stacks, act)

    cotangent = torch.randn_like(hidden)
    expected = (truth, *torch.autograd.grad(truth, leaves, cotangent))
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    runs = [lambda *a: whole.grouped_experts_whole(*a, *stacks, act)]
    if packed == (dtype == torch.bfloat16):
        runs.append(compiled)
    for run in runs:
        out = run(hidden, indices, weights)
        for a, b in zip((out, *torch.autograd.grad(out, leaves, cotangent)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def test_operators_are_registered_soundly():
    x, ends = torch.randn(5, 32, requires_grad=True), torch.tensor([2, 2, 5], dtype=torch.int32)
    weight = torch.randn(3, 64, 32, requires_grad=True)
    packed = pack(weight.detach())
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(library.grouped_linear, (x, weight, ends), test_utils=checks)
    torch.library.opcheck(library.grouped_outer, (torch.randn(5, 64), x.detach(), ends), test_utils=checks)
    for transposed, rows in ((False, x), (True, torch.randn(5, 64, requires_grad=True))):
        torch.library.opcheck(library.grouped_linear_packed, (rows, *packed, ends, transposed), test_utils=checks)


def test_autocast():
    arguments = make(12)
    plain = grouped_experts(*arguments, act)
    leaves = leaves_of(arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [grouped_experts(*arguments, act, backend=door) for door in DOORS]
    for out in outs:
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), plain, rtol=0, atol=3e-2 * plain.abs().max().item())
        grads = torch.autograd.grad(out.sum(), leaves)
        assert all(g.dtype == leaf.dtype for g, leaf in zip(grads, leaves, strict=True))


@pytest.mark.parametrize("peer", ["eager", "batched_mm", "grouped_mm"])
def test_equal_to_transformers(peer):
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearExperts

    config = SimpleNamespace(
        num_local_experts=6, hidden_size=32, moe_intermediate_size=64, hidden_act="silu", _experts_implementation=peer
    )
    hidden, indices, weights, gate_up, down = make(25)
    experts = KimiLinearExperts(config)
    experts.gate_up_proj, experts.down_proj = nn.Parameter(gate_up), nn.Parameter(down)

    def silu_glu(x):
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up

    ours = grouped_experts(hidden, indices, weights, gate_up, down, silu_glu)
    torch.testing.assert_close(ours, experts(hidden, indices, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "position, changed, message",
    [
        (0, torch.randn(2, 5, 32), "hidden has shape"),
        (0, torch.ones(5, 32, dtype=torch.long), "floating"),
        (1, torch.zeros(5, 3), "indices is torch.float32"),
        (1, torch.zeros(4, 3, dtype=torch.long), "indices has shape"),
        (2, torch.randn(5, 2), "weights has shape"),
        (3, torch.randn(6, 128, 31), "gate_up_proj has shape"),
        (3, torch.randn(6, 32), "gate_up_proj has shape"),
        (4, torch.randn(6, 32, 63), "down_proj has shape"),
        (4, torch.randn(5, 32, 64), "down_proj has shape"),
    ],
)
def test_errors(position, changed, message):
    arguments = list(make(5))
    arguments[position] = changed
    with pytest.raises(ShapeError, match=message):
        grouped_experts(*arguments, act)
