"""`KimiLinearConfig`: the text decoder of Kimi K3 and of Kimi-Linear-48B-A3B, in the released schema."""

import copy
from typing import Any, ClassVar

from ..errors import ConfigError
from .base import ReleasedSchemaConfig, fraction, one_of, positive_float, positive_int, remembers_fields
from .layer_plan import check_layer_lists, fill_layer_lists
from .quantization import released, route

# "situ" is ours; the others are the gate activations of transformers that a GLU is ablated with.
ACTIVATIONS = ("situ", "silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
ROUTER_ACTIVATIONS = ("sigmoid", "softmax")
_SWITCHES = ("use_cache", "tie_word_embeddings", "mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize")
_LINEAR_ATTN_FIELDS = (
    "kda_layers",
    "full_attn_layers",
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "use_full_rank_gate",
    "gate_lower_bound",
)


@remembers_fields
class KimiLinearConfig(ReleasedSchemaConfig):
    """Configuration of the Kimi text decoder (`model_type` "kimi_linear").

    One schema covers Kimi-Linear (softplus gate, low-rank output gate, plain residuals, experts at full width) and
    the K3 text model (bounded gate, gated MLA, latent experts, SiTU, Block AttnRes). Defaults are the released
    class's. `linear_attn_config` counts layers from 1; without lists every fourth layer and the last one are full
    attention. `hidden_size` D, `num_attention_heads` A, `kv_lora_rank` R, `num_experts` E.

    Fields that the released models do not read either (`head_dim`, `rope_theta`, `topk_method`, ...) are kept and
    written back. `max_position_embeddings` is a note for servers: there is no position embedding to size.

    Raises:
        ConfigError: a field that contradicts another or that the architecture cannot honour; the message starts
            with the field's name.

    Source: released `config.json` of Kimi-K3 and Kimi-Linear-48B-A3B.
    """

    model_type = "kimi_linear"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
    }
    base_model_tp_plan = {
        "layers.*.block_sparse_moe.experts.gate_up_proj": "packed_colwise",
        "layers.*.block_sparse_moe.experts.down_proj": "rowwise",
        "layers.*.block_sparse_moe.experts": "moe_tp_experts",
        "layers.*.block_sparse_moe.shared_experts.gate_proj": "colwise",
        "layers.*.block_sparse_moe.shared_experts.up_proj": "colwise",
        "layers.*.block_sparse_moe.shared_experts.down_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_ep_plan = {
        "layers.*.block_sparse_moe.experts.gate_up_proj": "grouped_gemm",
        "layers.*.block_sparse_moe.experts.down_proj": "grouped_gemm",
        "layers.*.block_sparse_moe.experts": "ep_dispatch_experts",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    _translated: ClassVar[tuple[str, ...]] = (
        "layer_types",
        "mlp_layer_types",
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
    )

    vocab_size: int = 163840
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    attention_dropout: float = 0.0

    linear_attn_config: dict[str, Any] | None = None
    attn_res_block_size: int | None = None

    num_experts: int | None = None
    num_experts_per_token: int | None = None
    num_shared_experts: int | None = 0
    moe_intermediate_size: int | None = None
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int | None = 1
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    output_router_logits: bool = False
    num_nextn_predict_layers: int = 0

    def __post_init__(self, **kwargs):
        if isinstance(kwargs.get("text_config"), dict):
            found = kwargs["text_config"].get("model_type")
            raise ConfigError(
                f"text_config.model_type is {found!r} in a composite configuration; the text model is found there by "
                f"{self.model_type!r}. Correct config.json, or name the right class for the folder"
            )
        kwargs = self._translate(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        positive_int("num_hidden_layers", self.num_hidden_layers)
        self.linear_attn_config = self._complete_linear_attn_config(self.linear_attn_config)
        quantization = kwargs.pop("quantization_config", None)
        # There is no rotary embedding; transformers would turn this field into another one.
        kwargs.pop("rope_scaling", None)
        super().__post_init__(**kwargs)
        if quantization is not None:
            self.quantization_config = route(quantization)
        self.check()

    def _translate(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Fold other spellings (aliases, 0-based layer types of native configs) into the released fields."""
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        linear = dict(self.linear_attn_config or {})
        spelled = {
            "linear_head_dim": "head_dim",
            "linear_num_heads": "num_heads",
            "linear_conv_kernel_dim": "short_conv_kernel_size",
        }
        for alias, name in spelled.items():
            value = kwargs.pop(alias, None)
            if value is not None:
                linear.setdefault(name, value)
        layer_types = kwargs.pop("layer_types", None)
        if layer_types is not None and "kda_layers" not in linear and "full_attn_layers" not in linear:
            unknown = sorted(set(layer_types) - {"linear_attention", "full_attention"})
            if unknown:
                raise ConfigError(f"layer_types may hold 'linear_attention' and 'full_attention', got {unknown}")
            linear["kda_layers"] = [i + 1 for i, kind in enumerate(layer_types) if kind == "linear_attention"]
            linear["full_attn_layers"] = [i + 1 for i, kind in enumerate(layer_types) if kind == "full_attention"]
        mlp_types = kwargs.pop("mlp_layer_types", None)
        if mlp_types is not None:
            self.first_k_dense_replace = _dense_prefix(mlp_types)
        if linear:
            self.linear_attn_config = linear
        return kwargs

    def _complete_linear_attn_config(self, given: dict[str, Any] | None) -> dict[str, Any]:
        linear = copy.deepcopy(given) if given else {}
        linear.setdefault("num_heads", self.num_attention_heads)
        linear.setdefault("head_dim", 128)
        linear.setdefault("short_conv_kernel_size", 4)
        fill_layer_lists(linear, self.num_hidden_layers)
        return linear

    def check(self) -> None:
        """Raise `ConfigError` if a field contradicts another or names something that does not exist."""
        for name in _SWITCHES:
            one_of(name, getattr(self, name), (True, False))
        self._check_sizes()
        self._check_attention()
        self._check_linear_attention()
        self.check_experts()

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            positive_int(name, getattr(self, name))
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ConfigError(f"pad_token_id is {self.pad_token_id}, outside vocab_size ({self.vocab_size})")
        positive_float("rms_norm_eps", self.rms_norm_eps)
        if self.initializer_range != 0:
            positive_float("initializer_range", self.initializer_range)
        one_of("hidden_act", self.hidden_act, ACTIVATIONS)
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            value = getattr(self, name)
            if value is None or (name == "activation_situ_beta" and value == 0):
                continue
            positive_float(name, value)
            if self.hidden_act != "situ":
                raise ConfigError(
                    f"{name} is {value}, but hidden_act is {self.hidden_act!r}; it belongs to 'situ' only"
                )
        if self.attn_res_block_size is not None:
            positive_int("attn_res_block_size", self.attn_res_block_size)
        if self.num_nextn_predict_layers:
            raise ConfigError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers}; next-token-prediction layers are not part "
                "of the released models and cannot be built. Set it to 0"
            )

    def _check_attention(self) -> None:
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads ({self.num_key_value_heads}) must equal num_attention_heads "
                f"({self.num_attention_heads}): latent attention has keys for every query head"
            )
        if self.q_lora_rank is not None:
            positive_int("q_lora_rank", self.q_lora_rank)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            positive_int(name, getattr(self, name))
        fraction("attention_dropout", self.attention_dropout)
        if not self.mla_use_nope:
            raise ConfigError("mla_use_nope must be true: the Kimi decoder has no rotary embedding")

    def _check_linear_attention(self) -> None:
        linear = self.linear_attn_config
        unknown = sorted(set(linear) - set(_LINEAR_ATTN_FIELDS))
        if unknown:
            raise ConfigError(
                f"linear_attn_config holds unknown fields {unknown}; known are {', '.join(_LINEAR_ATTN_FIELDS)}"
            )
        for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
            positive_int(f"linear_attn_config.{name}", linear[name])
        one_of("linear_attn_config.use_full_rank_gate", linear.get("use_full_rank_gate", False), (True, False, None))
        check_layer_lists(linear["kda_layers"], linear["full_attn_layers"], self.num_hidden_layers)
        bound = linear.get("gate_lower_bound")
        if bound is not None and not (isinstance(bound, (int, float)) and -5.0 <= bound < 0):
            raise ConfigError(
                f"linear_attn_config.gate_lower_bound must lie in [-5, 0) (or be null for the softplus gate), got {bound!r}"
            )

    def check_experts(self) -> None:
        """Raise `ConfigError` if the experts' fields contradict each other."""
        if self.num_experts is None:
            for name in ("routed_expert_hidden_size",):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is {getattr(self, name)}, but num_experts is null: there are no experts")
            return
        positive_int("num_experts", self.num_experts)
        positive_int("num_experts_per_token", self.num_experts_per_token)
        positive_int("moe_intermediate_size", self.moe_intermediate_size)
        positive_int("moe_layer_freq", self.moe_layer_freq)
        positive_int("first_k_dense_replace", self.first_k_dense_replace, minimum=0)
        positive_int("num_expert_group", self.num_expert_group)
        positive_int("topk_group", self.topk_group)
        positive_float("routed_scaling_factor", self.routed_scaling_factor)
        one_of("moe_router_activation_func", self.moe_router_activation_func, ROUTER_ACTIVATIONS)
        if self.num_shared_experts is not None:
            positive_int("num_shared_experts", self.num_shared_experts, minimum=0)
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_token ({self.num_experts_per_token}) is more than num_experts ({self.num_experts})"
            )
        self._check_groups()
        if self.routed_expert_hidden_size is not None:
            positive_int("routed_expert_hidden_size", self.routed_expert_hidden_size)
        elif self.latent_moe_use_norm:
            raise ConfigError(
                "latent_moe_use_norm is true, but routed_expert_hidden_size is null: there is no latent to norm"
            )

    def _check_groups(self) -> None:
        groups, kept = self.num_expert_group, self.topk_group
        if self.num_experts % groups:
            raise ConfigError(f"num_expert_group ({groups}) does not divide num_experts ({self.num_experts})")
        if kept > groups:
            raise ConfigError(f"topk_group ({kept}) is more than num_expert_group ({groups})")
        group_size = self.num_experts // groups
        if groups > kept and group_size < 2:
            raise ConfigError(
                f"num_expert_group ({groups}) leaves {group_size} expert a group; a group is scored by its two best"
            )
        if kept * group_size < self.num_experts_per_token:
            raise ConfigError(
                f"topk_group ({kept}) keeps {kept * group_size} experts, fewer than num_experts_per_token "
                f"({self.num_experts_per_token})"
            )

    def restore_quantization(self) -> None:
        """Take the file's `quantization_config` again if it was overwritten by None, as `KimiK3Config` does."""
        block = self.__dict__.get("_given", {}).get("quantization_config")
        if self.__dict__.get("quantization_config", block) is None and block is not None:
            self.quantization_config = route(block)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        return _with_released_quantization(output)

    def to_diff_dict(self) -> dict[str, Any]:
        output = super().to_diff_dict()
        return _with_released_quantization(output)

    # What transformers' caches, masks and common tests read; derived, so never written to config.json.

    @property
    def layer_types(self) -> list[str]:
        """Per layer, 0-based: "linear_attention" (KDA) or "full_attention" (MLA)."""
        kda = set(self.linear_attn_config["kda_layers"])
        return ["linear_attention" if i + 1 in kda else "full_attention" for i in range(self.num_hidden_layers)]

    @property
    def mlp_layer_types(self) -> list[str]:
        """Per layer, 0-based: "sparse" (mixture of experts) or "dense"."""
        return ["sparse" if self.is_moe_layer(i) else "dense" for i in range(self.num_hidden_layers)]

    def is_moe_layer(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` (0-based) routes to experts."""
        return (
            self.num_experts is not None
            and layer_idx >= self.first_k_dense_replace
            and layer_idx % self.moe_layer_freq == 0
        )

    @property
    def linear_head_dim(self) -> int:
        return self.linear_attn_config["head_dim"]

    @property
    def linear_num_heads(self) -> int:
        return self.linear_attn_config["num_heads"]

    @property
    def linear_conv_kernel_dim(self) -> int:
        return self.linear_attn_config["short_conv_kernel_size"]

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key, n + r."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def situ_beta(self) -> float:
        """The bound of SiTU's gate half; null and 0 mean 1."""
        return float(self.activation_situ_beta or 1.0)


def _dense_prefix(mlp_types: list[str]) -> int:
    """How many leading layers are dense, of a native config's `mlp_layer_types`."""
    unknown = sorted(set(mlp_types) - {"dense", "sparse"})
    if unknown:
        raise ConfigError(f"mlp_layer_types may hold 'dense' and 'sparse', got {unknown}")
    dense = next((i for i, kind in enumerate(mlp_types) if kind == "sparse"), len(mlp_types))
    if "dense" in mlp_types[dense:]:
        raise ConfigError("mlp_layer_types has a dense layer after a sparse one; use moe_layer_freq for such patterns")
    return dense


def _with_released_quantization(output: dict[str, Any]) -> dict[str, Any]:
    if output.get("quantization_config") is not None:
        output["quantization_config"] = released(output["quantization_config"])
    return output
