"""Parameters, bytes and cache sizes of a model, counted from its configuration alone.

Source: closed forms of each layer; for the released models they give Kimi K3's 2,779,931,837,184 stored parameters
and Kimi-Linear's 49,122,681,728.
"""

from dataclasses import dataclass, field

from .configuration_kimi_k3 import KimiK3Config
from .configuration_kimi_k3_vision import KimiK3VisionConfig
from .configuration_kimi_linear import KimiLinearConfig
from .configuration_ladder import LadderConfig
from .quantization import GROUP_SIZE, QUANT_METHOD

GPT2_SMALL = 124_439_808
_WEIGHT, _FLOAT32 = 2, 4


@dataclass(frozen=True)
class Part:
    """One kind of building block: `count` copies of `parameters` parameters, stored in `stored_bytes` bytes each."""

    name: str
    parameters: int
    count: int
    stored_bytes: int
    activated: int | None = None  # parameters of all copies that one token uses; None means every one
    group: str = "text"

    @property
    def total(self) -> int:
        return self.parameters * self.count

    @property
    def total_activated(self) -> int:
        return self.total if self.activated is None else self.activated


@dataclass(frozen=True)
class Census:
    """What a configuration costs. Bytes are those of the released layout (bf16, fp32 where released, MXFP4 experts)."""

    parts: list[Part] = field(default_factory=list)
    cache_bytes_per_token: int = 0
    expanded_cache_bytes_per_token: int = 0
    state_bytes: int = 0
    conv_state_bytes: int = 0

    @property
    def total(self) -> int:
        """All stored parameters, the zero padding of `A_log` included."""
        return sum(part.total for part in self.parts)

    @property
    def text_total(self) -> int:
        return sum(part.total for part in self.parts if part.group == "text")

    @property
    def vision_total(self) -> int:
        return self.total - self.text_total

    @property
    def activated(self) -> int:
        """Parameters one text token uses: routed experts counted k of E, lm_head counted, embedding and vision not."""
        return sum(part.total_activated for part in self.parts if part.group == "text" and part.name != "embed_tokens")

    @property
    def stored_bytes(self) -> int:
        return sum(part.stored_bytes * part.count for part in self.parts)


def census(config: KimiK3Config | KimiLinearConfig | LadderConfig) -> Census:
    """Count parameters per part, activated parameters, stored bytes and cache bytes of `config`.

    Raises:
        TypeError: for a configuration of another model family.
        ConfigError: a configuration that contradicts itself.
    """
    if not isinstance(config, (KimiK3Config, KimiLinearConfig, LadderConfig)):
        raise TypeError(f"census counts KimiK3Config, KimiLinearConfig and LadderConfig, got {type(config).__name__}")
    config.check()
    if isinstance(config, LadderConfig):
        return Census(parts=_ladder_parts(config), **_ladder_cache_bytes(config))
    if isinstance(config, KimiK3Config):
        text, vision = config.text_config, config.vision_config
        packed = _is_packed(config)
        padded_heads = True
    else:
        text, vision, packed = config, None, _is_packed(config)
        padded_heads = config.linear_attn_config.get("gate_lower_bound") is not None
    parts = _text_parts(text, packed, padded_heads)
    if vision is not None:
        parts += _vision_parts(vision)
    return Census(parts=parts, **_cache_bytes(text))


def _is_packed(config) -> bool:
    block = getattr(config, "quantization_config", None)
    method = block.get("quant_method") if isinstance(block, dict) else getattr(block, "quant_method", None)
    return method == QUANT_METHOD


def _text_parts(c: KimiLinearConfig, packed: bool, padded_heads: bool) -> list[Part]:
    layers, d = c.num_hidden_layers, c.hidden_size
    num_kda = len(c.linear_attn_config["kda_layers"])
    num_moe = sum(c.is_moe_layer(i) for i in range(layers))
    embedding = c.vocab_size * d
    parts = [Part("embed_tokens", embedding, 1, embedding * _WEIGHT)]
    if not c.tie_word_embeddings:
        parts.append(Part("lm_head", embedding, 1, embedding * _WEIGHT))
    parts.append(_kda_part(c, num_kda, padded_heads))
    mla = _mla_parameters(c)
    parts.append(Part("MLA mixers", mla, layers - num_kda, mla * _WEIGHT))
    if layers > num_moe:
        dense = 3 * d * c.intermediate_size
        parts.append(Part("dense MLP", dense, layers - num_moe, dense * _WEIGHT))
    if num_moe:
        parts += _moe_parts(c, num_moe, packed, c.routed_expert_hidden_size)
    norms = (2 * layers + 1) * d
    parts.append(Part("layer norms + final norm", norms, 1, norms * _WEIGHT))
    if c.attn_res_block_size is not None:
        depth = (4 * layers + 2) * d
        parts.append(Part("AttnRes", depth, 1, depth * _WEIGHT))
    return [part for part in parts if part.count]


