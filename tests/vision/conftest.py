"""The tiny multimodal checkpoint, cut into its parts."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from kimi_hf.configuration.configuration_kimi_k3_vision import KimiK3VisionConfig
from kimi_hf.modeling.vision import KimiK3PatchMergerV2, KimiK3VisionModel

from ..conftest import fixture_path


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def load_case(folder: str, shards: list[str]) -> SimpleNamespace:
    config = KimiK3VisionConfig(**json.loads(fixture_path(f"{folder}/config.json").read_text())["vision_config"])
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors.update(load_file(fixture_path(f"{folder}/{shard}")))
    tower, projector = KimiK3VisionModel(config).eval(), KimiK3PatchMergerV2(config).eval()
    tower.load_state_dict(part(tensors, "vision_tower."))
    projector.load_state_dict(part(tensors, "mm_projector."))
    embed = tensors["language_model.model.embed_tokens.weight"]
    return SimpleNamespace(config=config, tower=tower, projector=projector, embed=embed)


@pytest.fixture
def tiny() -> SimpleNamespace:
    """`k3_multimodal_tiny`: config, tower, projector, embed, golden, detail."""
    case = load_case("k3_multimodal_tiny", ["model.safetensors"])
    case.golden = load_file(fixture_path("k3_multimodal_tiny/golden.safetensors"))
    case.detail = load_file(fixture_path("k3_multimodal_tiny/golden_detail.safetensors"))
    return case
