"""Router balance: both rules even out a skewed router; padding, evaluation and checkpointing do not disturb them."""

import numpy as np
import pytest
import torch

from kimi_hf.errors import ConfigError
from kimi_hf.modeling.moe import KimiRouter
from kimi_hf.training import RouterBalanceCallback, parameter_groups

from .models import tiny_model, tokens


def skewed_model():
    """Two experts win nearly every token."""
    model = tiny_model()
    for layer in model.model.layers[1:]:
        layer.block_sparse_moe.gate.e_score_correction_bias[:2] = 2.0
    return model.train()


def run(callback, model, steps, seed=0):
    """Forwards over fresh tokens; the log of every step."""
    callback.attach(model)
    logs = []
    for step in range(steps):
        with torch.no_grad():
            model(input_ids=tokens(8, 64, seed=seed + step))
        logs.append(dict(callback.step()))
    callback.detach()
    return [log["router/worst_load_max_over_mean"] for log in logs]


def test_quantile_rule_balances_within_a_few_steps():
    loads = run(RouterBalanceCallback("quantile"), skewed_model(), 12)
    assert loads[0] > 3.5 and max(loads[-3:]) < 1.4


def fixed_scores(tokens_seen=2048, experts=16, width=8, bias=2.0):
    """A router in training mode and inputs of few dimensions, so that experts compete for the same tokens."""
    torch.manual_seed(0)
    config = tiny_model(num_experts=experts, hidden_size=width).config
    router = KimiRouter(config).train()
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias[:2] = bias
    return router, torch.randn(tokens_seen, width)


def by_definition(scores, bias, top_k, rule):
    """One update, in numpy, from the words: thresholds of the old bias, then the (q+1)-th largest margin per expert."""
    target = top_k * scores.shape[0] // scores.shape[1]
    ranked = -np.sort(-(scores + bias), axis=1)
    threshold = ranked[:, top_k] if rule == "quantile" else ranked[:, top_k - 1 : top_k + 1].mean(axis=1)
    new = np.sort(-(scores - threshold[:, None]), axis=0)[target]
    return new - new.mean()


def max_over_mean(scores, bias, top_k):
    chosen = np.argsort(-(scores + bias), axis=1)[:, :top_k]
    load = np.bincount(chosen.ravel(), minlength=scores.shape[1])
    return load.max() / load.mean()


@pytest.mark.parametrize("rule", ["quantile", "quantile-middle"])
def test_on_fixed_scores_the_callback_follows_the_definition_to_even_loads(rule):
    router, hidden = fixed_scores()
    callback = RouterBalanceCallback(rule)
    callback.attach(torch.nn.ModuleList([router]))
    bias, loads, expected = router.e_score_correction_bias.double().numpy().copy(), [], []
    for _ in range(12):
        logits, _, _ = router(hidden)
        scores = logits.detach().sigmoid().double().numpy()
        expected.append(max_over_mean(scores, bias, router.top_k))
        loads.append(callback.step()["router/load_max_over_mean"])
        bias = by_definition(scores, bias, router.top_k, rule)
        np.testing.assert_allclose(router.e_score_correction_bias.numpy(), bias, atol=2e-3)
    assert loads[0] == expected[0] == 8.0
    assert loads[-1] < 1.1 and expected[-1] < 1.1


def trained(callback, steps, counted):
    """Worst load over the last `counted` steps while a small model learns to guess the next id, with a usual schedule.

    One batch alone is too little to tell: 2048 tokens spread over 16 experts by chance are uneven by a fifth.
    """
    model = tiny_model(num_experts=16, num_hidden_layers=3, hidden_size=48)
    for layer in model.model.layers[1:]:
        layer.block_sparse_moe.gate.e_score_correction_bias[:2] = 2.0
    callback.attach(model.train())
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 5) * (1 - step / steps))
    generator, first = torch.Generator().manual_seed(0), None
    loads = [torch.zeros(16, dtype=torch.float64) for _ in callback.statistics]
    for step in range(steps):
        ids = torch.randint(60, (256, 1), generator=generator)
        ids = torch.cat([ids, ids * 5 + torch.randint(3, (256, 7), generator=generator).cumsum(1)], dim=1) % 60 + 4
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step >= steps - counted:
            for load, statistics in zip(loads, callback.statistics.values(), strict=True):
                load += statistics.load
        log = callback.step()
        first = log["router/worst_load_max_over_mean"] if first is None else first
    callback.detach()
    return first, max(float(load.max() / load.mean()) for load in loads)


