"""Optimiser groups and Muon, and documents packed into rows."""

import pytest
import torch

from kimi_hf.errors import ShapeError
from kimi_hf.training import DocumentCollator, MuonWithAdamW, parameter_groups

from .models import tiny_model, tokens


def test_groups_hold_every_trainable_parameter_once():
    model = tiny_model()
    groups = parameter_groups(model, 0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    names = {id(p): n for n, p in model.named_parameters()}
    decayed = {names[id(p)] for p in groups[0]["params"]}
    for part in ("A_log", "dt_bias", "norm", "embed_tokens", "lm_head", "res_proj", "conv1d"):
        assert not [name for name in decayed if part in name.split(".")[-2:] or name.split(".")[-2].endswith(part)], (
            part
        )
    assert any("experts.gate_up_proj" in name for name in decayed)


@pytest.mark.parametrize("per_head", [False, True])
def test_muon_trains_and_resumes(per_head):
    model, ids = tiny_model(), tokens(4, 16)
    optimizer = MuonWithAdamW(model, lr=5e-3, per_head=per_head)
    assert bool(optimizer.views) == per_head
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    again = MuonWithAdamW(model, lr=1.0, per_head=per_head)
    again.load_state_dict(optimizer.state_dict())
    assert {group["lr"] for group in again.param_groups} == {5e-3}


def test_packed_documents_train_like_separate_ones():
    model = tiny_model()
    documents = [tokens(1, n, seed=n)[0].tolist() for n in (5, 9, 12, 3)]
    batch = DocumentCollator(16)([{"input_ids": d} for d in documents])
    assert batch["input_ids"].shape == (2, 16) and int(batch["attention_mask"].sum()) == 29
    packed = model(**batch, use_cache=False, num_items_in_batch=25).loss
    packed.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    total = 0
    for document in documents:
        ids = torch.tensor([document])
        total = total + model(input_ids=ids, labels=ids, num_items_in_batch=25).loss
    total.backward()
    torch.testing.assert_close(packed, total, atol=1e-5, rtol=0)
    for packed_grad, parameter in zip(grads, (p for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(packed_grad, parameter.grad, atol=1e-4, rtol=1e-3)


def test_a_document_longer_than_the_row_is_refused():
    with pytest.raises(ShapeError, match="document 1 has 20 tokens"):
        DocumentCollator(16)([{"input_ids": [5] * 4}, {"input_ids": [5] * 20}])
