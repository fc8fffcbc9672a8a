"""Router balance: both rules even out a skewed router; padding, evaluation and checkpointing do not disturb them."""

import pytest
import torch

from kimi_hf.errors import ConfigError
from kimi_hf.training import RouterBalanceCallback

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
