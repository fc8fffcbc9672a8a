"""The released models at full size, without weights: they build, and hold exactly the tensors of the release."""

import json
import re

import pytest
import torch

import kimi_hf
from kimi_hf import KimiK3ForConditionalGeneration, KimiLinearForCausalLM, census, preset
from kimi_hf.modeling.modeling_kimi_linear import FLOAT32_NAMES

from ..conftest import fixture_path

FUSED = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", None)}


@pytest.fixture(scope="module")
def k3():
    with torch.device("meta"):
        return KimiK3ForConditionalGeneration(preset("kimi-k3"))


def _tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_k3_builds_on_the_meta_device_with_as_many_parameters_as_counted(k3):
    assert len(k3.language_model.model.layers) == 93
    padding = 69 * (128 - 96)  # A_log is stored with 128 entries for 96 heads
    assert sum(x.numel() for x in _tensors(k3).values()) == census(k3.config).total - padding == 2_779_931_834_976


def test_k3_holds_the_released_tensors_and_no_other(k3):
    """Every pattern of the release, expanded, is one of our tensors or a slice of one; and nothing else is there."""
    ours, seen, counted = _tensors(k3), set(), 0
    for row in json.loads(fixture_path("released/kimi_k3_tensors.json").read_text()):
        counted += row["count"]
        found = re.search(r"\.experts\.\{E\}\.(w[123])\.(weight_packed|weight_scale)$", row["pattern"])
        pattern = row["pattern"]
        if found:
            pattern = pattern.replace(found[0], f".experts.{FUSED[found[1]][0]}")
        names = [name for name in _expand(pattern, ours) if _is_of_kind(k3, name, row["layers"])]
        per_layer = 896 if found else 1
        assert len(names) * per_layer == row["count"], row["pattern"]
        for name in names:
            assert _fits(tuple(ours[name].shape), row, found), f"{name} {tuple(ours[name].shape)} against {row}"
            keeps = any(part in name.split(".") for part in FLOAT32_NAMES)
            assert keeps == (row["dtype"] == "F32"), name
        seen.update(names)
    assert seen == ours.keys()
    assert counted == 497_220


def _expand(pattern, names):
    exact = re.compile(re.escape(pattern).replace(r"\{L\}", r"\d+").replace(r"\{B\}", r"\d+"))
    return [name for name in names if exact.fullmatch(name)]


def _is_of_kind(model, name, layers):
    """Two kinds of mixer share the names g_proj and o_proj; the release lists them apart."""
    number = re.search(r"\.self_attn\.", name) and int(re.search(r"layers\.(\d+)\.", name)[1])
    if number is None:
        return True
    kind = model.config.text_config.layer_types[number].split("_")[0]
    return layers.startswith({"linear": "kda", "full": "full attention"}[kind])


def _fits(shape, row, expert):
    rows, *columns = row["shape"]
    if not expert:
        return shape == tuple(row["shape"]) or (row["pattern"].endswith("A_log") and shape == (96,))
    columns = columns[0] * (2 if expert[2] == "weight_packed" else 32)
    return shape == (896, rows * (1 if expert[1] == "w2" else 2), columns)


def test_k3_layers_are_the_ones_of_the_release(k3):
    layers = k3.language_model.model.layers
    latent = [i for i, layer in enumerate(layers) if type(layer.self_attn).__name__ == "MultiHeadLatentAttention"]
    assert latent == [*range(3, 92, 4), 92]
    assert [i for i, layer in enumerate(layers) if layer.feed_forward_name == "mlp"] == [0]
    assert [i for i, layer in enumerate(layers) if layer.residual.seals] == [*range(0, 85, 12)]


def test_text_of_k3_and_kimi_linear_build_too():
    with torch.device("meta"):
        for name, total in (("kimi-k3", 2_779_484_478_208 - 2208), ("kimi-linear-48b-a3b", 49_122_681_728)):
            model = KimiLinearForCausalLM(preset(name).get_text_config())
            assert sum(x.numel() for x in _tensors(model).values()) == total


def test_mixers_at_full_width_cache_what_the_census_counts(k3):
    text, cache = k3.language_model.model, kimi_hf.KimiCache(k3.config)
    with torch.no_grad():
        hidden = text.embed_tokens(torch.zeros(1, 1, dtype=torch.long, device="meta"))
        for layer in (*text.layers[:4], text.layers[92]):
            out, _ = layer.self_attn(layer.input_layernorm(hidden), None, cache)
            assert out.shape == (1, 1, 7168)
    for layer in (3, 92):
        assert cache.layers[layer].keys.shape == (1, 1, 1, 512) and cache.layers[layer].values.shape == (1, 1, 1, 64)
    for layer in range(3):
        assert cache.layers[layer].recurrent_states[0].shape == (1, 96, 128, 128)
        assert cache.layers[layer].conv_states[0].shape == (1, 3 * 96 * 128, 4)
