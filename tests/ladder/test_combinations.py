"""Every mixer x feed-forward x residual x positions builds, trains a step, and generates with its cache what it
generates without."""

import itertools

import pytest
import torch

from kimi_hf import census

from .models import FEED_FORWARDS, MIXERS, POSITIONS, RESIDUALS, tiny_model, tokens

# Takes no gradient by definition: the router's bias only selects, and the first mixer has nothing below to choose from.
WITHOUT_GRADIENT = ("e_score_correction_bias", "layers.0.self_attention_res_")


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("feed_forward", FEED_FORWARDS)
def test_every_combination_trains_and_generates(mixer, feed_forward):
    for residual, positions in itertools.product(RESIDUALS, POSITIONS):
        model = tiny_model(mixer=mixer, feed_forward=feed_forward, residual=residual, positions=positions)
        label = f"{residual}, {positions}"
        stored = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
        assert census(model.config).total == stored, label
        ids = tokens(8)
        before = model(ids, labels=ids).loss
        before.backward()
        for name, parameter in model.named_parameters():
            if not any(part in name for part in WITHOUT_GRADIENT):
                assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), f"{label}: {name}"
        torch.optim.SGD(model.parameters(), lr=1e-5).step()  # small: the weights are spread wide
        with torch.no_grad():
            assert model(ids, labels=ids).loss < before, label
        options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones(2, 9), "pad_token_id": 0}
        with_cache = model.generate(ids[:2], **options)
        assert torch.equal(with_cache, model.generate(ids[:2], use_cache=False, **options)), label


def test_parts_may_differ_from_layer_to_layer():
    model = tiny_model(
        mixer=list(MIXERS), num_hidden_layers=6, feed_forward=list(FEED_FORWARDS), residual="full_attn_res"
    )
    kinds = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert len(set(kinds)) == 6
    experts = [layer.feed_forward for layer in model.model.layers if layer.feed_forward_name == "block_sparse_moe"]
    assert [block.routed_expert_down_proj is None for block in experts] == [True, False]
    assert census(model.config).total == sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    ids = tokens()
    cached = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(cached, model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False))
