"""What `generate` and cached forwards promise: every way of decoding gives the tokens of plain, uncached decoding."""

import copy
import inspect

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import Cache

from kimi_hf import KimiHfError

from .tiny import COMPILED, HIDDEN, VOCAB, WITH_VISION, only

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
NEW = 6


def _greedy(model, ids, new=NEW, **kwargs):
    return model.generate(input_ids=ids, max_new_tokens=new, do_sample=False, **kwargs)


@torch.no_grad()
def _by_hand(model, ids, new=NEW):
    """Argmax decoding without a cache."""
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def test_greedy_decoding_is_argmax_decoding(tiny):
    model, ids = tiny.build(), tiny.ids()
    expected = _by_hand(model, ids)
    assert torch.equal(_greedy(model, ids), expected)
    assert torch.equal(_greedy(model, ids, use_cache=False), expected)
    assert torch.equal(_greedy(model, ids, logits_to_keep=0), expected)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(7, 1, 1, 1), (1, 9), (4, 1, 5), (10,)], ids=str)
def test_prefill_in_pieces_equals_one_forward(tiny, pieces):
    model, ids = tiny.build(), tiny.ids(2, 10)
    whole = model(ids, use_cache=False).logits
    cache, outputs = None, []
    for piece in ids.split(pieces, dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        outputs.append(out.logits)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, **CLOSE)
    assert cache.get_seq_length() == 10


@torch.no_grad()
def test_padding_inside_a_continued_forward_touches_no_state(tiny):
    model, ids = tiny.build(), tiny.ids(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1, 4:6] = 0
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    first = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
    second = model(ids[:, 4:], attention_mask=mask, past_key_values=first.past_key_values)
    real = mask[:, 4:].bool()
    torch.testing.assert_close(second.logits[real], whole[:, 4:][real], **CLOSE)


def test_a_left_padded_row_generates_what_it_would_alone(tiny):
    model, ids = tiny.build(attention="sdpa"), tiny.ids(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    together = _greedy(model, ids, attention_mask=mask)
    assert torch.equal(together[:1, 3:], _greedy(model, ids[:1, 3:]))
    assert torch.equal(together[1:], _greedy(model, ids[1:]))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(_greedy(model, ids, attention_mask=mask, position_ids=positions), together)


def test_sampling_repeats_with_its_seed(tiny):
    model, ids = tiny.build(), tiny.ids()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(
            model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=True, num_return_sequences=2, top_k=20)
        )
    assert draws[0].shape == (4, ids.shape[1] + NEW)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("sample", [False, True], ids=["search", "sample"])
def test_beams_do_not_depend_on_the_cache(tiny, sample):
    model, ids = tiny.build(), tiny.ids()
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(
            model.generate(
                input_ids=ids, max_new_tokens=NEW, num_beams=3, num_return_sequences=2, do_sample=sample,
                use_cache=use_cache, output_scores=True, return_dict_in_generate=True,
            )
        )  # fmt: skip
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].sequences_scores, found[1].sequences_scores, **CLOSE)


def test_dict_output_has_one_entry_per_new_token(tiny):
    model, ids = tiny.build(), tiny.ids()
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
    for use_cache in (True, False):
        out = _greedy(model, ids, 3, return_dict_in_generate=True, use_cache=use_cache, **wanted)
        for kind in ("scores", "logits", "hidden_states", "attentions"):
            assert len(out[kind]) == 3
        assert all(step.shape == (2, VOCAB) for step in (*out.scores, *out.logits))
        for step in range(3):
            seen = ids.shape[1] + step
            queries = 1 if use_cache and step else seen
            layers = model.config.get_text_config().num_hidden_layers
            assert [s.shape for s in out.hidden_states[step]] == [(2, queries, HIDDEN)] * (layers + 1)
            assert {a.shape[-2:] for a in out.attentions[step]} <= {(queries, seen)}
            assert len(out.attentions[step]) == tiny.layers_of("full_attention")
        assert (out.past_key_values is None) is (not use_cache)
        if use_cache:
            assert out.past_key_values.get_seq_length() == ids.shape[1] + 2