def _kda_part(c: KimiLinearConfig | LadderConfig, count: int, padded_heads: bool) -> Part:
    linear, d = c.linear_attn_config, c.hidden_size
    heads, k, width = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    p = heads * k
    low_rank = d * k + k * p
    gate = p * d if linear.get("use_full_rank_gate") else low_rank
    weights = 4 * p * d + gate + low_rank + heads * d
    # K3 stores A_log with head_dim entries, the tail beyond the heads being zero.
    decay = max(heads, k) if padded_heads else heads
    float32 = 3 * width * p + p + decay + k
    return Part("KDA mixers", weights + float32, count, weights * _WEIGHT + float32 * _FLOAT32)


def _mla_parameters(c: KimiLinearConfig | LadderConfig) -> int:
    d, heads = c.hidden_size, c.num_attention_heads
    query = heads * c.qk_head_dim
    q = d * query if c.q_lora_rank is None else c.q_lora_rank * (d + 1 + query)
    latent = d * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank
    expand = c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    out = heads * c.v_head_dim * d
    return q + latent + expand + out * (2 if c.mla_use_output_gate else 1)


def _moe_parts(c: KimiLinearConfig | LadderConfig, num_moe: int, packed: bool, latent: int | None) -> list[Part]:
    d, width = c.hidden_size, c.moe_intermediate_size
    z = latent or d
    expert = 3 * z * width
    expert_bytes = expert // 2 + expert // GROUP_SIZE if packed else expert * _WEIGHT
    active = expert * num_moe * c.num_experts_per_token
    parts = [Part("routed experts", expert, num_moe * c.num_experts, expert_bytes, activated=active)]
    shared = 3 * d * width * (c.num_shared_experts or 0)
    if shared:
        parts.append(Part("shared experts", shared, num_moe, shared * _WEIGHT))
    if latent:
        around = 2 * d * z + (z if c.latent_moe_use_norm else 0)
        parts.append(Part("latent down + up + norm", around, num_moe, around * _WEIGHT))
    router = c.num_experts * d
    bias = c.num_experts
    parts.append(Part("router weight + bias", router + bias, num_moe, router * _WEIGHT + bias * _FLOAT32))
    return parts


def _vision_parts(v: KimiK3VisionConfig) -> list[Part]:
    d, inner = v.vt_hidden_size, v.qkv_hidden_size
    block = 2 * d + 3 * inner * d + d * inner + 2 * d * v.vt_intermediate_size
    patch = d * 3 * v.patch_size**2 + v.init_pos_emb_height * v.init_pos_emb_width * d
    tower = patch + v.vt_num_hidden_layers * block + d
    merged = v.mm_hidden_size * v.merge_kernel_size[0] * v.merge_kernel_size[1]
    projector = merged * merged + merged * v.text_hidden_size + v.text_hidden_size
    return [
        Part("vision tower", tower, 1, tower * _WEIGHT, group="vision"),
        Part("projector", projector, 1, projector * _WEIGHT, group="vision"),
    ]


def _cache_bytes(c: KimiLinearConfig) -> dict[str, int]:
    linear = c.linear_attn_config
    kda = len(linear["kda_layers"])
    mla = c.num_hidden_layers - kda
    heads, k, width = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    expanded = c.num_attention_heads * (c.qk_head_dim + c.v_head_dim)
    return {
        "cache_bytes_per_token": mla * (c.kv_lora_rank + c.qk_rope_head_dim) * _WEIGHT,
        "expanded_cache_bytes_per_token": mla * expanded * _WEIGHT,
        "state_bytes": kda * heads * k * k * _FLOAT32,
        "conv_state_bytes": kda * 3 * heads * k * width * _WEIGHT,
    }


