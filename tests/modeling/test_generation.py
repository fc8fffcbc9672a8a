"""Every way of going on from a cache gives what one forward over everything gives: pieces, beams, drafts, rollback."""

import copy

import pytest
import torch
from transformers import DynamicCache

from kimi_hf import KimiCache
from kimi_hf.errors import CacheError

from .golden import K3, K3_RELEASE, KIMI_LINEAR, assert_close, fresh_model, golden, golden_model, slow_model

CASES = [KIMI_LINEAR, K3_RELEASE]
EXACT = 1e-9


def _ids(batch, length, seed=0):
    return torch.randint(5, 140, (batch, length), generator=torch.Generator().manual_seed(seed))


def _greedy(model, ids, new, **kwargs):
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)


def _feed(model, ids, cache, pieces):
    """Logits of `ids` given in pieces of these lengths."""
    with torch.no_grad():
        return torch.cat([model(x, past_key_values=cache).logits for x in ids.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_pieces_of_any_length(case, kind):
    """FR-6, with the cache we make and with transformers' plain one."""
    model, ids = slow_model(case), _ids(2, 20)
    cache = KimiCache(model.config) if kind == "ours" else DynamicCache(config=model.config)
    found = _feed(model, ids, cache, [2, 7, 1, 10])
    with torch.no_grad():
        assert_close(found, model(ids).logits, EXACT)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("case", CASES)
def test_a_piece_much_longer_than_a_chunk(case):
    model, ids = slow_model(case), _ids(1, 150)
    found = _feed(model, ids, KimiCache(model.config), [1, 70, 79])
    with torch.no_grad():
        assert_close(found, model(ids).logits, EXACT)


@pytest.mark.parametrize("case", [KIMI_LINEAR, K3])
def test_beam_search_with_and_without_cache(case):
    """FR-7: two rows, the second left-padded."""
    model, ids = golden_model(case), _ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    kwargs = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
    cached, plain = (_greedy(model, ids, 4, use_cache=use, **kwargs) for use in (True, False))
    assert torch.equal(cached, plain)
    assert cached.shape == (4, 13)


@pytest.mark.parametrize("helper", ["prompt lookup", "another model", "the model itself"])
def test_drafts_change_no_token(helper):
    """FR-8. The draft of another model is mostly rejected, so that states roll back at nearly every step."""
    model = golden_model(K3)
    ids = _ids(1, 5).repeat(1, 3) if helper == "prompt lookup" else _ids(1, 7)
    kwargs = {
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "another model": {"assistant_model": golden_model(K3_RELEASE)},
        "the model itself": {"assistant_model": golden_model(K3, "eager")},
    }[helper]
    assert torch.equal(_greedy(model, ids, 10, **kwargs), _greedy(model, ids, 10))


@pytest.mark.parametrize("case", [KIMI_LINEAR, K3])
def test_a_static_cache_gives_the_same_tokens(case):
    """FR-9."""
    model, ids = golden_model(case), _ids(2, 6)
    assert torch.equal(_greedy(model, ids, 5, cache_implementation="static"), _greedy(model, ids, 5))


@pytest.mark.parametrize("case", CASES)
def test_only_latents_grow(case):
    """FR-10: kv_lora_rank + qk_rope_head_dim numbers a token in softmax layers, nothing in linear ones."""
    model = golden_model(case)
    config = model.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    cache, sizes = KimiCache(config), []
    for _ in range(3):
        model(_ids(1, 128), past_key_values=cache)
        sizes.append(cache.memory_report())
    softmax = config.layer_types.count("full_attention")
    for count, report in enumerate(sizes, start=1):
        assert report["length"] == 128 * count
        # Capacity grows by doubling, so that appending a token copies no earlier one.
        held = report["by_kind"]["tokens"] // (4 * width * softmax)
        assert 128 * count <= held < 2 * 128 * count + 128
        assert report["by_kind"]["state"] == sizes[0]["by_kind"]["state"]
        assert report["by_kind"]["window"] == sizes[0]["by_kind"]["window"]
        assert report["total"] == sum(report["by_kind"].values())


# Taking tokens back.


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("removed", [0, 1, 3, 6])
def test_cropping_is_as_if_the_tokens_had_never_come(case, removed):
    model, ids, other = slow_model(case), _ids(1, 16), _ids(1, 5, seed=1)
    cache = KimiCache(model.config)
    cache.activate_past_recording()
    _feed(model, ids, cache, [10, 6])
    cache.crop(-removed)
    assert cache.get_seq_length() == 16 - removed
    found = _feed(model, other, cache, [2, 3])
    with torch.no_grad():
        expected = model(torch.cat([ids[:, : 16 - removed], other], dim=1)).logits[:, -5:]
    assert_close(found, expected, EXACT)


def test_cropping_without_recording_is_refused_and_changes_nothing():
    model, ids = slow_model(KIMI_LINEAR), _ids(1, 8)
    cache = KimiCache(model.config)
    _feed(model, ids, cache, [8])
    with pytest.raises(CacheError, match="activate_past_recording"):
        cache.crop(-2)
    with pytest.raises(CacheError, match="more than the 8"):
        cache.crop(-9)
    with torch.no_grad():
        found = model(ids[:, :1], past_key_values=cache).logits
        assert_close(found, model(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, -1:], EXACT)


def test_cropping_further_than_what_is_kept_is_refused_and_changes_nothing():
    model, ids = slow_model(KIMI_LINEAR), _ids(1, 100)
    cache = KimiCache(model.config)
    cache.activate_past_recording()
    _feed(model, ids, cache, [90, 10])
    with pytest.raises(CacheError, match="recompute the prefix"):
        cache.crop(-90)
    cache.crop(-20)
    with torch.no_grad():
        found = model(ids[:, :1], past_key_values=cache).logits
        assert_close(found, model(torch.cat([ids[:, :80], ids[:, :1]], dim=1)).logits[:, -1:], EXACT)


# Rows of the cache.


@pytest.mark.parametrize("case", CASES)
def test_rows_are_reordered_repeated_and_selected_together_with_their_padding(case):
    model, ids, more = slow_model(case), _ids(2, 7), _ids(4, 3, seed=1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = KimiCache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        kept = torch.tensor([0, 2, 3])
        cache.batch_select_indices(kept)
        found = model(more[kept], past_key_values=cache).logits
        rows = torch.tensor([0, 0, 1, 1])[torch.tensor([3, 0, 1, 2])][kept]
        for i, row in enumerate(rows.tolist()):
            own = torch.cat([ids[row, mask[row].bool()][None], more[kept[i]][None]], dim=1)
            assert_close(found[i], model(own).logits[0, -3:], EXACT, f"row {i}")


@pytest.mark.parametrize("case", CASES)
def test_a_copy_goes_its_own_way(case):
    model, prefix = slow_model(case), _ids(1, 12)
    cache = KimiCache(model.config)
    with torch.no_grad():
        model(prefix, past_key_values=cache)
        branches = [copy.deepcopy(cache) for _ in range(2)]
        for seed, branch in enumerate([*branches, cache], start=1):
            more = _ids(1, 4, seed=seed)
            found = _feed(model, more, branch, [3, 1])
            assert_close(found, model(torch.cat([prefix, more], dim=1)).logits[:, -4:], EXACT, f"branch {seed}")


def test_reset_forgets_everything():
    model, ids = slow_model(KIMI_LINEAR), _ids(1, 6)
    cache = KimiCache(model.config)
    _feed(model, _ids(2, 9, seed=1), cache, [9])
    cache.reset()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        assert_close(_feed(model, ids, cache, [4, 2]), model(ids).logits, EXACT)


def test_a_cache_of_another_model_is_refused():
    with pytest.raises(CacheError, match="KimiCache"):
        golden_model(KIMI_LINEAR)(_ids(1, 4), past_key_values=DynamicCache())


def test_golden_tokens_come_out_of_every_cache():
    """The stored greedy tokens, through a plain and a static cache and none at all."""
    stored = golden(f"{KIMI_LINEAR}/golden.safetensors")
    ids, tokens = stored["plain.input_ids"], stored["plain.greedy_tokens"][:, :4]
    model = golden_model(KIMI_LINEAR)
    for kwargs in (
        {"past_key_values": DynamicCache(config=model.config)},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prefill_chunk_size": 10},
    ):
        assert torch.equal(_greedy(model, ids, 4, **kwargs)[:, -4:], tokens), kwargs


def test_states_stay_fp32_under_bf16():
    model = fresh_model(KIMI_LINEAR, dtype=torch.bfloat16)
    cache = KimiCache(model.config)
    _feed(model, _ids(1, 9), cache, [5, 4])
    held = cache.layers[0]
    assert held.recurrent_states[0].dtype == torch.float32 and held.conv_states[0].dtype == torch.bfloat16
