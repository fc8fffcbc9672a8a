"""Block by block: each mixer, feed-forward and depth read alone, its stored input in, its stored output out.

The only comparison that sees small mistakes; depth and routing hide them from whole-model logits.
"""

import pytest
import torch

from kimi_hf import KimiCache
from kimi_hf.modeling.cache import GrowingLayer
from kimi_hf.modeling.residual import Stream

from .golden import BLOCK, K3, KIMI_LINEAR, assert_close, golden, golden_model, masks_for

LAYERS = {K3: 13, KIMI_LINEAR: 8}
CASES = [(case, layer) for case, count in LAYERS.items() for layer in range(count)]


def _detail(case, name):
    return golden(f"{case}/golden_detail.safetensors")[name]


@pytest.mark.parametrize(("case", "layer"), CASES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_mixer_and_its_state(case, layer, attention):
    model = golden_model(case, attention)
    block, hidden = model.model.layers[layer], _detail(case, f"layer{layer}.attn_in")
    cache = KimiCache(model.config)
    out, _ = block.self_attn(block.input_layernorm(hidden), masks_for(model.config, hidden), cache)
    assert_close(out, _detail(case, f"layer{layer}.attn_out"), BLOCK, "mixer output")
    held = cache.layers[layer]
    if isinstance(held, GrowingLayer):
        _check_latent(case, layer, block.self_attn, held)
    else:
        assert_close(held.recurrent_states[0], _detail(case, f"layer{layer}.kda_state"), BLOCK, "state")
        for name, window in zip("qkv", held.conv_states[0].chunk(3, dim=1), strict=True):
            assert_close(window, _detail(case, f"layer{layer}.conv_{name}"), BLOCK, f"convolution window {name}")


def _check_latent(case, layer, mixer, held):
    """The cached latent, expanded, gives the stored keys and values; nothing else is cached."""
    assert held.keys.shape[1:] == (1, 7, mixer.rank) and held.values.shape[1:] == (1, 7, mixer.rope)
    expanded = mixer.kv_b_proj(held.keys[:, 0]).unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2)
    key, value = expanded.split([mixer.nope, mixer.v_head_dim], dim=-1)
    key = torch.cat([key, held.values.expand(-1, mixer.num_heads, -1, -1)], dim=-1)
    assert_close(key, _detail(case, f"layer{layer}.mla_key"), BLOCK, "keys")
    assert_close(value, _detail(case, f"layer{layer}.mla_value"), BLOCK, "values")


@pytest.mark.parametrize(("case", "layer"), CASES)
def test_feed_forward_and_routing(case, layer):
    block = golden_model(case).model.layers[layer]
    hidden = block.post_attention_layernorm(_detail(case, f"layer{layer}.mlp_in"))
    assert_close(block.feed_forward(hidden), _detail(case, f"layer{layer}.mlp_out"), BLOCK, "feed-forward")
    if layer == 0:
        assert block.feed_forward_name == "mlp"
        return
    _, weights, experts = block.block_sparse_moe.gate(hidden[0])
    experts, order = experts.sort(dim=1)
    assert torch.equal(experts, _detail(case, f"layer{layer}.router_experts"))
    assert_close(weights.gather(1, order), _detail(case, f"layer{layer}.router_weights"), BLOCK, "router weights")


@pytest.mark.parametrize("case", LAYERS)
def test_residual_stream_reads_writes_and_seals(case):
    """Every read of the stream, fed with the stored outputs of the layers below, gives the stored next input."""
    model = golden_model(case).model
    stream = Stream(model.embed_tokens(_detail(case, "input_ids")))
    for i, layer in enumerate(model.layers):
        hidden, stream = layer.residual.read_mixer(layer, stream)
        assert_close(hidden, _detail(case, f"layer{i}.attn_in"), BLOCK, f"layer {i}, mixer input")
        stream = stream.write(_detail(case, f"layer{i}.attn_out"))
        hidden, stream = layer.residual.read_feed_forward(layer, stream)
        assert_close(hidden, _detail(case, f"layer{i}.mlp_in"), BLOCK, f"layer {i}, feed-forward input")
        stream = stream.write(_detail(case, f"layer{i}.mlp_out"))
        assert_close(stream.prefix, _detail(case, f"layer{i}.prefix"), BLOCK, f"layer {i}, open block")
    last = model.residual.read_output(model, stream)
    if case == K3:
        sealed = torch.stack(stream.bank[1:], dim=2)[0]
        assert_close(sealed, _detail(case, "block_residual"), BLOCK, "sealed blocks")
        assert_close(last, _detail(case, "final_norm_in"), BLOCK, "final read")
    else:
        assert not stream.bank
    assert_close(model.norm(last), _detail(case, "last_hidden_state"), BLOCK, "final norm")


@pytest.mark.parametrize("case", LAYERS)
def test_head(case):
    model = golden_model(case)
    assert_close(model.lm_head(_detail(case, "last_hidden_state")), _detail(case, "logits"), BLOCK, "logits")
