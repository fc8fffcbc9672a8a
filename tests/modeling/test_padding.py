"""Padding anywhere is as if it were not there: values, gradients, states, on the first forward and on cached ones.

In float64 with a slow decay, so that a pad that touches a state or a convolution window shows in full.
"""

import pytest
import torch

from kimi_hf import KimiCache
from kimi_hf.errors import ShapeError

from .golden import K3, K3_RELEASE, KIMI_LINEAR, assert_close, golden_model, slow_model

CASES = [KIMI_LINEAR, K3_RELEASE]
LENGTHS, WIDTH = (3, 8, 13), 13
EXACT = 1e-9


def _rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 140, (1, n), generator=generator) for n in LENGTHS]


def _places(side):
    """Where the real tokens of each row lie, (3, WIDTH) bool."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        if side == "left":
            mask[row, WIDTH - length :] = True
        elif side == "right":
            mask[row, :length] = True
        else:
            mask[row, torch.randperm(WIDTH, generator=generator)[:length]] = True
    return mask


def _batch(rows, mask, pad):
    ids = torch.full(mask.shape, pad)
    for i, row in enumerate(rows):
        ids[i, mask[i]] = row[0]
    return ids


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_real_tokens_are_as_in_the_row_alone(case, side):
    """Whatever token id sits in the padded places."""
    model, rows, mask = slow_model(case), _rows(), _places(side)
    with torch.no_grad():
        alone = [model(row).logits[0] for row in rows]
        for pad in (0, 7, 139):
            out = model(_batch(rows, mask, pad), attention_mask=mask.long())
            assert torch.isfinite(out.logits).all()
            for i, logits in enumerate(alone):
                assert_close(out.logits[i, mask[i]], logits, EXACT, f"row {i}, pad {pad}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_states_after_padding_are_those_of_the_row_alone(case, side):
    model, rows, mask = slow_model(case), _rows(), _places(side)
    cache = KimiCache(model.config)
    with torch.no_grad():
        model(_batch(rows, mask, 0), attention_mask=mask.long(), past_key_values=cache)
        for i, row in enumerate(rows):
            own = KimiCache(model.config)
            model(row, past_key_values=own)
            for layer, kind in enumerate(model.config.layer_types):
                if kind == "linear_attention":
                    ours, theirs = cache.layers[layer], own.layers[layer]
                    assert_close(ours.recurrent_states[0][i], theirs.recurrent_states[0][0], EXACT, "state")
                    assert_close(ours.conv_states[0][i], theirs.conv_states[0][0], EXACT, "window")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("full_mask", [True, False], ids=["mask of all tokens", "mask of new tokens"])
def test_padding_in_a_cached_forward(case, full_mask):
    """Three pieces, each with its own padding; the mask may cover everything so far or the new tokens only."""
    model, mask = slow_model(case), torch.ones(2, 12, dtype=torch.long)
    mask[0, [0, 1, 5, 9]] = 0
    mask[1, [4, 6, 7, 8, 11]] = 0
    ids = torch.randint(5, 140, (2, 12), generator=torch.Generator().manual_seed(4))
    cache, pieces = KimiCache(model.config), []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 9), (9, 12)):
            given = mask[:, :stop] if full_mask else mask[:, start:stop]
            out = model(ids[:, start:stop], attention_mask=given, past_key_values=cache)
            pieces.append(out.logits)
        found = torch.cat(pieces, dim=1)
        for row in range(2):
            real = mask[row].bool()
            assert_close(found[row, real], model(ids[row, real][None]).logits[0], EXACT, f"row {row}")


@pytest.mark.parametrize("case", CASES)
def test_a_later_forward_without_mask_remembers_the_padding(case):
    model, rows, mask = slow_model(case), _rows(), _places("left")
    more = torch.randint(5, 140, (3, 4), generator=torch.Generator().manual_seed(5))
    cache = KimiCache(model.config)
    with torch.no_grad():
        model(_batch(rows, mask, 0), attention_mask=mask.long(), past_key_values=cache)
        found = model(more, past_key_values=cache).logits
        for i, row in enumerate(rows):
            expected = model(torch.cat([row, more[i : i + 1]], dim=1)).logits[0, -4:]
            assert_close(found[i], expected, EXACT, f"row {i}")


def _gradients(model, batches):
    """The loss summed over all labelled tokens of several calls, in float64, and its gradients."""
    model.zero_grad()
    total = 0.0
    for ids, mask, labels in batches:
        logits = model(ids, attention_mask=mask).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pad", [0, 139])
def test_loss_and_all_gradients_of_a_left_padded_batch(case, pad):
    """FR-11. The first real token has no label: nothing real stands before it to predict it from."""
    model, rows, mask = slow_model(case).train(), _rows(), _places("left")
    ids = _batch(rows, mask, pad)
    labels = ids.masked_fill(~mask, -100)
    for i, length in enumerate(LENGTHS):
        labels[i, WIDTH - length] = -100
    try:
        padded, found = _gradients(model, [(ids, mask.long(), labels)])
        plain, expected = _gradients(model, [(row, None, row) for row in rows])
    finally:
        model.zero_grad()
        model.eval()
    assert abs(padded - plain) < EXACT
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.isfinite(gradient).all(), name
        assert_close(gradient, expected[name], 1e-8 * max(1.0, expected[name].abs().max().item()), name)


@pytest.mark.parametrize("case", [K3, KIMI_LINEAR])
def test_prompts_generate_together_what_they_generate_alone(case):
    """FR-12, prompts of 3, 8 and 13 tokens, and a single padded row, through `generate` in fp32."""
    model, rows, mask = golden_model(case), _rows(1), _places("left")
    together = model.generate(_batch(rows, mask, 0), attention_mask=mask.long(), max_new_tokens=5, do_sample=False)
    for i, row in enumerate(rows[:2]):
        alone = model.generate(row, max_new_tokens=5, do_sample=False)
        assert torch.equal(together[i, -5:], alone[0, -5:])
    single = model(_batch(rows, mask, 0)[1:2], attention_mask=mask[1:2].long()).logits[0, mask[1]]
    assert_close(single, model(rows[1]).logits[0], 1e-3 if case == K3 else 1e-5, "a single padded row")


def test_an_all_ones_mask_is_no_mask():
    model = slow_model(KIMI_LINEAR)
    ids = _rows()[2]
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)


def test_a_longer_mask_counts_from_its_end():
    model, ids = slow_model(KIMI_LINEAR), _rows()[1]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    longer = torch.cat([torch.ones(1, 3, dtype=torch.long), mask], dim=1)
    assert torch.equal(model(ids, attention_mask=longer).logits, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("shape", [(1, 5), (2, 8), (8,), (1, 1, 8)])
def test_a_mask_that_does_not_fit_is_refused(shape):
    with pytest.raises(ShapeError, match="attention_mask"):
        slow_model(KIMI_LINEAR)(_rows()[1], attention_mask=torch.ones(shape, dtype=torch.long))


@pytest.mark.parametrize("mask", [[1, 1, 1, 2, 2, 2, 2, 2], [0, 0, -1, 1, 1, 1, 1, 1], [0.5] * 8])
def test_a_mask_that_numbers_documents_is_refused(mask):
    with pytest.raises(ShapeError, match="1 for real tokens and 0 for padding.*seq_idx"):
        slow_model(KIMI_LINEAR)(_rows()[1], attention_mask=torch.tensor([mask]))
