"""Edits of config.json that go with edits of a checkpoint; all return a new dict in the released schema."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_hf.checkpoint.geometry import TextGeometry, kda_layers, quantization_section, text_section
from kimi_hf.configuration.quantization import released_block
from kimi_hf.errors import ConfigError

TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")


def to_json(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def dense_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without quantization_config, for plain experts."""
    config = copy.deepcopy(dict(config))
    config.pop("quantization_config", None)
    text_section(config).pop("quantization_config", None)
    return config


def packed_config(config: Mapping[str, Any], like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """With the released quantization_config (that of `like`, if it has one), where the release keeps it."""
    if quantization_section(config):
        return copy.deepcopy(dict(config))
    if like is not None and quantization_section(like):
        for holder, template in ((text_section(config), text_section(like)), (config, like)):
            if template.get("quantization_config"):
                result = copy.deepcopy(dict(config))
                target = text_section(result) if holder is not config else result
                target["quantization_config"] = copy.deepcopy(template["quantization_config"])
                return result
    result = copy.deepcopy(dict(config))
    text_section(result)["quantization_config"] = released_block()
    return result


def text_only_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flat `kimi_linear` config of a composite one."""
    if not isinstance(config.get("text_config"), Mapping):
        return copy.deepcopy(dict(config))
    text = copy.deepcopy(dict(config["text_config"]))
    block = quantization_section(config)
    if block:
        text["quantization_config"] = copy.deepcopy(dict(block))
    for field in ("dtype", "torch_dtype"):
        if field in config:
            text.setdefault(field, config[field])
    text.update(model_type="kimi_linear", architectures=["KimiLinearForCausalLM"])
    return text


def layers_config(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """With only the chosen 0-based layers, in that order; the 1-based lists and dense-layer fields follow.

    Raises: ConfigError for a layer that does not exist or is repeated, or when the kept pattern of dense and sparse
        layers cannot be written with first_k_dense_replace and moe_layer_freq.
    """
    text = TextGeometry.from_config(config)
    wrong = [layer for layer in layers if not 0 <= layer < text.num_layers]
    if not layers or wrong or len(set(layers)) != len(layers):
        raise ConfigError(
            f"layers {list(layers)}: choose distinct layers from 0 to {text.num_layers - 1}"
            + (f"; {wrong[0]} does not exist" if wrong else "")
        )
    result = copy.deepcopy(dict(config))
    section = text_section(result)
    kda = kda_layers(section)
    section["num_hidden_layers"] = len(layers)
    linear = dict(section.get("linear_attn_config") or {})
    linear["kda_layers"] = [at + 1 for at, layer in enumerate(layers) if layer in kda]
    linear["full_attn_layers"] = [at + 1 for at, layer in enumerate(layers) if layer not in kda]
    section["linear_attn_config"] = linear
    section.pop("layer_types", None)
    if text.num_experts:
        sparse = [text.is_moe(layer) for layer in layers]
        section["first_k_dense_replace"], section["moe_layer_freq"] = _dense_fields(sparse, text.moe_freq)
    return result


def _dense_fields(sparse: Sequence[bool], freq: int) -> tuple[int, int]:
    first = next((at for at, moe in enumerate(sparse) if moe), len(sparse))
    for candidate in (1, freq):
        if all(moe == (at >= first and at % candidate == 0) for at, moe in enumerate(sparse)):
            return first, candidate
    raise ConfigError(
        f"the chosen layers are dense and sparse in the order {['dense', 'sparse']}: {[int(m) for m in sparse]}, which "
        f"first_k_dense_replace and moe_layer_freq cannot say; keep dense layers in front"
    )


def experts_config(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """With `count` routed experts; the number chosen per token shrinks along when it must.

    Raises: ConfigError if the router groups experts.
    """
    result = copy.deepcopy(dict(config))
    section = text_section(result)
    if (section.get("num_expert_group") or 1) > 1:
        raise ConfigError(
            f"num_expert_group is {section['num_expert_group']}: choosing experts would tear the router's groups; "
            f"keep all experts"
        )
    section["num_experts"] = count
    section["num_experts_per_token"] = min(section.get("num_experts_per_token") or count, count)
    return result


def vocabulary_config(config: Mapping[str, Any], rows: Sequence[int | None]) -> tuple[dict[str, Any], list[str]]:
    """With `len(rows)` tokens, row i being old token `rows[i]` (None: a new one); special ids follow their tokens.

    Returns: the config, and the fields that were set to null because their token is gone.
    """
    place = {row: at for at, row in enumerate(rows) if row is not None}
    result, lost = copy.deepcopy(dict(config)), []
    sections = [result] if text_section(result) is result else [result, text_section(result)]
    text_section(result)["vocab_size"] = len(rows)
    for section in sections:
        for name in TOKEN_FIELDS:
            value = section.get(name)
            if isinstance(value, list):
                section[name] = [place[one] for one in value if one in place] or None
            elif value is not None:
                section[name] = place.get(value)
            if value is not None and section[name] is None and name not in lost:
                lost.append(name)
    return result, lost


def side_files(folder: Path, skip: Sequence[str] = ()) -> dict[str, Path]:
    """Tokenizer, processor, code, licence and other small files of a checkpoint folder, to be copied along."""
    endings = {".json", ".py", ".model", ".txt", ".jinja", ".md", ".tiktoken"}
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and (path.suffix in endings or path.name.startswith(("LICENSE", "NOTICE")))
        and path.name != "config.json"
        and not path.name.endswith(".index.json")
        and path.name not in skip
    }
