"""Padding, packing, pieces, beams, rollback and the cache's own operations, for every mixer with and without positions."""

import copy

import pytest
import torch

from kimi_hf import KimiCache, KimiHfError

from .models import MIXERS, tiny_model, tokens

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
CASES = [(mixer, {}) for mixer in MIXERS] + [
    ("delta_net", {"short_conv_kernel_size": 3, "output_norm": True}),
    ("gated_delta_net", {"short_conv_kernel_size": 0, "output_norm": False}),
    ("gated_delta_net", {"linear_value_head_dim": 12, "output_gate": False}),
    ("linear_attention", {"linear_value_head_dim": 12, "linear_num_heads": 3, "linear_head_dim": 5}),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *case[1]]))
def model(request):
    mixer, changes = request.param
    return tiny_model(mixer=mixer, **changes)


@torch.no_grad()
@pytest.mark.parametrize("where", [range(3, 9), range(6), [0, 1, 2, 6, 7, 8]], ids=["left", "right", "inside"])
def test_padding_changes_no_real_token(model, where):
    ids, columns = tokens(2, 6), list(where)
    padded, mask = torch.full((2, 9), 7), torch.zeros(2, 9, dtype=torch.long)
    padded[:, columns], mask[:, columns] = ids, 1
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, columns], model(ids).logits, **CLOSE)


@torch.no_grad()
def test_pieces_with_padding_in_a_cache_equal_one_forward(model):
    ids = tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 4:6] = 0
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    cache, outputs, start = None, [], 0
    for piece in ids.split((3, 2, 1, 4), dim=1):
        stop = start + piece.shape[1]
        out = model(piece, attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, stop
        outputs.append(out.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(outputs, dim=1)[real], whole[real], **CLOSE)


def test_packed_documents_do_not_see_each_other(model):
    lengths = (5, 1, 7)
    documents = [tokens(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    bounds = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    for told in ({"position_ids": positions}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):
        parts = model(torch.cat(documents, dim=1), use_cache=False, **told).logits.split(lengths, dim=1)
        for document, ours in zip(documents, parts, strict=True):
            torch.testing.assert_close(ours, model(document).logits, **CLOSE)


def test_beams_assistants_and_rollback_change_no_token(model):
    ids = tokens(1, 4).repeat(1, 3)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), plain)
    beams = [model.generate(ids, num_beams=3, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert torch.equal(*beams)
    with torch.no_grad():
        cache = KimiCache(model.config)
        cache.activate_past_recording()
        model(ids, past_key_values=cache)
        model(tokens(1, 5, seed=3), past_key_values=cache)
        cache.crop(-5)
        after = model(ids[:, :2], past_key_values=cache).logits
        whole = model(torch.cat([ids, ids[:, :2]], dim=1)).logits[:, -2:]
        torch.testing.assert_close(after, whole, **CLOSE)


@torch.no_grad()
def test_cache_rows_can_be_reordered_repeated_selected_and_copied(model):
    ids, more = tokens(3, 6), tokens(3, 2, seed=4)
    cache = model(ids, use_cache=True).past_key_values
    expected = model(torch.cat([ids, more], dim=1)).logits[:, -2:]
    kept = copy.deepcopy(cache)
    kept.reorder_cache(torch.tensor([2, 0, 1]))
    torch.testing.assert_close(model(more[[2, 0, 1]], past_key_values=kept).logits, expected[[2, 0, 1]], **CLOSE)
    kept = copy.deepcopy(cache)
    kept.batch_select_indices(torch.tensor([1]))
    kept.batch_repeat_interleave(2)
    out = model(more[[1, 1]], past_key_values=kept).logits
    torch.testing.assert_close(out, expected[[1, 1]], **CLOSE)
    report = cache.memory_report()
    assert report["length"] == 6 and report["total"] > 0


@torch.no_grad()
def test_recurrent_states_do_not_grow_and_key_value_caches_do(model):
    sizes = []
    for length in (3, 60):
        cache = KimiCache(model.config)
        model(tokens(1, length), past_key_values=cache)
        sizes.append(sum(x.numel() for layer in cache.layers for x in layer.stored().values()))
    grows = model.config.mixers[0] in ("softmax_attention", "latent_attention")
    assert sizes[1] == (20 * sizes[0] if grows else sizes[0])


def test_a_row_of_padding_only_harms_no_gradient(model):
    ids, mask = tokens(2, 5), torch.ones(2, 5, dtype=torch.long)
    mask[1] = 0
    model.train()
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    logits[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_too_many_tokens_for_learned_positions(model):
    with pytest.raises(KimiHfError, match="max_position_embeddings is 64"):
        model(tokens(1, 65))


def test_half_precision_stays_near_full(model):
    ids = tokens(2, 9)
    full = model(ids).logits
    half = copy.deepcopy(model).to(torch.bfloat16)(ids).logits
    assert half.dtype == torch.bfloat16 and (half - full).abs().mean() < 0.05


def test_dropout_acts_in_training_only():
    model = tiny_model(residual_dropout=0.3, embedding_dropout=0.3, attention_dropout=0.3, attn_implementation="eager")
    ids = tokens()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