def test_a_skewed_router_evens_out_in_training_and_stays_skewed_without():
    for rule in ("quantile", "quantile-middle"):
        first, last = trained(RouterBalanceCallback(rule), steps=40, counted=10)
        assert first > 4.0 and last < 1.2, rule
    first, last = trained(RouterBalanceCallback(update=False), steps=12, counted=3)
    assert first > 4.0 and last > 4.0


def test_sign_rule_gets_there_slowly():
    loads = run(RouterBalanceCallback("sign", rate=0.05), skewed_model(), 60)
    assert loads[0] > 3.5 and sum(loads[-10:]) / 10 < 2.0


def test_measuring_alone_changes_nothing():
    model = skewed_model()
    before = [layer.block_sparse_moe.gate.e_score_correction_bias.clone() for layer in model.model.layers[1:]]
    loads = run(RouterBalanceCallback(update=False), model, 3)
    assert min(loads) > 3.5
    after = [layer.block_sparse_moe.gate.e_score_correction_bias for layer in model.model.layers[1:]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_quantile_bias_is_the_quantile_of_margins():
    model = skewed_model()
    callback = RouterBalanceCallback()
    callback.attach(model)
    seen = []
    gate = model.model.layers[1].block_sparse_moe.gate
    gate.register_forward_hook(lambda m, a, out: seen.append(out[0].sigmoid().double()))
    with torch.no_grad():
        for seed in range(3):
            model(input_ids=tokens(8, 64, seed=seed))
    statistics = next(iter(callback.statistics.values()))
    scores = torch.cat(seen)
    bias = gate.e_score_correction_bias.double()
    threshold = (scores + bias).topk(gate.top_k + 1, dim=1).values[:, -1:]
    target = round(gate.top_k * len(scores) / scores.shape[1])
    margins = (scores - threshold).sort(dim=0, descending=True).values
    exact = -margins[target]
    torch.testing.assert_close(statistics.quantile_bias(), exact - exact.mean(), atol=4e-3, rtol=0)
    callback.detach()


def test_micro_batches_count_like_one_batch():
    one, many = skewed_model(), skewed_model()
    batch = tokens(8, 32)
    results = []
    for model, parts in ((one, [batch]), (many, batch.chunk(4))):
        callback = RouterBalanceCallback()
        callback.attach(model)
        for part in parts:
            model(input_ids=part)
        callback.step()
        results.append(model.model.layers[1].block_sparse_moe.gate.e_score_correction_bias.clone())
    torch.testing.assert_close(*results)


def test_padding_and_evaluation_are_not_counted():
    model = skewed_model()
    callback = RouterBalanceCallback()
    callback.attach(model)
    ids, mask = tokens(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :4] = 0
    model(input_ids=ids, attention_mask=mask)
    statistics = next(iter(callback.statistics.values()))
    assert float(statistics.tokens) == 16 and float(statistics.load.sum()) == 32
    model.eval()
    model(input_ids=ids)
    assert float(statistics.tokens) == 16


def test_recomputation_under_checkpointing_counts_once():
    model = skewed_model()
    model.gradient_checkpointing_enable()
    callback = RouterBalanceCallback()
    callback.attach(model)
    ids = tokens(2, 10)
    model(input_ids=ids, labels=ids).loss.backward()
    assert float(next(iter(callback.statistics.values())).tokens) == 20


def test_dense_models_are_refused():
    model = tiny_model(num_experts=None, routed_expert_hidden_size=None, latent_moe_use_norm=False)
    with pytest.raises(ConfigError, match="no routed experts"):
        RouterBalanceCallback().attach(model)
    with pytest.raises(ConfigError, match="rule must be one of"):
        RouterBalanceCallback("loss")
