"""`kimi-hf make-tiny`: a random checkpoint with a real configuration's shape, in the released layout.

Every switch of the configuration stays (layer pattern, gates, latent experts, AttnRes, vision), every size shrinks;
or, with `--keep-sizes` and `--set`, a checkpoint of any size, for measuring storage.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kimi_hf.checkpoint.geometry import TextGeometry, kda_layers, load_config, text_section
from kimi_hf.checkpoint.layout import TensorSpec, parse_layer, released_layout
from kimi_hf.conversion.configs import dense_config, packed_config, to_json
from kimi_hf.conversion.convert import DEFAULT_SHARD, add_output_arguments
from kimi_hf.conversion.recipes import Random
from kimi_hf.conversion.writer import plan_shards, write_folder
from kimi_hf.errors import ConfigError

TEXT_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "attn_res_block_size": 3,
    "max_position_embeddings": 4096,
    "model_max_length": 4096,
}
LINEAR_SIZES = {"num_heads": 4, "head_dim": 16}
VISION_SIZES = {
    "vt_hidden_size": 32,
    "vt_num_hidden_layers": 2,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 48,
    "vt_intermediate_size": 48,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "mm_hidden_size": 32,
    "text_hidden_size": 64,
}
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "media_placeholder_token_id": 3}
# Random E2M1 codes have a root mean square of 2.93; 2^(119..121 - 127) brings it to about 0.02.
SCALE_BYTES = (119, 121)


def shrink_config(config: Mapping[str, Any], num_layers: int | None = None) -> dict[str, Any]:
    """The configuration with tiny sizes; fields it does not have stay absent, and null ones null.

    Args:
        num_layers: None keeps 9, or fewer if there are fewer: two periods of four and the two last layers' pattern.
    Raises: ConfigError for less than one layer.
    """
    if num_layers is not None and num_layers < 1:
        raise ConfigError(f"num_layers is {num_layers}; expected at least 1")
    result = copy.deepcopy(dict(config))
    text = text_section(result)
    _shrink(text, TEXT_SIZES)
    count = num_layers or min(9, text.get("num_hidden_layers", 9))
    _shrink_layers(text, count)
    if isinstance(result.get("vision_config"), dict):
        _shrink(result["vision_config"], VISION_SIZES)
    for section in (result, text):
        for name, value in TOKEN_IDS.items():
            if section.get(name) is not None:
                section[name] = value
    return result


def _shrink(section: dict[str, Any], sizes: Mapping[str, int]) -> None:
    for name, value in sizes.items():
        if section.get(name):
            section[name] = min(value, section[name])


def _shrink_layers(text: dict[str, Any], count: int) -> None:
    """The first layers' pattern, with the last layer's kind at the end."""
    layers = text.get("num_hidden_layers", count)
    kda = kda_layers(text)
    linear = dict(text.get("linear_attn_config") or {})
    _shrink(linear, LINEAR_SIZES)
    kept = [*range(count - 1), layers - 1] if count < layers else list(range(layers))
    text["num_hidden_layers"] = len(kept)
    linear["kda_layers"] = [at + 1 for at, layer in enumerate(kept) if layer in kda]
    linear["full_attn_layers"] = [at + 1 for at, layer in enumerate(kept) if layer not in kda]
    text["linear_attn_config"] = linear


def set_fields(config: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Apply `text_config.num_experts=64` style settings; the value is JSON, else a string.

    Raises: ConfigError for a setting without `=`, or a path through something that is no object.
    """
    for setting in settings:
        path, equals, value = setting.partition("=")
        *parents, name = path.split(".")
        section: Any = config
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if not equals or not isinstance(section, dict):
            raise ConfigError(f"--set {setting!r}: expected FIELD=VALUE, e.g. text_config.num_experts=64")
        try:
            section[name] = json.loads(value)
        except ValueError:
            section[name] = value
    return config


def random_recipes(config: Mapping[str, Any], seed: int) -> Iterator[Random]:
    """Seeded random tensors of the configuration's layout, distributed as the reference initialises a model.

    Norm weights 1; linear layers, embeddings and the router normal with initializer_range; A_log the log of U(1, 16)
    (zero tail); dt_bias uniform between the inverse softplus of 1e-3 and of 0.1; convolutions uniform within
    1/sqrt(width); correction bias small and not zero, so that ignoring it shows.
    """
    text = TextGeometry.from_config(config)
    std = text_section(config).get("initializer_range", 0.02)
    for spec in released_layout(config):
        yield Random(spec, *_distribution(spec, text, std), seed=seed, zero_from=_tail(spec, text))


def _distribution(spec: TensorSpec, text: TextGeometry, std: float) -> tuple[str, float, float]:
    name = spec.name
    if name.endswith("weight_packed"):
        return "bytes", 0, 255
    if name.endswith("weight_scale"):
        return "bytes", *SCALE_BYTES
    if name.endswith(("norm.weight", "norm0.weight", "norm1.weight")):
        return "constant", 1.0, 1.0
    if name.endswith("A_log"):
        return "log_of_uniform", 1.0, 16.0
    if name.endswith("dt_bias"):
        return "uniform", -6.907, -2.252
    if name.endswith("conv1d.weight"):
        return "uniform", -(text.conv_width**-0.5), text.conv_width**-0.5
    if name.endswith("e_score_correction_bias"):
        return "normal", 0.0, 0.01
    return ("constant", 0.0, 0.0) if name.endswith(".bias") else ("normal", 0.0, std)


def _tail(spec: TensorSpec, text: TextGeometry) -> int | None:
    at = parse_layer(spec.name)
    return text.kda_heads if at is not None and at.rest == "self_attn.A_log" and len(spec.shape) == 1 else None


def make_tiny(
    config: Mapping[str, Any],
    out: str | Path,
    *,
    seed: int = 0,
    max_shard_bytes: int | None = None,
    verify: bool = True,
) -> Path:
    """Write a random checkpoint of `config`, as it is, to the new folder `out`; see `shrink_config` for small ones.

    Raises: ConfigError for an impossible configuration, CheckpointError as `write_folder`.
    """
    shards = plan_shards(random_recipes(config, seed), max_shard_bytes or DEFAULT_SHARD)
    return write_folder(out, shards, {"config.json": to_json(config)}, verify=verify, label="make-tiny")


def read_config_argument(text: str) -> dict[str, Any]:
    """A checkpoint folder, a JSON file, or the name of a preset ("kimi-k3")."""
    if Path(text).exists():
        return load_config(text)
    from kimi_hf.configuration import preset

    return preset(text).to_dict()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="checkpoint folder, config.json, or preset name (kimi-k3, kimi-linear-48b-a3b)")
    add_output_arguments(parser)
    parser.add_argument("--num-layers", type=int, metavar="N", help="layers of the tiny model (default 9)")
    parser.add_argument("--experts", choices=("as-config", "packed", "plain"), default="as-config")
    parser.add_argument("--keep-sizes", action="store_true", help="do not shrink; change sizes with --set alone")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a config field")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    config = read_config_argument(args.config)
    if not args.keep_sizes:
        config = shrink_config(config, args.num_layers)
    config = set_fields(config, args.set)
    if args.experts != "as-config":
        config = packed_config(config) if args.experts == "packed" else dense_config(config)
    make_tiny(config, args.out, seed=args.seed, max_shard_bytes=args.max_shard_size, verify=not args.no_verify)
    print(f"wrote {args.out}")
    return 0
