"""`KimiLinearConfig`: the text decoder of Kimi K3 and of Kimi-Linear-48B-A3B, in the released schema."""

import copy
import re
from typing import Any, ClassVar

from ..errors import ConfigError
from .base import ReleasedSchemaConfig
from .checks import (
    fraction,
    layer_count,
    one_of,
    optional_int,
    positive_float,
    positive_int,
    special_tokens,
    spread,
    switch,
)
from .layer_plan import check_linear_attn_config, dense_prefix, fill_linear_attn_config, lists_of
from .quantization import agreed, check_block, released, route
from .routing import ROUTER_ACTIVATIONS, check_routing

# "situ" is ours; the others are the gate activations of transformers that a GLU is ablated with.
ACTIVATIONS = ("situ", "silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
_SWITCHES = (
    "use_cache",
    "tie_word_embeddings",
    "mla_use_nope",
    "mla_use_output_gate",
    "latent_moe_use_norm",
    "moe_renormalize",
    "output_router_logits",
)
# What a native config calls the sizes in `linear_attn_config`.
_LINEAR_SPELLINGS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def _linear_spelling(name: str) -> property:
    """A field of `linear_attn_config` under the name that native configs have for it."""

    def read(config: "KimiLinearConfig") -> int:
        return config.linear_attn_config[name]

    def write(config: "KimiLinearConfig", value: int) -> None:
        config.linear_attn_config = {**config.linear_attn_config, name: value}

    return property(read, write)


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
    _translated: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types", "qk_head_dim", *_LINEAR_SPELLINGS)
    _part_key: ClassVar[str] = "text_config"

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
    num_expert_group: int | None = 1
    topk_group: int | None = 1
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    output_router_logits: bool = False
    num_nextn_predict_layers: int | None = 0

    def __post_init__(self, **kwargs):
        if "text_config" in kwargs:
            self._own_part({"model_type": "kimi_k3", "text_config": kwargs["text_config"]})  # may find more to say
            raise ConfigError("text_config is a field of KimiK3Config; give the fields in it to KimiLinearConfig")
        asked = self._translate(kwargs)
        quantization = kwargs.pop("quantization_config", None)
        # There is no rotary embedding; transformers would turn this field into another one.
        kwargs.pop("rope_scaling", None)
        try:
            self._fill()
            self.check()
        except ConfigError as error:
            raise self._in_given_words(error) from error
        for name, value in asked.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{name} is {value!r}, but the other fields of the configuration give {getattr(self, name)!r}; leave out one "
                    "of the two spellings"
                )
        super().__post_init__(**kwargs)
        if quantization is not None:
            self.quantization_config = route(quantization)

    def _translate(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Fold other spellings (aliases, 0-based layer types of native configs) into the released fields.

        Returns:
            The other spellings with their values, for fields that were given in both: these must come out the same.
        """
        given, asked = self._memory.given, {}
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                value = kwargs.pop(alias)
                if name in given and given[name] != value:
                    raise ConfigError(
                        f"{alias} is {value!r}, but {name}, which is the same, is {given[name]!r}; give one"
                    )
                setattr(self, name, value)
        spelled = {name: kwargs.pop(name) for name in self._translated if kwargs.get(name) is not None}
        for name in self._translated:
            kwargs.pop(name, None)
        linear = self.linear_attn_config
        if linear is not None and not isinstance(linear, dict):
            return {}  # `check` says so
        linear = dict(linear or {})
        for alias, name in _LINEAR_SPELLINGS.items():
            if alias in spelled:
                linear.setdefault(name, spelled[alias])
                asked[alias] = spelled[alias]
        if "layer_types" in spelled:
            layer_count("num_hidden_layers", self.num_hidden_layers)
            lists = lists_of(spelled["layer_types"], self.num_hidden_layers)
            if linear.get("kda_layers") is None and linear.get("full_attn_layers") is None:
                linear.update(lists)
            asked["layer_types"] = list(spelled["layer_types"])
        if "mlp_layer_types" in spelled:
            layer_count("num_hidden_layers", self.num_hidden_layers)
            prefix = dense_prefix(spelled["mlp_layer_types"], self.num_hidden_layers)
            if "first_k_dense_replace" not in given:
                self.first_k_dense_replace = prefix
            asked["mlp_layer_types"] = list(spelled["mlp_layer_types"])
        if "qk_head_dim" in spelled:  # a sum, which native files write beside its parts
            asked["qk_head_dim"] = spelled["qk_head_dim"]
        self.linear_attn_config = linear
        return asked

    def _in_given_words(self, error: ConfigError) -> ConfigError:
        """The error with the spelling that was given, where its field was given in another."""
        names = {alias: f"linear_attn_config.{name}" for alias, name in _LINEAR_SPELLINGS.items()} | self.attribute_map
        given = [
            f"{name} was given as {alias}"
            for alias, name in names.items()
            if alias in self._memory.given and re.search(rf"\b{re.escape(name)}\b", str(error))
        ]
        return ConfigError(f"{error} ({', '.join(given)})") if given else error

    def _fill(self) -> None:
        self._derive("num_key_value_heads", self.num_attention_heads)
        layer_count("num_hidden_layers", self.num_hidden_layers)
        if self.linear_attn_config is None:
            self.__dict__["linear_attn_config"] = {}
        if isinstance(self.linear_attn_config, dict):
            memory = self._memory.notes.setdefault("linear_attn_config", {})
            linear = copy.deepcopy(self.linear_attn_config)  # the present one may be shared with a copy of this object
            fill_linear_attn_config(linear, self.num_hidden_layers, self.num_attention_heads, memory)
            self.__dict__["linear_attn_config"] = linear

    def _follow(self, name: str) -> None:
        if name == "linear_attn_config":
            self._memory.notes.pop(name, None)
        super()._follow(name)

    def check(self) -> None:
        """Raise `ConfigError` if a field contradicts another or names something that does not exist."""
        super().check()
        for name in _SWITCHES:
            switch(name, getattr(self, name))
        self._check_sizes()
        self._check_activation()
        self._check_attention()
        check_linear_attn_config(self.linear_attn_config, self.num_hidden_layers)
        self._check_experts()
        check_block(self.__dict__.get("quantization_config"))

    def _check_sizes(self) -> None:
        layer_count("num_hidden_layers", self.num_hidden_layers)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
        for name in sizes:
            positive_int(name, getattr(self, name))
        special_tokens(self, self.vocab_size)
        positive_float("rms_norm_eps", self.rms_norm_eps)
        spread("initializer_range", self.initializer_range)
        optional_int("attn_res_block_size", self.attn_res_block_size)
        optional_int("num_nextn_predict_layers", self.num_nextn_predict_layers, minimum=0)
        if self.num_nextn_predict_layers:
            raise ConfigError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers}; next-token-prediction layers are not part of "
                "the released models and cannot be built. Set it to 0"
            )

    def _check_activation(self) -> None:
        one_of("hidden_act", self.hidden_act, ACTIVATIONS)
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            value = getattr(self, name)
            if value is None:
                continue
            if name == "activation_situ_beta":
                spread(name, value)  # 0 means 1, as in the release
            else:
                positive_float(name, value)
            if value and self.hidden_act != "situ":
                raise ConfigError(
                    f"{name} is {value}, but hidden_act is {self.hidden_act!r}; it belongs to 'situ' only"
                )

    def _check_attention(self) -> None:
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads ({self.num_key_value_heads!r}) must equal num_attention_heads "
                f"({self.num_attention_heads}): latent attention has keys for every query head"
            )
        positive_int("num_key_value_heads", self.num_key_value_heads)
        optional_int("q_lora_rank", self.q_lora_rank)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            positive_int(name, getattr(self, name))
        fraction("attention_dropout", self.attention_dropout)
        if not self.mla_use_nope:
            raise ConfigError("mla_use_nope is false, but the Kimi decoder has no rotary embedding; set it to true")

    def _check_experts(self) -> None:
        positive_int("first_k_dense_replace", self.first_k_dense_replace, minimum=0)
        positive_int("moe_layer_freq", self.moe_layer_freq)
        positive_float("routed_scaling_factor", self.routed_scaling_factor)
        one_of("moe_router_activation_func", self.moe_router_activation_func, ROUTER_ACTIVATIONS)
        if self.num_experts is None:
            sizes = ("num_experts_per_token", "moe_intermediate_size", "num_expert_group", "topk_group")
            for name in (*sizes, "routed_expert_hidden_size"):
                optional_int(name, getattr(self, name))
            optional_int("num_shared_experts", self.num_shared_experts, minimum=0)
            for name in ("routed_expert_hidden_size", "latent_moe_use_norm"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} is {getattr(self, name)!r}, but num_experts is null: there are no experts. Leave out {name}, or "
                        "give num_experts"
                    )
            return
        check_routing(self)
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ConfigError(
                f"first_k_dense_replace ({self.first_k_dense_replace}) is more than num_hidden_layers "
                f"({self.num_hidden_layers}), and no layer would hold the {self.num_experts} experts; lower it"
            )
        if self.latent_moe_use_norm and self.routed_expert_hidden_size is None:
            raise ConfigError(
                "latent_moe_use_norm is true, but routed_expert_hidden_size is null: there is no latent to norm. Set the width "
                "of the latent, or the switch to false"
            )

    @classmethod
    def _own_part(cls, found: dict[str, Any]) -> dict[str, Any]:
        part = super()._own_part(found)
        block = None if part is found else agreed(found.get("quantization_config"), part.get("quantization_config"))
        return part if block is None else {**part, "quantization_config": block}

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        if output.get("quantization_config") is not None:
            output["quantization_config"] = released(output["quantization_config"])
        return output

    # What transformers' caches, masks and common tests read; derived, so never written to config.json.

    @property
    def layer_types(self) -> list[str]:
        """Per layer, 0-based: "linear_attention" (KDA) or "full_attention" (MLA)."""
        kda = set(self.linear_attn_config["kda_layers"])
        return ["linear_attention" if i + 1 in kda else "full_attention" for i in range(self.num_hidden_layers)]

    @layer_types.setter
    def layer_types(self, value: list[str]) -> None:
        self.linear_attn_config = {**self.linear_attn_config, **lists_of(value, self.num_hidden_layers)}

    @property
    def mlp_layer_types(self) -> list[str]:
        """Per layer, 0-based: "sparse" (mixture of experts) or "dense"."""
        return ["sparse" if self.is_moe_layer(i) else "dense" for i in range(self.num_hidden_layers)]

    @mlp_layer_types.setter
    def mlp_layer_types(self, value: list[str]) -> None:
        self.first_k_dense_replace, self.moe_layer_freq = dense_prefix(value, self.num_hidden_layers), 1

    def is_moe_layer(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` (0-based) routes to experts."""
        return (
            self.num_experts is not None
            and layer_idx >= self.first_k_dense_replace
            and layer_idx % self.moe_layer_freq == 0
        )

    linear_head_dim = _linear_spelling("head_dim")
    linear_num_heads = _linear_spelling("num_heads")
    linear_conv_kernel_dim = _linear_spelling("short_conv_kernel_size")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key, n + r."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @qk_head_dim.setter
    def qk_head_dim(self, value: int) -> None:
        if value != self.qk_head_dim:
            raise ConfigError(
                f"qk_head_dim is {value!r}, but qk_nope_head_dim + qk_rope_head_dim is {self.qk_head_dim}; change those two"
            )

    @property
    def situ_beta(self) -> float:
        """The bound of SiTU's gate half; null and 0 mean 1."""
        return float(self.activation_situ_beta or 1.0)
