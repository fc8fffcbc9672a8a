"""The layout computed from a config against the released list, the published totals, and the fixtures' headers."""

import json
import math
import re
from collections import Counter

import pytest

from kimi_hf.checkpoint.geometry import (
    TEXT_DEFAULTS,
    VISION_DEFAULTS,
    TextGeometry,
    VisionGeometry,
    load_config,
)
from kimi_hf.checkpoint.layout import (
    parse_expert,
    parse_layer,
    part_of,
    released_layout,
)
from kimi_hf.checkpoint.shards import open_checkpoint
from kimi_hf.configuration import KimiK3VisionConfig, KimiLinearConfig, preset
from kimi_hf.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def k3():
    from tests.conftest import fixture_path

    config = json.loads(fixture_path("released/kimi_k3_config.json").read_text())
    return config, list(released_layout(config))


def test_k3_totals(k3):
    _, layout = k3
    assert len(layout) == len({spec.name for spec in layout}) == 497_220
    assert sum(spec.nbytes for spec in layout) == 1_560_860_324_864
    assert Counter(spec.dtype for spec in layout) == {"U8": 494_592, "BF16": 2_122, "F32": 506}
    text = [spec for spec in layout if not spec.name.startswith(("vision_tower.", "mm_projector."))]
    assert sum(spec.name.endswith("weight_packed") for spec in text) == 247_296
    assert sum(spec.name.endswith("weight_scale") for spec in text) == 247_296


def test_k3_patterns(k3, goldens):
    """Every name pattern, dtype, shape and count of the released checkpoint."""
    _, layout = k3
    found: Counter = Counter()
    for spec in layout:
        pattern = re.sub(r"layers\.\d+", "layers.{L}", spec.name)
        pattern = re.sub(r"\.experts\.\d+", ".experts.{E}", pattern)
        pattern = re.sub(r"blocks\.\d+", "blocks.{B}", pattern)
        found[pattern, spec.dtype, spec.shape] += 1
    expected: Counter = Counter()
    for row in json.loads(goldens("released/kimi_k3_tensors.json").read_text()):
        expected[row["pattern"], row["dtype"], tuple(row["shape"])] += row["count"]
    assert found == expected


def test_preset_gives_the_released_layout(k3):
    assert list(released_layout(preset("kimi-k3"))) == k3[1]


def test_k3_layer_kinds(k3):
    text = TextGeometry.from_config(k3[0])
    full = set(range(93)) - text.kda_layers
    assert full == {*range(3, 92, 4), 92}
    assert [layer for layer in range(93) if not text.is_moe(layer)] == [0]


def test_kimi_linear_48b_parameters(goldens):
    config = json.loads(goldens("released/kimi_linear_48b_config.json").read_text())
    layout = list(released_layout(config))
    assert sum(math.prod(spec.shape) for spec in layout) == 49_122_681_728
    assert not any(spec.name.startswith("language_model.") for spec in layout)
    assert {spec.shape for spec in layout if spec.name.endswith("A_log")} == {(1, 1, 32, 1)}


@pytest.mark.parametrize(
    ("case", "vision"),
    [
        ("k3_text_tiny", False),
        ("k3_mxfp4_tiny", False),
        ("k3_release_tiny", True),
        ("k3_multimodal_tiny", True),
        ("kimi_linear_tiny", False),
    ],
)
def test_fixture_headers(goldens, case, vision):
    folder = goldens(f"{case}/config.json").parent
    found = {entry.name: entry.shape for entry in open_checkpoint(folder).entries.values()}
    assert found == {spec.name: spec.shape for spec in released_layout(load_config(folder), vision=vision)}


def test_released_fixture_dtypes(goldens):
    folder = goldens("k3_release_tiny/config.json").parent
    found = {(entry.name, entry.dtype) for entry in open_checkpoint(folder).entries.values()}
    assert found == {(spec.name, spec.dtype) for spec in released_layout(load_config(folder))}


