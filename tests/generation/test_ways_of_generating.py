"""Every way of decoding gives the tokens of plain argmax decoding without a cache, or says why it cannot."""

import threading
from string import ascii_letters, digits, punctuation

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, TextIteratorStreamer

from kimi_hf import KimiCache, KimiHfError
from kimi_hf.errors import CacheError

from ..contract.tiny import VOCAB
from .models import NEW, build, by_hand, greedy, ids


@pytest.fixture(scope="module")
def tokenizer():
    """A vocabulary of one character a token."""
    letters = {letter: i for i, letter in enumerate(f"{ascii_letters}{digits}{punctuation}äöüßé"[:VOCAB])}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def _two_prompts():
    """The same two prompts, left-padded, and one by one."""
    whole, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    return whole, mask, [whole[:1, 4:], whole[1:]]


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_prefill_in_chunks(model, chunk):
    whole, mask, alone = _two_prompts()
    out = greedy(model, whole, attention_mask=mask, prefill_chunk_size=chunk)
    assert [row.tolist() for row in out[:, 9:]] == [by_hand(model, x)[0, x.shape[1] :].tolist() for x in alone]


def test_prefill_in_chunks_into_a_static_cache(model):
    whole, mask, _ = _two_prompts()
    expected = greedy(model, whole, attention_mask=mask)
    assert torch.equal(
        greedy(model, whole, attention_mask=mask, prefill_chunk_size=4, cache_implementation="static"), expected
    )


@pytest.mark.parametrize("kind", ["static", "dynamic", "offloaded"])
def test_named_caches(model, kind):
    whole, mask, _ = _two_prompts()
    assert torch.equal(
        greedy(model, whole, attention_mask=mask, cache_implementation=kind), greedy(model, whole, attention_mask=mask)
    )


def test_an_offloaded_static_cache_is_refused_on_a_cpu(model):
    with pytest.raises(CacheError, match="offloaded_static"):
        greedy(model, ids(), cache_implementation="offloaded_static")


@pytest.mark.parametrize("call", ["generate_batch", "init_continuous_batching", "paged"])
def test_continuous_batching_is_refused(model, call):
    with pytest.raises(CacheError, match="continuous batching keeps keys and values in pages"):
        if call == "paged":
            greedy(model, ids(), cache_implementation="paged")
        else:
            getattr(model, call)([[5, 6]])


def test_unknown_cache_options_are_refused(k3):
    for options in ({"nbits": 4}, {"latent_dtype": "int3"}):
        with pytest.raises(CacheError, match="latent_dtype"):
            greedy(k3, ids(), cache_implementation="quantized", cache_config=options)


def test_several_sequences_per_prompt(model):
    prompt = ids()
    options = {"num_return_sequences": 3, "max_new_tokens": NEW, "do_sample": True, "top_k": 5}
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        drawn.append(model.generate(prompt, use_cache=use_cache, **options))
    assert torch.equal(*drawn) and drawn[0].shape[0] == 6


@pytest.mark.parametrize("sample", [False, True], ids=["search", "sample"])
def test_beams_over_padded_rows(model, sample):
    whole, mask, alone = _two_prompts()
    options = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": sample}
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(model.generate(whole, attention_mask=mask, use_cache=use_cache, **options))
    assert torch.equal(*found)
    if not sample:
        single = model.generate(alone[0], **options)
        assert torch.equal(found[0][:1, 4:], single)


@pytest.mark.parametrize("helper", ["lookup", "itself", "other", "growing drafts"])
def test_drafts_change_no_token(model, helper):
    _check_drafts(model, helper, 16, given=False)


@pytest.mark.parametrize("helper", ["lookup", "other", "long drafts"])
def test_drafts_with_a_cache_of_the_users(hybrid_or_recurrent, helper):
    _check_drafts(hybrid_or_recurrent, helper, 100 if helper == "long drafts" else 12, given=True)


def _check_drafts(model, helper, new, given):
    prompt = ids(1, 4).repeat(1, 4)
    draft = build("delta-net", seed=5)
    draft.generation_config.num_assistant_tokens = {"long drafts": 90, "growing drafts": 3}.get(helper, 5)
    draft.generation_config.assistant_confidence_threshold = 0.0
    if helper == "growing drafts":
        draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    options = {"assistant_model": model if helper == "itself" else draft}
    if helper == "lookup":
        options = {"prompt_lookup_num_tokens": 100, "max_matching_ngram_size": 2}
    if given:
        options["past_key_values"] = KimiCache(model.config)
    if helper == "long drafts":  # few steps, but drafts as long as all tokens that could come

        def fourth(input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= prompt.shape[1] + 4])

        options["stopping_criteria"] = [fourth]
    out = greedy(model, prompt, new, **options)
    assert out.shape[1] > prompt.shape[1] + 3
    assert torch.equal(out, greedy(model, prompt, out.shape[1] - prompt.shape[1]))


def test_drafts_by_leaving_early(k3):
    prompt = ids(1)
    expected = greedy(k3, prompt, 10)
    try:
        assert torch.equal(greedy(k3, prompt, 10, assistant_early_exit=2), expected)
    finally:
        k3.config.num_hidden_layers = 4


def test_drafts_from_a_plain_cache_are_refused(k3):
    with pytest.raises(KimiHfError, match="KimiCache"):
        greedy(k3, ids(1), past_key_values=DynamicCache(config=k3.config), prompt_lookup_num_tokens=3)