def _ladder_parts(c: LadderConfig) -> list[Part]:
    d, layers = c.hidden_size, c.num_hidden_layers
    embedding = c.vocab_size * d
    # A tied head is an embedding that every token multiplies with.
    parts = [
        Part("embed_tokens = lm_head" if c.tie_word_embeddings else "embed_tokens", embedding, 1, embedding * _WEIGHT)
    ]
    if c.positions == "learned":
        positions = c.max_position_embeddings * d
        parts.append(Part("embed_positions", positions, 1, positions * _WEIGHT, activated=0))
    if not c.tie_word_embeddings:
        parts.append(Part("lm_head", embedding, 1, embedding * _WEIGHT))
    mixers, feed_forwards = c.mixers, c.feed_forwards
    for name in dict.fromkeys(mixers):
        count = mixers.count(name)
        if name == "kimi_delta_attention":
            parts.append(_kda_part(c, count, padded_heads=False))
        else:
            weights, float32 = _ladder_mixer(c, name)
            stored = weights * _WEIGHT + float32 * _FLOAT32
            parts.append(Part(f"{name} mixers", weights + float32, count, stored))
    for name in dict.fromkeys(feed_forwards):
        count = feed_forwards.count(name)
        if name in ("moe", "latent_moe"):
            latent = c.routed_expert_hidden_size if name == "latent_moe" else None
            parts += _moe_parts(c, count, packed=False, latent=latent)
        else:
            f = c.intermediate_size
            dense = 2 * d * f + (f + d if c.bias else 0) if name == "gelu_mlp" else 3 * d * f
            parts.append(Part(name, dense, count, dense * _WEIGHT))
    norms = (2 * layers + 1) * d * (2 if c.norm == "layer_norm" and c.bias else 1)
    parts.append(Part("layer norms + final norm", norms, 1, norms * _WEIGHT))
    if c.residual != "sum":
        depth = (4 * layers + 2) * d
        parts.append(Part("AttnRes", depth, 1, depth * _WEIGHT))
    return parts


def _ladder_mixer(c: LadderConfig, name: str) -> tuple[int, int]:
    """Parameters of one mixer, in the weights' dtype and in fp32."""
    d = c.hidden_size
    if name == "latent_attention":
        return _mla_parameters(c), 0
    if name == "softmax_attention":
        return 4 * d * d + (4 * d if c.bias else 0), 0
    heads, keys, values = c.linear_num_heads, *_ladder_channels(c)
    weights = 2 * d * keys + 2 * d * values
    if name == "linear_attention":
        return weights + (2 * keys + values + d if c.bias else 0), 0
    options = c.delta_options(name)
    weights += d * heads + (d * values if options["output_gate"] else 0)
    float32 = options["short_conv_kernel_size"] * (2 * keys + values)
    float32 += values // heads if options["output_norm"] else 0
    if name == "gated_delta_net":
        weights, float32 = weights + d * heads, float32 + 2 * heads
    return weights, float32


def _ladder_channels(c: LadderConfig) -> tuple[int, int]:
    """Channels of all keys and of all values of a recurrent mixer."""
    heads = c.linear_num_heads
    return heads * c.linear_head_dim, heads * (c.linear_value_head_dim or c.linear_head_dim)


def _ladder_cache_bytes(c: LadderConfig) -> dict[str, int]:
    token = expanded = state = conv = 0
    for name in c.mixers:
        if name == "softmax_attention":
            token, expanded = token + 2 * c.hidden_size, expanded + 2 * c.hidden_size
        elif name == "latent_attention":
            token += c.kv_lora_rank + c.qk_rope_head_dim
            expanded += c.num_attention_heads * (c.qk_head_dim + c.v_head_dim)
        else:
            keys, values = _ladder_channels(c)
            state += keys * (values // c.linear_num_heads) + (keys if name == "linear_attention" else 0)
            width = c.linear_attn_config["short_conv_kernel_size"] if name == "kimi_delta_attention" else 0
            if name in ("delta_net", "gated_delta_net"):
                width = c.delta_options(name)["short_conv_kernel_size"]
            conv += (2 * keys + values) * width
    return {
        "cache_bytes_per_token": token * _WEIGHT,
        "expanded_cache_bytes_per_token": expanded * _WEIGHT,
        "state_bytes": state * _FLOAT32,
        "conv_state_bytes": conv * _WEIGHT,
    }