def test_expert_layouts_hold_the_same_weights(goldens):
    config = load_config(goldens("k3_release_tiny/config.json").parent)

    def size(experts, endings):
        specs = [s for s in released_layout(config, experts=experts) if ".experts." in s.name]
        return sum(math.prod(s.shape) for s in specs if s.name.endswith(endings))

    plain = size("plain", "weight")
    assert plain == size("fused", "proj")
    assert plain == 2 * size("packed", "packed") == 2 * size("fused_packed", "packed")
    assert plain == 32 * size("packed", "scale") == 32 * size("fused_packed", "scale")


def test_prefix_head_and_vision_switches(goldens):
    config = load_config(goldens("k3_release_tiny/config.json").parent)
    names = {spec.name for spec in released_layout(config, prefix="", head=False, vision=False)}
    assert "model.norm.weight" in names and "lm_head.weight" not in names
    assert not any(name.startswith(("language_model.", "vision_tower.")) for name in names)


def test_tied_embeddings_have_no_head():
    config = {"model_type": "kimi_linear", "num_hidden_layers": 4, "tie_word_embeddings": True}
    assert "lm_head.weight" not in {spec.name for spec in released_layout(config)}


def test_absent_layer_lists_follow_the_released_pattern():
    for layers, full in ((12, {3, 7, 11}), (10, {3, 7, 9}), (93, {*range(3, 92, 4), 92})):
        text = TextGeometry.from_config({"num_hidden_layers": layers})
        assert set(range(layers)) - text.kda_layers == full


def test_defaults_are_the_config_classes():
    text, vision = KimiLinearConfig(), KimiK3VisionConfig()
    assert {name: getattr(text, name) for name in TEXT_DEFAULTS} == TEXT_DEFAULTS
    assert {name: getattr(vision, name) for name in VISION_DEFAULTS} == VISION_DEFAULTS
    assert TextGeometry.from_config({}) == TextGeometry.from_config(text.to_dict())
    assert VisionGeometry.from_config({"vision_config": {}, "text_config": {}}).hidden == 1024


def test_native_config_fields():
    """A config.json as transformers' own Kimi-Linear class writes it."""
    native = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 5,
        "linear_head_dim": 8,
        "num_local_experts": 6,
        "moe_intermediate_size": 16,
    }
    text = TextGeometry.from_config(native)
    assert (text.kda_layers, text.kda_heads, text.kda_head_dim, text.num_experts) == ({0, 2}, 5, 8, 6)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_experts": 4, "moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"linear_attn_config": {"kda_layers": [0, 1]}}, "kda_layers"),
        ({"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2, 3]}}, "kda_layers"),
        ({"dtype": "int7"}, "dtype"),
    ],
)
def test_impossible_configs_name_the_field(change, field):
    with pytest.raises(ConfigError, match=field):
        list(released_layout({"num_hidden_layers": 3, **change}))


def test_packing_needs_whole_groups():
    config = {"num_hidden_layers": 2, "num_experts": 2, "moe_intermediate_size": 40, "hidden_size": 64}
    with pytest.raises(ConfigError, match="multiples of 32"):
        list(released_layout(config, experts="packed"))


def test_config_file_errors(tmp_path):
    with pytest.raises(CheckpointError, match="config.json is absent"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="list"):
        load_config(tmp_path)


def test_names_taken_apart():
    at = parse_layer("language_model.model.layers.12.block_sparse_moe.experts.7.w2.weight_scale")
    assert at[:2] == ("language_model.model.", 12)
    assert parse_expert(at.rest) == (7, "w2", "weight_scale")
    assert parse_layer("vision_tower.encoder.blocks.0.wo.weight") is None


def test_every_tensor_has_a_part(k3):
    text = TextGeometry.from_config(k3[0])
    sizes: Counter = Counter()
    for spec in k3[1]:
        sizes[part_of(spec.name, text)] += spec.nbytes
    assert "other" not in sizes
    assert sizes["routed experts"] == 1_446_456_066_048
    assert sum(sizes.values()) - sizes["routed experts"] == 114_404_258_816
