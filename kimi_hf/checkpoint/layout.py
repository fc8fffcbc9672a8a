"""The released checkpoint layout, computed from a configuration: every tensor's name, dtype and shape.

Only names and numbers live here, no tensors and no model classes, so the layout of a 2.78 T parameter model is a
generator that takes a second. The same list, in its fused spelling, is what the plugin's own modules call their
parameters.

Source: kimi_k3 release, model.safetensors.index.json and the modelling files; Kimi-Linear-48B-A3B likewise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kimi_hf.checkpoint.geometry import TextGeometry, VisionGeometry
from kimi_hf.errors import ConfigError

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
EXPERT_LAYOUTS = ("packed", "plain", "fused", "fused_packed")
TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
MXFP4_GROUP = 32
FP32_SUFFIXES = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")

_LAYER = re.compile(r"^((?:language_model\.)?(?:model\.)?)layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^block_sparse_moe\.experts\.(\d+)\.(w[123])\.(weight(?:_packed|_scale)?)$")


class TensorSpec(NamedTuple):
    """Name, safetensors dtype ("BF16", "F32", "U8", ...) and shape of one stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class LayerName(NamedTuple):
    """A decoder tensor's name taken apart: prefix before `layers.`, 0-based layer, the rest."""

    prefix: str
    layer: int
    rest: str


def parse_layer(name: str) -> LayerName | None:
    """`language_model.model.layers.7.self_attn.A_log` -> (`language_model.model.`, 7, `self_attn.A_log`)."""
    found = _LAYER.match(name)
    return LayerName(found[1], int(found[2]), found[3]) if found else None


def parse_expert(rest: str) -> tuple[int, str, str] | None:
    """`block_sparse_moe.experts.5.w1.weight_packed` -> (5, "w1", "weight_packed"); None for any other tensor."""
    found = _EXPERT.match(rest)
    return (int(found[1]), found[2], found[3]) if found else None


def is_vision(name: str) -> bool:
    return name.startswith(VISION_PREFIXES)