def test_embeddings_then_more_turns(model):
    prompt = ids()
    embeds = model.get_input_embeddings()(prompt).detach()
    mask = torch.ones_like(prompt)
    out = model.generate(
        inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    first = torch.cat([prompt, out.sequences], dim=1)
    assert torch.equal(first, by_hand(model, prompt))
    longer = torch.cat([first, ids(2, 3, seed=8)], dim=1)
    assert torch.equal(greedy(model, longer, past_key_values=out.past_key_values), by_hand(model, longer))


def test_streaming(model, tokenizer):
    prompt = ids(1)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=greedy, args=(model, prompt), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(by_hand(model, prompt)[0, prompt.shape[1] :])


def test_stop_strings_and_criteria(model, tokenizer):
    prompt = ids(1)
    expected = by_hand(model, prompt, 8)
    stop = tokenizer.decode(expected[0, prompt.shape[1] + 2 : prompt.shape[1] + 4])
    out = greedy(model, prompt, 8, stop_strings=[stop], tokenizer=tokenizer)
    assert out.shape[1] <= prompt.shape[1] + 4 and tokenizer.decode(out[0]).endswith(stop)
    assert torch.equal(out, expected[:, : out.shape[1]])

    def third(input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= prompt.shape[1] + 3])

    assert torch.equal(greedy(model, prompt, 8, stopping_criteria=[third]), expected[:, : prompt.shape[1] + 3])


def test_a_plain_cache_works_or_names_ours(model):
    prompt, types = ids(), set(model.config.layer_types)
    if "full_attention" in types:
        assert torch.equal(
            greedy(model, prompt, past_key_values=DynamicCache(config=model.config)), greedy(model, prompt)
        )
    else:
        with pytest.raises(CacheError, match="KimiCache"):
            greedy(model, prompt, past_key_values=DynamicCache(config=model.config))
    if "linear_attention" in types:
        with pytest.raises(CacheError, match="KimiCache"):
            greedy(model, prompt, past_key_values=DynamicCache())
    else:
        assert torch.equal(greedy(model, prompt, past_key_values=DynamicCache()), greedy(model, prompt))


def test_contrastive_candidates_share_a_prefix(model):
    """As contrastive search does it: repeat the rows, try k tokens each, keep one of them."""
    prompt, k = ids(), 4
    with torch.no_grad():
        out = model(prompt, use_cache=True)
        candidates = out.logits[:, -1].topk(k).indices
        cache = out.past_key_values
        cache.batch_repeat_interleave(k)
        model(candidates.reshape(-1, 1), past_key_values=cache)
        chosen = torch.tensor([2, 4 + 1])
        cache.batch_select_indices(chosen)
        rows = torch.cat([prompt, candidates.reshape(-1)[chosen][:, None]], dim=1)
        after = model(ids(2, 2, seed=9), past_key_values=cache).logits
        expected = model(torch.cat([rows, ids(2, 2, seed=9)], dim=1), use_cache=False).logits[:, -2:]
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("helper", ["lookup", "other"])
def test_drafts_go_on_from_a_cache(model, helper):
    """transformers feeds the cached tokens a second time; one new token shows it where the recurrence forgets fast."""
    options = {"prompt_lookup_num_tokens": 3} if helper == "lookup" else {"assistant_model": build("delta-net", seed=5)}
    cache = KimiCache(model.config)
    first = greedy(model, ids(1, 4).repeat(1, 3), past_key_values=cache)
    for new in (1, NEW):
        prompt = torch.cat([first, ids(1, 3, seed=new)], dim=1)
        first = greedy(model, prompt, new, past_key_values=cache, **options)
        assert torch.equal(first, by_hand(model, prompt, new))
        assert cache.get_seq_length() == first.shape[1] - 1


def test_drafts_that_cannot_go_on_say_so(k3):
    prompt, cache = ids(1), KimiCache(k3.config)
    greedy(k3, prompt[:, :6], 1, past_key_values=cache)
    new, mask = prompt[:, 6:], torch.ones_like(prompt)
    with pytest.raises(CacheError, match="cover the whole sequence"):
        greedy(k3, new, past_key_values=cache, attention_mask=mask, prompt_lookup_num_tokens=3)
    assert torch.equal(
        greedy(k3, new, past_key_values=cache, attention_mask=mask)[:, -NEW:], by_hand(k3, prompt)[:, -NEW:]
    )
    embeds = k3.get_input_embeddings()(prompt).detach()
    with pytest.raises(CacheError, match="drop inputs_embeds"):
        k3.generate(prompt, inputs_embeds=embeds, max_new_tokens=NEW, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 3}])
def test_nothing_new_for_the_cache_is_refused(k3, options):
    prompt, cache = ids(1), KimiCache(k3.config)
    greedy(k3, prompt, 1, past_key_values=cache)
    for shorter in (prompt, prompt[:, :6]):
        with pytest.raises(CacheError, match="none to go on from"):
            greedy(k3, shorter, 1, past_key_values=cache, **options)
    assert cache.get_seq_length() == prompt.shape[1]


@torch.no_grad()
def test_hooks_of_the_latent_expansion_see_latents():
    """The absorbed form would hand them the weight: a vector they add would be added to that."""
    model, prompt = build("kimi-linear"), ids(1, 40)
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
            module.kv_b_proj.register_forward_hook(lambda _, given, out: out + 0.1)
    expected, cache = model(prompt, use_cache=False).logits, KimiCache(model.config)
    parts = [model(part, past_key_values=cache).logits for part in (prompt[:, :38], prompt[:, 38:39], prompt[:, 39:])]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-5)
