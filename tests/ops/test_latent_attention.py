"""Latent attention: golden, forms and doors, every kind of mask, gradients, blocks, the choice of form, errors."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear

from kimi_hf.errors import ShapeError
from kimi_hf.ops.latent_attention import absorbed, direct, latent_attention, masks
from kimi_hf.ops.latent_attention.eager import cheaper_form

VARIANTS = {
    "reference": {"backend": "reference"},
    "direct": {"form": "direct"},
    "absorbed": {"form": "absorbed"},
    "direct weights": {"form": "direct", "need_weights": True},
    "absorbed weights": {"form": "absorbed", "need_weights": True},
}


def make(queries, keys, heads=3, nope=8, rope=4, v=6, rank=16, batch=2, dtype=torch.float32):
    tensors = (
        torch.randn(batch, queries, heads, nope),
        torch.randn(batch, queries, heads, rope),
        torch.randn(batch, keys, rank),
        torch.randn(batch, keys, rope),
        torch.randn(heads * (nope + v), rank) * rank**-0.5,
    )
    return [t.to(dtype) for t in tensors], {"v_head_dim": v, "scale": (nope + rope) ** -0.5}


def definition(tensors, scale, v_head_dim, visible, bias=None):
    """Loops over heads, fp64, from the specification; visible [B, T, S]."""
    q_nope, q_rope, latent, k_rope, weight = (t.double() for t in tensors)
    heads, nope = q_nope.shape[2:]
    rows = weight.view(heads, nope + v_head_dim, -1)
    out = []
    for head in range(heads):
        key, value = latent @ rows[head, :nope].T, latent @ rows[head, nope:].T
        scores = scale * (q_nope[:, :, head] @ key.mT + q_rope[:, :, head] @ k_rope.mT)
        scores = (scores if bias is None else scores + bias).masked_fill(~visible, float("-inf"))
        out.append(torch.softmax(scores, -1).nan_to_num(0.0) @ value)
    return torch.stack(out, 2)


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_module(goldens, variant):
    """The released module around the operation; its inner norms' 1e-6 matters here."""
    g = {k[len("mla_small.") :]: v for k, v in load_file(goldens("module_ops/golden.safetensors")).items()}

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    x = g["hidden_states"]
    q = linear(norm(linear(x, g["q_a_proj.weight"]), g["q_a_layernorm.weight"]), g["q_b_proj.weight"])
    q_nope, q_rope = q.unflatten(-1, (2, 12)).split([8, 4], -1)
    latent, k_rope = linear(x, g["kv_a_proj_with_mqa.weight"]).split([16, 4], -1)
    context, _ = latent_attention(
        q_nope,
        q_rope,
        norm(latent, g["kv_a_layernorm.weight"]),
        k_rope,
        g["kv_b_proj.weight"],
        v_head_dim=8,
        scale=12**-0.5,
        **VARIANTS[variant],
    )
    out = linear(context.flatten(2) * torch.sigmoid(linear(x, g["g_proj.weight"])), g["o_proj.weight"])
    torch.testing.assert_close(out, g["out"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 33), (7, 7), (5, 40), (40, 40), (9, 4)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_forms_agree_with_the_definition(variant, queries, keys, is_causal):
    tensors, numbers = make(queries, keys)
    context, weights = latent_attention(*tensors, **numbers, is_causal=is_causal, **VARIANTS[variant])
    visible = causal(queries, keys) if is_causal else torch.ones(queries, keys, dtype=torch.bool)
    torch.testing.assert_close(
        context, definition(tensors, **numbers, visible=visible.expand(2, -1, -1)).float(), rtol=1e-5, atol=2e-5
    )
    if "weights" in variant:
        assert weights.shape == (2, 3, queries, keys)
        torch.testing.assert_close(weights.sum(-1), visible.any(-1).float().expand(2, 3, -1), rtol=0, atol=1e-5)
    else:
        assert weights is None


def mask_cases(queries, keys):
    torch.manual_seed(5)
    left = causal(queries, keys).expand(2, 1, queries, keys).clone()
    left[0, ..., : keys - 3] = False  # one row padded so far that its first queries see nothing
    odd = torch.rand(2, 1, queries, keys) > 0.6
    odd[1, 0, 2] = False
    per_key = torch.rand(2, 1, 1, keys) > 0.3
    return {
        "left padded": left,
        "holes and a closed row": odd,
        "per key": per_key,
        "everything closed": torch.zeros(1, 1, queries, keys, dtype=torch.bool),
        "two-dimensional": causal(queries, keys),
        "additive, -inf": torch.zeros(2, 1, queries, keys).masked_fill(~odd, float("-inf")),
        "additive, lowest": torch.zeros(2, 1, queries, keys).masked_fill(~left, torch.finfo(torch.float32).min),
        "additive, finite": torch.randn(2, 1, queries, keys).masked_fill(~odd, float("-inf")),
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", mask_cases(12, 12))
@pytest.mark.parametrize("block", [256, 4])
def test_masks_values_and_gradients(monkeypatch, variant, case, block):
    monkeypatch.setattr(masks, "BLOCK", block)
    tensors, numbers = make(12, 12)
    tensors = [t.requires_grad_() for t in tensors]
    mask = mask_cases(12, 12)[case]
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    bias = None if mask.dtype == torch.bool else mask.clamp(min=-1e4).squeeze(1).double()
    visible = visible.expand(2, 1, 12, 12).squeeze(1)
    truth = definition(tensors, **numbers, visible=visible, bias=bias)
    context, _ = latent_attention(*tensors, **numbers, mask=mask, **VARIANTS[variant])
    torch.testing.assert_close(context, truth.float(), rtol=1e-5, atol=2e-5)
    with torch.no_grad():  # its own blocks of heads and queries
        alone, _ = latent_attention(*tensors, **numbers, mask=mask, **VARIANTS[variant])
    torch.testing.assert_close(alone, context, rtol=1e-5, atol=1e-5)
    closed = ~visible.any(-1)
    assert (context[closed] == 0).all()
    cotangent = torch.randn_like(context)
    grads = torch.autograd.grad(context, tensors, cotangent)
    if case == "everything closed":
        assert all((g == 0).all() for g in grads)
        return
    opened = visible | (closed[..., None] & torch.eye(12, dtype=torch.bool))  # keeps the definition's softmax finite
    truth = definition(tensors, **numbers, visible=opened, bias=bias)
    expected = torch.autograd.grad(truth, tensors, cotangent.masked_fill(closed[..., None, None], 0.0).double())
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5)
    assert (grads[0][closed] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("queries, keys", [(3, 3), (2, 5)])
def test_gradcheck(variant, queries, keys):
    tensors, numbers = make(queries, keys, heads=2, nope=3, rope=2, v=2, rank=4, batch=1, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: latent_attention(*t, **numbers, **VARIANTS[variant])[0], inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["direct", "absorbed"])
def test_blocks_of_heads_and_queries_change_nothing(monkeypatch, form, dtype):
    tensors, numbers = make(21, 30, dtype=dtype)
    whole, _ = latent_attention(*tensors, **numbers, form=form)
    monkeypatch.setattr(direct, "EXPANDED", 1)
    monkeypatch.setattr(absorbed, "SCORES", 1)
    monkeypatch.setattr(masks, "BLOCK", 4)
    pieces, _ = latent_attention(*tensors, **numbers, form=form)
    torch.testing.assert_close(pieces, whole, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    weights = latent_attention(*tensors, **numbers, form=form, need_weights=True)[1]
    assert weights.shape == (2, 3, 21, 30)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("queries, keys", [(1, 50), (30, 30), (4, 30)])
def test_bfloat16_is_as_good_as_the_release(variant, queries, keys):
    """Each form's distance to fp64 is that of the reference, which rounds where the release does."""
    tensors, numbers = make(queries, keys, rank=64, nope=16, dtype=torch.bfloat16)
    truth = definition(tensors, **numbers, visible=causal(queries, keys).expand(2, -1, -1))
    context, _ = latent_attention(*tensors, **numbers, **VARIANTS[variant])
    reference, _ = latent_attention(*tensors, **numbers, backend="reference")
    assert context.dtype == torch.bfloat16
    assert (context - truth).abs().mean() <= 1.5 * (reference - truth).abs().mean() + 1e-4


def test_weights_come_from_the_plain_products_of_the_reference():
    tensors, numbers = make(9, 9, dtype=torch.bfloat16)
    ours = latent_attention(*tensors, **numbers, need_weights=True)
    reference = latent_attention(*tensors, **numbers, need_weights=True, backend="reference")
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


def test_the_past_does_not_see_the_future():
    tensors, numbers = make(300, 300, batch=1)
    before, _ = latent_attention(*tensors, **numbers)
    for t in tensors[:4]:
        t[:, 200:] = torch.randn_like(t[:, 200:])
    after, _ = latent_attention(*tensors, **numbers)
    assert torch.equal(before[:, :200], after[:, :200])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_new_tokens_after_a_past_in_the_fused_kernel(monkeypatch, dtype):
    tensors, options = make(40, 90, dtype=dtype)
    fused, _ = latent_attention(*tensors, **options, form="absorbed")
    monkeypatch.setattr(absorbed, "SMALL_RANK", 0)
    plain, _ = latent_attention(*tensors, **options, form="absorbed")
    limit = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 5e-2}[dtype]
    assert not torch.equal(fused, plain)
    torch.testing.assert_close(fused, plain, rtol=0, atol=limit)


def test_the_cheaper_form_by_flops():
    released = {"nope": 128, "rope": 64, "nope_and_v": 256, "rank": 512}
    assert all(cheaper_form(1, keys, **released) == "absorbed" for keys in (2, 128, 4096, 1 << 20))
    assert all(cheaper_form(keys, keys, **released) == "direct" for keys in (256, 4096, 1 << 16))
    # against a long cache: keys (R (n + v) + T (2 (n + r)) > T (2 R + r)), so up to T = 131072 / 704 queries
    assert cheaper_form(180, 1 << 20, **released) == "absorbed"
    assert cheaper_form(190, 1 << 20, **released) == "direct"
    # without compression nothing is gained by absorbing once queries equal keys
    assert cheaper_form(64, 64, nope=8, rope=4, nope_and_v=16, rank=64) == "direct"


def test_other_precisions_and_autocast():
    tensors, numbers = make(6, 6)
    plain, _ = latent_attention(*tensors, **numbers)
    mixed = [tensors[0].bfloat16(), *tensors[1:]]
    assert latent_attention(*mixed, **numbers)[0].dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for variant in VARIANTS.values():
            cast, _ = latent_attention(*tensors, **numbers, **variant)
            assert cast.dtype == torch.bfloat16
            torch.testing.assert_close(cast.float(), plain, rtol=0, atol=5e-2)


@pytest.mark.parametrize(
    "form, queries, keys", [("absorbed", 1, 24), ("absorbed", 3, 24), ("direct", 24, 24), ("direct", 3, 24)]
)
def test_traces_into_one_graph(form, queries, keys):
    tensors, numbers = make(queries, keys)
    mask = torch.rand(2, 1, queries, keys) > 0.5
    torch.compiler.reset()  # the cases share one code object, whose recompilations are limited
    for given in (None, mask):
        compiled = torch.compile(
            lambda *t, given=given: latent_attention(*t, **numbers, mask=given, form=form)[0],
            backend="eager",
            fullgraph=True,
        )
        torch.testing.assert_close(
            compiled(*tensors), latent_attention(*tensors, **numbers, mask=given, form=form)[0], rtol=1e-5, atol=1e-5
        )


def test_no_shared_key_part():
    tensors, numbers = make(4, 9, rope=0)
    outs = [latent_attention(*tensors, **numbers, **variant)[0] for variant in VARIANTS.values()]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("v", [6, 20])
def test_values_narrower_and_wider_than_keys(v):
    tensors, numbers = make(12, 12, v=v)
    outs = [latent_attention(*tensors, **numbers, **variant)[0] for variant in VARIANTS.values()]
    for out in outs[1:]:
        assert out.shape[-1] == v
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "position, changed, message",
    [
        (0, torch.randn(2, 5, 3), "q_nope has shape"),
        (1, torch.randn(2, 5, 2, 4), "q_rope has shape"),
        (2, torch.randn(1, 5, 16), "latent has shape"),
        (2, torch.randn(2, 0, 16), "latent has no positions"),
        (3, torch.randn(2, 5, 3), "k_rope has shape"),
        (4, torch.randn(43, 16), "kv_b_weight has shape"),
        (0, torch.ones(2, 5, 3, 8, dtype=torch.long), "floating"),
    ],
)
def test_errors_of_tensors(position, changed, message):
    tensors, numbers = make(5, 5)
    tensors[position] = changed
    with pytest.raises(ShapeError, match=message):
        latent_attention(*tensors, **numbers)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"form": "fast"}, "form is 'fast'"),
        ({"mask": torch.ones(2, 1, 5, 4, dtype=torch.bool)}, "mask is torch.bool"),
        ({"mask": torch.ones(2, 1, 5, 5, dtype=torch.long)}, "mask is torch.int64"),
        ({"mask": torch.ones(2, 3, 5, 5)}, "mask is torch.float32"),
    ],
)
def test_errors_of_options(options, message):
    tensors, numbers = make(5, 5)
    with pytest.raises(ShapeError, match=message):
        latent_attention(*tensors, **numbers, **options)