def released_layout(
    config: Mapping[str, Any] | Any,
    *,
    experts: str | None = None,
    prefix: str | None = None,
    vision: bool | None = None,
    head: bool = True,
) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint with this configuration, in reading order.

    Args:
        config: a config.json dict (composite `kimi_k3` or flat `kimi_linear`), or a configuration object.
        experts: "packed" (MXFP4 pairs per expert), "plain" (one weight per expert matrix), "fused" (`gate_up_proj`
            (E, 2I, Z) with w1 above w3, `down_proj` (E, Z, I)), "fused_packed" (the same, each as `_packed` and
            `_scale`); None: packed if the config says `mxfp4-pack-quantized`, else plain.
        prefix: what stands before `model.` in text names; None: "language_model." for composite configs, else "".
        vision: include tower and projector; None: as the config says.
        head: include `lm_head.weight` (never there when the embeddings are tied).
    Returns: a generator of `TensorSpec`.
    Raises: ConfigError for fields that are absent or contradict each other.
    """
    text = TextGeometry.from_config(config)
    tower = VisionGeometry.from_config(config) if vision is not False else None
    if vision and tower is None:
        raise ConfigError("vision tensors were asked for but the config has no vision_config; use a kimi_k3 config")
    experts = experts or ("packed" if text.packed else "plain")
    if experts not in EXPERT_LAYOUTS:
        raise ConfigError(f"experts={experts!r} is not a layout; expected one of {', '.join(EXPERT_LAYOUTS)}")
    prefix = (TEXT_PREFIX if text.composite else "") if prefix is None else prefix
    return _all_tensors(text, tower, experts, prefix, head)


def _all_tensors(
    text: TextGeometry, tower: VisionGeometry | None, experts: str, prefix: str, head: bool
) -> Iterator[TensorSpec]:
    inner = f"{prefix}model."
    yield TensorSpec(f"{inner}embed_tokens.weight", text.dtype, (text.vocab_size, text.hidden))
    for layer in range(text.num_layers):
        yield from layer_tensors(text, layer, f"{inner}layers.{layer}.", experts)
    yield TensorSpec(f"{inner}norm.weight", text.dtype, (text.hidden,))
    if text.attn_res:
        yield TensorSpec(f"{inner}output_attn_res_norm.weight", text.dtype, (text.hidden,))
        yield TensorSpec(f"{inner}output_attn_res_proj.weight", text.dtype, (1, text.hidden))
    if head and not text.tied:
        yield TensorSpec(f"{prefix}lm_head.weight", text.dtype, (text.vocab_size, text.hidden))
    if tower is not None:
        yield from vision_tensors(tower)


def layer_tensors(text: TextGeometry, layer: int, prefix: str, experts: str) -> Iterator[TensorSpec]:
    """The tensors of decoder layer `layer` (0-based); `prefix` ends with the layer number and a dot."""
    act, width = text.dtype, (text.hidden,)
    yield TensorSpec(f"{prefix}input_layernorm.weight", act, width)
    yield TensorSpec(f"{prefix}post_attention_layernorm.weight", act, width)
    if text.attn_res:
        for read in ("self_attention_res", "mlp_res"):
            yield TensorSpec(f"{prefix}{read}_norm.weight", act, width)
            yield TensorSpec(f"{prefix}{read}_proj.weight", act, (1, text.hidden))
    mixer = _kda_tensors if layer in text.kda_layers else _mla_tensors
    for name, dtype, shape in mixer(text):
        yield TensorSpec(f"{prefix}self_attn.{name}", dtype, shape)
    if text.is_moe(layer):
        yield from _moe_tensors(text, f"{prefix}block_sparse_moe.", experts)
    else:
        yield from _glu_tensors(f"{prefix}mlp.", act, text.hidden, text.intermediate)


def _kda_tensors(text: TextGeometry) -> Iterator[TensorSpec]:
    act, hidden, heads, dim = text.dtype, text.hidden, text.kda_heads, text.kda_head_dim
    channels = heads * dim
    for name in ("q_proj", "k_proj", "v_proj"):
        yield TensorSpec(f"{name}.weight", act, (channels, hidden))
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield TensorSpec(f"{name}.weight", "F32", (channels, 1, text.conv_width))
    yield TensorSpec("A_log", "F32", text.stored_decay_shape)
    yield TensorSpec("dt_bias", "F32", (channels,))
    yield TensorSpec("f_a_proj.weight", act, (dim, hidden))
    yield TensorSpec("f_b_proj.weight", act, (channels, dim))
    yield TensorSpec("b_proj.weight", act, (heads, hidden))
    if text.full_rank_gate:
        yield TensorSpec("g_proj.weight", act, (channels, hidden))
    else:
        yield TensorSpec("g_a_proj.weight", act, (dim, hidden))
        yield TensorSpec("g_b_proj.weight", act, (channels, dim))
    yield TensorSpec("o_norm.weight", "F32", (dim,))
    yield TensorSpec("o_proj.weight", act, (hidden, channels))


def _mla_tensors(text: TextGeometry) -> Iterator[TensorSpec]:
    act, hidden, heads, rank = text.dtype, text.hidden, text.num_heads, text.kv_rank
    query = heads * (text.nope_dim + text.rope_dim)
    if text.q_rank:
        yield TensorSpec("q_a_proj.weight", act, (text.q_rank, hidden))
        yield TensorSpec("q_a_layernorm.weight", act, (text.q_rank,))
        yield TensorSpec("q_b_proj.weight", act, (query, text.q_rank))
    else:
        yield TensorSpec("q_proj.weight", act, (query, hidden))
    yield TensorSpec("kv_a_proj_with_mqa.weight", act, (rank + text.rope_dim, hidden))
    yield TensorSpec("kv_a_layernorm.weight", act, (rank,))
    yield TensorSpec("kv_b_proj.weight", act, (heads * (text.nope_dim + text.v_dim), rank))
    if text.mla_gate:
        yield TensorSpec("g_proj.weight", act, (heads * text.v_dim, hidden))
    yield TensorSpec("o_proj.weight", act, (hidden, heads * text.v_dim))


def _glu_tensors(prefix: str, dtype: str, width: int, intermediate: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}gate_proj.weight", dtype, (intermediate, width))
    yield TensorSpec(f"{prefix}up_proj.weight", dtype, (intermediate, width))
    yield TensorSpec(f"{prefix}down_proj.weight", dtype, (width, intermediate))


def _moe_tensors(text: TextGeometry, prefix: str, experts: str) -> Iterator[TensorSpec]:
    act, hidden = text.dtype, text.hidden
    yield TensorSpec(f"{prefix}gate.weight", act, (text.num_experts, hidden))
    yield TensorSpec(f"{prefix}gate.e_score_correction_bias", "F32", (text.num_experts,))
    if text.latent:
        yield TensorSpec(f"{prefix}routed_expert_down_proj.weight", act, (text.latent, hidden))
        if text.latent_norm:
            yield TensorSpec(f"{prefix}routed_expert_norm.weight", act, (text.latent,))
        yield TensorSpec(f"{prefix}routed_expert_up_proj.weight", act, (hidden, text.latent))
    if text.num_shared:
        width = text.moe_intermediate * text.num_shared
        yield from _glu_tensors(f"{prefix}shared_experts.", act, hidden, width)
    yield from expert_tensors(text, f"{prefix}experts.", experts)


def expert_tensors(text: TextGeometry, prefix: str, experts: str) -> Iterator[TensorSpec]:
    """The routed experts of one layer; `prefix` ends with `experts.`."""
    width, inter, count = text.expert_width, text.moe_intermediate, text.num_experts
    if experts.startswith("fused"):
        for name, rows, cols in (("gate_up_proj", 2 * inter, width), ("down_proj", width, inter)):
            if experts == "fused":
                yield TensorSpec(f"{prefix}{name}", text.dtype, (count, rows, cols))
            else:
                _check_group(prefix + name, cols)
                yield TensorSpec(f"{prefix}{name}_packed", "U8", (count, rows, cols // 2))
                yield TensorSpec(f"{prefix}{name}_scale", "U8", (count, rows, cols // MXFP4_GROUP))
        return
    matrices = (("w1", inter, width), ("w2", width, inter), ("w3", inter, width))
    if experts == "plain":
        rows = [(f".{name}.weight", text.dtype, (out, cols)) for name, out, cols in matrices]
    else:
        rows = []
        for name, out, cols in matrices:
            _check_group(prefix + "*." + name, cols)
            rows.append((f".{name}.weight_packed", "U8", (out, cols // 2)))
            rows.append((f".{name}.weight_scale", "U8", (out, cols // MXFP4_GROUP)))
    for expert in range(count):
        stem = f"{prefix}{expert}"
        for suffix, dtype, shape in rows:
            yield TensorSpec(stem + suffix, dtype, shape)


def _check_group(name: str, columns: int) -> None:
    if columns % MXFP4_GROUP:
        raise ConfigError(
            f"{name}: {columns} input columns cannot be packed, MXFP4 scales groups of {MXFP4_GROUP}; choose expert "
            f"sizes (moe_intermediate_size, routed_expert_hidden_size) that are multiples of {MXFP4_GROUP}"
        )


def vision_tensors(tower: VisionGeometry) -> Iterator[TensorSpec]:
    """Tower and projector; the three bias switches add the biases that the release leaves out."""
    act, width = tower.dtype, tower.hidden
    yield TensorSpec("vision_tower.patch_embed.proj.weight", act, (width, 3, tower.patch, tower.patch))
    if tower.patch_bias:
        yield TensorSpec("vision_tower.patch_embed.proj.bias", act, (width,))
    yield TensorSpec("vision_tower.patch_embed.pos_emb.weight", act, (tower.pos_height, tower.pos_width, width))
    for block in range(tower.num_layers):
        stem = f"vision_tower.encoder.blocks.{block}."
        yield TensorSpec(f"{stem}norm0.weight", act, (width,))
        yield TensorSpec(f"{stem}norm1.weight", act, (width,))
        linears = (
            ("wqkv", 3 * tower.qkv, width, tower.attn_bias),
            ("wo", width, tower.qkv, tower.attn_bias),
            ("mlp.fc0", tower.intermediate, width, tower.linear_bias),
            ("mlp.fc1", width, tower.intermediate, tower.linear_bias),
        )
        for name, out, cols, bias in linears:
            yield TensorSpec(f"{stem}{name}.weight", act, (out, cols))
            if bias:
                yield TensorSpec(f"{stem}{name}.bias", act, (out,))
    yield TensorSpec("vision_tower.encoder.final_layernorm.weight", act, (width,))
    merged = tower.mm_hidden * tower.merge
    yield TensorSpec("mm_projector.proj.0.weight", act, (merged, merged))
    yield TensorSpec("mm_projector.proj.2.weight", act, (tower.text_hidden, merged))
    yield TensorSpec("mm_projector.post_norm.weight", act, (tower.text_hidden,))


def part_of(name: str, text: TextGeometry) -> str:
    """The row of the size table that a tensor belongs to ("routed experts", "KDA mixers", ...)."""
    if is_vision(name):
        return "vision tower" if name.startswith("vision_tower.") else "projector"
    at = parse_layer(name)
    if at is None:
        for ending, part in (("embed_tokens.weight", "embed_tokens"), ("lm_head.weight", "lm_head")):
            if name.endswith(ending):
                return part
        return "AttnRes" if "attn_res" in name else "norms" if name.endswith("norm.weight") else "other"
    head, _, tail = at.rest.partition(".")
    if head == "self_attn":
        return "KDA mixers" if at.layer in text.kda_layers else "MLA mixers"
    if head == "mlp":
        return "dense MLP"
    if head == "block_sparse_moe":
        parts = {"experts": "routed experts", "shared_experts": "shared experts", "gate": "router"}
        return parts.get(tail.partition(".")[0], "latent projections")
    return "AttnRes" if "_res_" in head else "norms" if head.endswith("layernorm") else "other"
