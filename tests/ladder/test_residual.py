"""Full attention residuals against their definition, written out: every sub-layer reads all outputs below it."""

import torch

from .models import tiny_model, tokens


def _read(sources, norm, query, eps):
    """h = sum_j softmax_j(rms_norm(v_j) * norm . query) v_j over sources (B, T, D)."""
    values = torch.stack(sources)  # [M, B, T, D]
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    scores = keys @ (norm.weight * query.weight[0])
    return (torch.softmax(scores, dim=0)[..., None] * values).sum(0)


def test_full_attn_res_attends_over_every_sub_layer():
    model = tiny_model(mixer="delta_net", feed_forward="swiglu", residual="full_attn_res", num_hidden_layers=3)
    ids, eps = tokens(), model.config.norm_eps
    base = model.model
    sources = [base.embed_tokens(ids) + base.embed_positions.weight[: ids.shape[1]]]
    for layer in base.layers:
        hidden = _read(sources, layer.self_attention_res_norm, layer.self_attention_res_proj, eps)
        sources.append(layer.self_attn(layer.input_layernorm(hidden))[0])
        hidden = _read(sources, layer.mlp_res_norm, layer.mlp_res_proj, eps)
        sources.append(layer.mlp(layer.post_attention_layernorm(hidden)))
    last = base.norm(_read(sources, base.output_attn_res_norm, base.output_attn_res_proj, eps))
    torch.testing.assert_close(model(ids).logits, model.lm_head(last), rtol=1e-4, atol=1e-5)


def test_one_block_of_all_layers_differs_from_full_reads():
    """The three residuals are three models, not three names of one."""
    ids = tokens()
    found = [
        tiny_model(residual=residual, num_hidden_layers=3)(ids).logits
        for residual in ("sum", "block_attn_res", "full_attn_res")
    ]
    assert not torch.allclose(found[1], found[2], atol=1e-3) and not torch.allclose(found[0], found[1], atol=1e-3)


def test_what_nothing_reads_stays_frozen_when_loaded(tmp_path):
    """Else an optimiser's state does not fit the loaded model, and training cannot be resumed."""
    model = tiny_model(residual="block_attn_res")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    trained = [{name for name, p in each.named_parameters() if p.requires_grad} for each in (model, again)]
    assert trained[0] == trained[1] and "model.layers.0.self_attention_res_proj.weight" not in trained[0]