def test_generation_starts_from_embeddings(tiny):
    model, ids = tiny.build(), tiny.ids()
    embeds = model.get_input_embeddings()(ids).detach()
    expected = _greedy(model, ids)
    mask = torch.ones_like(ids)
    only_new = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(only_new, expected[:, ids.shape[1] :])
    both = model.generate(input_ids=ids, inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(both, expected)
    other = torch.rand_like(embeds)
    assert not torch.equal(model.generate(inputs_embeds=other, attention_mask=mask, max_new_tokens=NEW), only_new)


def test_generation_continues_from_a_returned_cache(tiny):
    model, ids = tiny.build(), tiny.ids()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    whole = _greedy(model, ids, 6, attention_mask=mask)
    part = _greedy(model, ids, 3, attention_mask=mask, return_dict_in_generate=True)
    longer = torch.nn.functional.pad(mask, (0, 3), value=1)
    rest = _greedy(model, part.sequences, 3, attention_mask=longer, past_key_values=part.past_key_values)
    assert torch.equal(rest, whole)


def test_one_prefix_serves_several_continuations(tiny):
    model, ids = tiny.build(), tiny.ids(1)
    with torch.no_grad():
        prefix = model(ids, use_cache=True).past_key_values
    for seed in (3, 4):
        prompt = torch.cat([ids, tiny.ids(1, 4, seed=seed)], dim=1)
        kept = copy.deepcopy(prefix)
        assert torch.equal(_greedy(model, prompt, past_key_values=kept), _greedy(model, prompt))
    assert prefix.get_seq_length() == ids.shape[1]


def test_generation_needs_no_prompt(tiny):
    model = tiny.build()
    model.generation_config.bos_token_id = 1
    assert torch.equal(model.generate(max_new_tokens=3, do_sample=False), _by_hand(model, torch.tensor([[1]]), 3))


@pytest.mark.parametrize("helper", ["lookup", "itself", "other"])
def test_assisted_decoding_changes_no_token(tiny, helper):
    model = tiny.build()
    ids = tiny.ids(1, 4).repeat(1, 3)
    options = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "itself": {"assistant_model": model},
        "other": {"assistant_model": tiny.build(seed=9)},
    }
    assert torch.equal(_greedy(model, ids, 12, **options[helper]), _greedy(model, ids, 12))


def test_default_cache_is_our_own_and_others_work_too(tiny):
    model, ids = tiny.build(), tiny.ids()
    ours = _greedy(model, ids, return_dict_in_generate=True)
    assert type(ours.past_key_values).__name__ == "KimiCache" and isinstance(ours.past_key_values, Cache)
    assert len(ours.past_key_values) == model.config.get_text_config().num_hidden_layers
    assert not ours.past_key_values.is_compileable
    plain = DynamicCache(config=model.config)
    if tiny.layers_of("full_attention"):
        assert torch.equal(_greedy(model, ids, past_key_values=plain), ours.sequences)
    else:
        with pytest.raises(KimiHfError, match="KimiCache"):
            model(ids, past_key_values=plain)


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_static_cache_equals_the_growing_one(tiny, attention, padded):
    model, ids = tiny.build(attention=attention), tiny.ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = {}
    for kind in ("static", None):
        found[kind] = _greedy(
            model, ids, 8, attention_mask=mask if padded else None, cache_implementation=kind,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    assert isinstance(found["static"].past_key_values, StaticCache)
    for static, growing in zip(found["static"].logits, found[None].logits, strict=True):
        torch.testing.assert_close(static, growing, **CLOSE)


def test_static_cache_works_in_bf16(tiny):
    model, ids = tiny.build(attention="sdpa").to(torch.bfloat16), tiny.ids()
    logits = [
        _greedy(model, ids, 1, cache_implementation=kind, return_dict_in_generate=True, output_logits=True).logits[0]
        for kind in ("static", None)
    ]
    torch.testing.assert_close(*logits, rtol=5e-2, atol=0.2)


def test_static_cache_is_long_enough_for_embeddings(tiny):
    model, ids = tiny.build(), tiny.ids()
    embeds = model.get_input_embeddings()(ids).detach()
    mask = torch.ones_like(ids)
    out = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW, cache_implementation="static")
    assert torch.equal(out, _greedy(model, ids)[:, ids.shape[1] :])


def test_preparing_inputs_forwards_what_it_does_not_know(tiny):
    model, ids = tiny.build(), tiny.ids()
    inputs = model.prepare_inputs_for_generation(input_ids=ids, something_new=42, is_first_iteration=True)
    assert inputs["something_new"] == 42
    named = inspect.signature(model.forward).parameters
    for name in ("labels", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "logits_to_keep"):
        assert name in named, name


@only(*WITH_VISION)
def test_an_image_is_seen_once_and_remembered(tiny):
    model, inputs = tiny.build(), tiny.images()
    expected = inputs["input_ids"]
    for _ in range(4):
        now = {**inputs, "input_ids": expected, "attention_mask": torch.ones_like(expected)}
        with torch.no_grad():
            expected = torch.cat([expected, model(**now, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.slow
@only(*COMPILED)
def test_compiled_generation_neither_breaks_nor_recompiles(tiny):
    model = tiny.build(attention="sdpa")
    options = CompileConfig(fullgraph=True, dynamic=False)
    options._compile_all_devices = True
    torch.compiler.reset()
    compiled = {"cache_implementation": "static", "compile_config": options}
    for seed in (1, 2):
        ids = tiny.ids(2, 7, seed=seed)
        with torch.compiler.set_stance("fail_on_recompile" if seed == 2 else "default"):
            ours = _greedy(model, ids, 5, **compiled)
        assert torch.equal(ours, _greedy(model, ids, 5))
    assert hasattr(model, "_compiled_call")
