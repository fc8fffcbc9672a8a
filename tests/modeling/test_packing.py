"""Packed documents never see each other, however they are described; malformed descriptions raise.

Float64 and a slow decay: without boundaries the second document would be off by far more than any bound here.
"""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from kimi_hf import KimiCache
from kimi_hf.errors import CacheError, ShapeError

from .golden import K3_RELEASE, KIMI_LINEAR, assert_close, slow_model

CASES = [KIMI_LINEAR, K3_RELEASE]
LENGTHS, EXACT = (6, 9), 1e-9
TOLD = ["position_ids", "cu_seq_lens", "seq_idx", "collator"]


def _documents(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 140, (1, n), generator=generator) for n in LENGTHS]


def _described(documents, told):
    """Model inputs for the documents in one row, in one of the usual ways of telling where they begin."""
    ids = torch.cat(documents, dim=1)
    lengths = [x.shape[1] for x in documents]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    if told == "position_ids":
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if told == "cu_seq_lens":
        return {
            "input_ids": ids,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
    if told == "seq_idx":
        index = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]
        return {"input_ids": ids, "seq_idx": index}
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": x[0].tolist(), "labels": x[0].tolist()} for x in documents])
    batch.pop("labels")
    return batch


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("all_ones", [False, True], ids=["no mask", "all-ones mask"])
def test_each_document_is_as_it_would_be_alone(case, told, all_ones):
    model, documents = slow_model(case), _documents()
    mask = {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)} if all_ones else {}
    with torch.no_grad():
        found = model(**_described(documents, told), **mask, use_cache=False).logits.split(LENGTHS, dim=1)
        for ours, document in zip(found, documents, strict=True):
            assert_close(ours, model(document).logits, EXACT)
        if told == "position_ids" and not all_ones:
            leaky = model(torch.cat(documents, dim=1)).logits[:, LENGTHS[0] :]
            assert (leaky - found[1]).abs().max() > 0.1, "the test could not see a leak"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("told", TOLD)
def test_the_first_document_does_not_move_the_second(case, told):
    """Beyond the last bits, which depend on how many tokens of a batch meet in one expert's product."""
    model, (first, second) = slow_model(case), _documents()
    others = [first, _documents(seed=1)[0], torch.full_like(first, 7)]
    with torch.no_grad():
        found = [model(**_described([x, second], told), use_cache=False).logits[:, LENGTHS[0] :] for x in others]
    for other in found[1:]:
        assert_close(other, found[0], 1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("told", ["position_ids", "collator"])
def test_gradients_are_those_of_the_document_alone(case, told):
    model, documents = slow_model(case).train(), _documents()
    found = []
    try:
        for inputs in (_described(documents, told), {"input_ids": documents[1]}):
            model.zero_grad()
            logits = model(**inputs, use_cache=False).logits[:, -LENGTHS[1] :]
            torch.nn.functional.cross_entropy(logits[0, :-1], documents[1][0, 1:]).backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    finally:
        model.zero_grad()
        model.eval()
    for name, expected in found[1].items():
        assert_close(found[0][name], expected, 1e-8 * max(1.0, expected.abs().max().item()), name)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_over_a_flattened_batch_is_that_of_its_documents(case):
    """What DataCollatorWithFlattening emits goes straight into the model, labels and all."""
    model, documents = slow_model(case), _documents()
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": x[0].tolist()} for x in documents])
    with torch.no_grad():
        found = model(**batch, use_cache=False).loss
        each = [model(x, labels=x).loss * (x.shape[1] - 1) for x in documents]
    assert abs(found - sum(each) / (sum(LENGTHS) - 2)) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_rows_may_be_packed_differently_and_padded(case):
    """Two rows: 2 + 5 + 3 tokens, and 7 tokens left-padded."""
    model = slow_model(case)
    ids = torch.randint(5, 140, (2, 10), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 0, 1, 2], [1, 1, 1, 0, 1, 2, 3, 4, 5, 6]])
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad():
        found = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        for row, start, stop in ((0, 0, 2), (0, 2, 7), (0, 7, 10), (1, 3, 10)):
            alone = model(ids[row : row + 1, start:stop]).logits[0]
            assert_close(found[row, start:stop], alone, EXACT, f"row {row}, {start}:{stop}")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_either_attention_keeps_documents_apart(attention):
    model, documents = slow_model(KIMI_LINEAR), _documents()
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            found = model(**_described(documents, "cu_seq_lens"), use_cache=False).logits[:, LENGTHS[0] :]
            assert_close(found, model(documents[1]).logits, EXACT)
    finally:
        model.set_attn_implementation(before)


MALFORMED = {
    "too short": {"cu_seq_lens_q": [0, 6, 14]},
    "too long": {"cu_seq_lens_q": [0, 6, 16]},
    "not from zero": {"cu_seq_lens_q": [1, 6, 15]},
    "falling": {"cu_seq_lens_q": [0, 9, 6, 15]},
    "one number": {"cu_seq_lens_q": [0]},
    "disagreeing": {"cu_seq_lens_q": [0, 6, 15], "cu_seq_lens_k": [0, 7, 15]},
    "disagreeing positions": {"cu_seq_lens_q": [0, 7, 15], "position_ids": [[*range(6), *range(9)]]},
    "a jump": {"position_ids": [[*range(6), *range(3, 12)]]},
    "backwards": {"position_ids": [[*range(14, -1, -1)]]},
    "index of another length": {"seq_idx": [[0] * 6 + [1] * 8]},
    "index against lengths": {"seq_idx": [[0] * 5 + [1] * 10], "cu_seq_lens_q": [0, 6, 15]},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_boundaries_raise(what):
    inputs = {name: torch.tensor(value) for name, value in MALFORMED[what].items()}
    with pytest.raises(ShapeError, match="|".join(inputs)):
        slow_model(KIMI_LINEAR)(torch.cat(_documents(), dim=1), **inputs, use_cache=False)


def test_packed_documents_do_not_fill_a_cache():
    model = slow_model(KIMI_LINEAR)
    with pytest.raises(CacheError, match="one document per row"):
        model(**_described(_documents(), "position_ids"), past_key_values=KimiCache(model.config))
    assert model(**_described(_documents(), "position_ids"), use_cache=True).past_key_values is None
