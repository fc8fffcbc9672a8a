"""Padding anywhere and packed documents: a row's real tokens, and a document's, are as if alone. With slow decay."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from kimi_hf import KimiCache
from kimi_hf.errors import CacheError, ShapeError

from .models import CLOSE, build, ids

LENGTHS = (5, 1, 7)
EXACT = {"rtol": 1e-9, "atol": 1e-11}
GRADIENTS = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: EXACT}


def _gradients(model, *losses):
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def _same_gradients(model, ours, expected):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.isfinite(ours[name]).all(), name
        torch.testing.assert_close(
            ours[name], value, msg=lambda text, name=name: f"{name}: {text}", **GRADIENTS[value.dtype]
        )
    model.zero_grad()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("where", ["left", "right", "inside", "single row"])
def test_padding_touches_no_real_token_and_no_gradient(model, where, training):
    rows = [ids(1, 6, seed=1), ids(1, 9, seed=2)] if where != "single row" else [ids(1, 6, seed=1)]
    places = {
        "left": [3, 4, 5, 6, 7, 8],
        "right": [0, 1, 2, 3, 4, 5],
        "inside": [0, 1, 3, 4, 7, 8],
        "single row": [2, 3, 5, 6, 7, 8],
    }[where]
    columns = [torch.tensor(places), torch.arange(9)][: len(rows)]
    padded, mask = torch.full((len(rows), 9), 7), torch.zeros(len(rows), 9, dtype=torch.long)
    for i, (row, places) in enumerate(zip(rows, columns, strict=True)):
        padded[i, places], mask[i, places] = row[0], 1
    model.train(training)
    try:
        alone = [model(row, use_cache=False).logits[0] for row in rows]
        expected = _gradients(model, sum(x.square().sum() for x in alone) / 100)
        out = model(padded, attention_mask=mask, use_cache=False, output_hidden_states=True)
        for i, places in enumerate(columns):
            torch.testing.assert_close(out.logits[i, places], alone[i], **CLOSE)
        assert all(torch.isfinite(x).all() for x in out.hidden_states)
        _same_gradients(model, _gradients(model, out.logits[mask.bool()].square().sum() / 100), expected)
    finally:
        model.eval()


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("cuts", [(4, 1, 7), (1, 1, 10), (12,)], ids=str)
def test_padding_in_every_cached_forward(double, cuts, rows):
    """Each forward brings padding of its own, a row of nothing but padding included, and the last one brings no mask."""
    model = double
    whole, mask = ids(rows, 12), torch.ones(rows, 12, dtype=torch.long)
    mask[0, :4] = mask[0, 6] = mask[0, 9] = 0
    mask[-1, 5] = 0
    cache, outputs = KimiCache(model.config), []
    for piece, real in zip(whole.split(cuts, dim=1), mask.split(cuts, dim=1), strict=True):
        outputs.append(model(piece, attention_mask=real, past_key_values=cache).logits)
    outputs.append(model(ids(rows, 2, seed=3), past_key_values=cache).logits)
    out = torch.cat(outputs, dim=1)
    assert torch.isfinite(out).all()
    full, kept = torch.cat([whole, ids(rows, 2, seed=3)], dim=1), torch.nn.functional.pad(mask, (0, 2), value=1).bool()
    for i in range(rows):
        alone = model(full[i : i + 1, kept[i]], use_cache=False).logits[0]
        torch.testing.assert_close(out[i, kept[i]], alone, **EXACT)


def _packed(told):
    documents = [ids(1, length, seed=length)[0] for length in LENGTHS]
    if told == "collator":
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
        batch = collator([{"input_ids": x.tolist()} for x in documents])
        batch.pop("labels")
        return documents, batch
    row = torch.cat(documents)[None]
    bounds = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    ways = {
        "positions": {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]},
        "lengths": {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds},
        "index": {"seq_idx": torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None].int()},
    }
    return documents, {"input_ids": row, **ways[told]}


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask of ones"])
@pytest.mark.parametrize("told", ["positions", "lengths", "index", "collator"])
def test_packed_documents_do_not_see_each_other(double, told, masked):
    model = double
    documents, batch = _packed(told)
    if masked:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    alone = [model(x[None], use_cache=False).logits for x in documents]
    expected = _gradients(model, torch.cat(alone, dim=1).square().mean())
    out = model(**batch, use_cache=False).logits
    for ours, theirs in zip(out.split(LENGTHS, dim=1), alone, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    _same_gradients(model, _gradients(model, out.square().mean()), expected)
    changed = batch["input_ids"].clone()
    changed[0, :6] = 50
    with torch.no_grad():
        after = model(**{**batch, "input_ids": changed}, use_cache=False).logits[:, 6:]
    torch.testing.assert_close(after, out[:, 6:], **EXACT)


def test_a_leak_would_show():
    """The tests above would see a state or a window that runs on: one row without boundaries is far from them."""
    for name in ("kimi-k3-text", "kimi-linear", "linear-transformer", "delta-net", "gated-delta-net", "gpt2"):
        model = build(name)
        documents, batch = _packed("positions")
        whole = model(batch["input_ids"], use_cache=False).logits[:, 6:]
        alone = model(documents[2][None], use_cache=False).logits
        assert (whole - alone).abs().max() > 1e-2, name


BOUNDS = [0, 5, 6, 13]


@pytest.mark.parametrize(
    "boundaries",
    [
        {"cu_seq_lens_q": [1, 5, 13]},
        {"cu_seq_lens_q": [0, 5, 12]},
        {"cu_seq_lens_q": [0, 9, 5, 13]},
        {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": [0, 6, 13]},
        {"cu_seq_lens_q": BOUNDS, "position_ids": [list(range(13))]},
        {"cu_seq_lens_q": BOUNDS, "seq_idx": [[0] * 13]},
        {"cu_seq_lens_q": [0.0, 5.0, 13.0]},
        {"cu_seq_lens_q": [[0, 5], [6, 13]]},
        {"seq_idx": [[0] * 12]},
        {"seq_idx": [[0] * 5 + [1] * 4 + [0] * 4]},
        {"seq_idx": [[-1] * 5 + [0] * 8]},
        {"position_ids": [list(range(-1, 12))]},
        {"position_ids": [[0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]},
    ],
    ids=str,
)
def test_malformed_boundaries_are_refused(hybrid_or_recurrent, boundaries):
    told = {name: torch.tensor(value) for name, value in boundaries.items()}
    with pytest.raises(ShapeError):
        hybrid_or_recurrent(ids(1, 13), use_cache=False, **told)


def test_packed_documents_and_a_cache_are_refused(hybrid_or_recurrent):
    model = hybrid_or_recurrent
    cache = model(ids(1, 4), use_cache=True).past_key_values
    positions = torch.tensor([[4, 5, 0, 1]])
    for told in ({"position_ids": positions}, {"cu_seq_lens_q": torch.tensor([0, 2, 4])}):
        with pytest.raises(CacheError, match="packed documents"):
            model(ids(1, 4), past_key_values=cache, **told)


def test_a_mask_between_two_lengths_is_refused(hybrid_or_recurrent):
    cache = hybrid_or_recurrent(ids(2, 9), use_cache=True).past_key_values
    with pytest.raises(ShapeError, match="one column per token"):
        hybrid_or_recurrent(ids(2, 3), attention_mask=torch.ones(2, 7), past_key_values=cache)


def test_position_ids_of_other_rows_are_refused(k3):
    x = ids(1, 6)
    with pytest.raises(ShapeError, match=r"\(2, 6\), expected \(1, 6\)"):
        k3(x, position_ids=torch.arange(6).repeat(2, 1))
