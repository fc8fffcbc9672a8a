"""`LadderConfig`: any mixer per layer, any feed-forward, any residual stream, with or without positions."""

from typing import Any

from ..errors import ConfigError
from .base import ReleasedSchemaConfig, one_of, positive_float, positive_int, remembers_fields
from .rungs import rung_fields

# Mixer -> what transformers' caches and masks call its kind of layer.
MIXERS = {
    "softmax_attention": "full_attention",
    "linear_attention": "linear_attention",
    "delta_net": "linear_attention",
    "gated_delta_net": "linear_attention",
    "kimi_delta_attention": "linear_attention",
    "latent_attention": "full_attention",
}
FEED_FORWARDS = ("gelu_mlp", "swiglu", "situ_glu", "moe", "latent_moe")
RESIDUALS = ("sum", "block_attn_res", "full_attn_res")
_DELTA = ("delta_net", "gated_delta_net")
_RECURRENT = ("linear_attention", *_DELTA, "kimi_delta_attention")
_SPARSE = ("moe", "latent_moe")
# Field -> the parts that read it. All of these start as None (or off): set without such a part they would silently do
# nothing, so that is an error; left out with such a part they take the default of that part.
_READERS: dict[str, tuple[str, ...]] = {
    "linear_num_heads": _RECURRENT,
    "linear_head_dim": _RECURRENT,
    "linear_value_head_dim": ("linear_attention", *_DELTA),
    "short_conv_kernel_size": (*_DELTA, "kimi_delta_attention"),
    "output_norm": _DELTA,
    "output_gate": _DELTA,
    "gate_lower_bound": ("kimi_delta_attention",),
    "use_full_rank_gate": ("kimi_delta_attention",),
    "attention_dropout": ("softmax_attention", "latent_attention"),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate"),
        ("latent_attention",),
    ),
    "intermediate_size": ("gelu_mlp", "swiglu", "situ_glu"),
    "activation_function": ("gelu_mlp",),
    "activation_situ_beta": ("situ_glu", *_SPARSE),
    "activation_situ_linear_beta": ("situ_glu", *_SPARSE),
    **dict.fromkeys(
        (
            "hidden_act",
            "num_experts",
            "num_experts_per_token",
            "num_shared_experts",
            "moe_intermediate_size",
            "moe_router_activation_func",
            "moe_renormalize",
            "routed_scaling_factor",
            "num_expert_group",
            "topk_group",
            "output_router_logits",
        ),
        _SPARSE,
    ),
    "routed_expert_hidden_size": ("latent_moe",),
    "latent_moe_use_norm": ("latent_moe",),
    "attn_res_block_size": ("block_attn_res",),
    "bias": ("layer_norm", "softmax_attention", "linear_attention", "gelu_mlp"),
}
# Mixer -> short convolution width (0: none), norm and gate on its output, as its paper has them.
_DELTA_DEFAULTS = {
    "delta_net": {"short_conv_kernel_size": 0, "output_norm": False, "output_gate": False},
    "gated_delta_net": {"short_conv_kernel_size": 4, "output_norm": True, "output_gate": True},
}


@remembers_fields
class LadderConfig(ReleasedSchemaConfig):
    """Configuration of the ladder's models (`model_type` "kimi_ladder").

    `mixer` and `feed_forward` are one name, or a list that is repeated until it covers all layers: `MIXERS` and
    `FEED_FORWARDS` name them. `residual` is one of `RESIDUALS`, `positions` "learned" or "none", `norm` "layer_norm" or
    "rms_norm"; `bias` is that of the layer norms, of softmax and linear attention and of the GELU MLP.

    Sizes left at None follow from `hidden_size` D and `num_attention_heads` A: heads of D / A channels, a latent of
    D / 4, experts of D / 2. A field that no chosen part reads must stay at None.

    `short_conv_kernel_size` (0 for none), `output_norm` and `output_gate` ablate what separates DeltaNet, which has
    none of them by default, from Gated DeltaNet, which has all. `hidden_act` is the gate of the experts ("silu" or
    "situ"; by default "situ" beside a "situ_glu" layer or with a beta for it), `activation_function` the GELU
    ("gelu_new", the tanh form, or "gelu").

    Raises:
        ConfigError: a field that contradicts another, or that nothing reads; the message starts with its name.
    """

    model_type = "kimi_ladder"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 1024
    mixer: str | list[str] = "softmax_attention"
    feed_forward: str | list[str] = "gelu_mlp"
    residual: str = "sum"
    positions: str = "learned"
    norm: str = "layer_norm"
    norm_eps: float = 1e-5
    bias: bool | None = None
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    linear_num_heads: int | None = None
    linear_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    short_conv_kernel_size: int | None = None
    output_norm: bool | None = None
    output_gate: bool | None = None
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False

    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    mla_use_output_gate: bool = False

    intermediate_size: int | None = None
    activation_function: str | None = None
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    hidden_act: str | None = None

    num_experts: int | None = None
    num_experts_per_token: int | None = None
    num_shared_experts: int | None = None
    moe_intermediate_size: int | None = None
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    moe_router_activation_func: str | None = None
    moe_renormalize: bool | None = None
    routed_scaling_factor: float | None = None
    num_expert_group: int | None = None
    topk_group: int | None = None
    output_router_logits: bool = False

    attn_res_block_size: int | None = None

    @classmethod
    def rung(cls, name: str, **changes: Any) -> "LadderConfig":
        """The configuration of a rung with some fields changed, e.g. `rung("gated-delta-net", positions="learned")`.

        Fields of the rung that nothing reads after the change are dropped; a changed field that nothing reads is an
        error, as ever.

        Args:
            name: "gpt2", "linear-transformer", "delta-net", "gated-delta-net", "kimi-linear" or "kimi-k3", each also
                with "-small" or "-tiny" behind it.
        Raises:
            ConfigError: an unknown name, or a combination that does not hold.
        """
        fields = rung_fields(name, changes)
        present = {*_as_list(fields["mixer"]), *_as_list(fields["feed_forward"]), fields["residual"], fields["norm"]}
        kept = {
            key: value
            for key, value in fields.items()
            if key in changes or key not in _READERS or present & set(_READERS[key])
        }
        return cls(architectures=["LadderForCausalLM"], **kept)

    def __post_init__(self, **kwargs):
        self._check_parts()
        self._refuse_unread()
        self._fill()
        super().__post_init__(**kwargs)
        self._check_sizes()
        self._check_recurrent()
        self._check_experts()

    def _check_parts(self) -> None:
        positive_int("num_hidden_layers", self.num_hidden_layers)
        for field, allowed in (("mixer", tuple(MIXERS)), ("feed_forward", FEED_FORWARDS)):
            names = _as_list(getattr(self, field))
            if not 1 <= len(names) <= self.num_hidden_layers:
                raise ConfigError(
                    f"{field} names {len(names)} layers, but num_hidden_layers is {self.num_hidden_layers}; give one name, "
                    "or a list of at most that many, which is repeated"
                )
            for name in names:
                one_of(field, name, allowed)
        one_of("residual", self.residual, RESIDUALS)
        one_of("positions", self.positions, ("learned", "none"))
        one_of("norm", self.norm, ("layer_norm", "rms_norm"))

    def _refuse_unread(self) -> None:
        present = self.parts
        for field, readers in _READERS.items():
            value = getattr(self, field)
            if value and not present & set(readers):
                raise ConfigError(f"{field} is {value!r}, but nothing reads it: it belongs to {', '.join(readers)}")

    def _fill(self) -> None:
        """Give every field that a chosen part reads its value."""
        positive_int("hidden_size", self.hidden_size)
        positive_int("num_attention_heads", self.num_attention_heads)
        width, head = self.hidden_size, self.hidden_size // self.num_attention_heads
        gelu = "gelu_mlp" in self.parts
        defaults = {
            "bias": True,
            "linear_num_heads": self.num_attention_heads,
            "linear_head_dim": head,
            "linear_value_head_dim": self.linear_head_dim or head,
            "kv_lora_rank": max(1, width // 4),
            "qk_nope_head_dim": head,
            "qk_rope_head_dim": max(1, head // 2),
            "v_head_dim": head,
            "intermediate_size": 4 * width if gelu else -(-8 * width // 3 // 8) * 8,
            "activation_function": "gelu_new",
            "hidden_act": "situ" if "situ_glu" in self.parts or self.activation_situ_beta else "silu",
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": -(-width // 2 // 8) * 8,
            "routed_expert_hidden_size": -(-width // 2 // 8) * 8,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "routed_scaling_factor": 1.0,
            "num_expert_group": 1,
            "topk_group": 1,
            # About eight blocks, as the released K3 has.
            "attn_res_block_size": max(1, self.num_hidden_layers // 8),
        }
        for field, value in defaults.items():
            if getattr(self, field) is None and self.parts & set(_READERS[field]):
                setattr(self, field, value)

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "max_position_embeddings"):
            positive_int(name, getattr(self, name))
        for name in ("residual_dropout", "embedding_dropout", "attention_dropout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ConfigError(f"{name} must lie in [0, 1), got {value!r}")
        positive_float("norm_eps", self.norm_eps)
        if "softmax_attention" in self.parts and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) does not divide hidden_size ({self.hidden_size})"
            )
        given = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for name in (*given, "intermediate_size", "attn_res_block_size"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        if self.activation_function is not None:
            one_of("activation_function", self.activation_function, ("gelu_new", "gelu"))
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            if getattr(self, name) is not None:
                positive_float(name, getattr(self, name))
                if "situ_glu" not in self.parts and self.hidden_act != "situ":
                    raise ConfigError(f"{name} is set, but neither a layer nor the experts (hidden_act) use situ")

    def _check_recurrent(self) -> None:
        for name in ("linear_num_heads", "linear_head_dim", "linear_value_head_dim"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        width = self.short_conv_kernel_size
        if width is not None:
            positive_int("short_conv_kernel_size", width, minimum=0)
        if "kimi_delta_attention" not in self.parts:
            return
        if width == 0:
            raise ConfigError(
                "short_conv_kernel_size is 0, but kimi_delta_attention needs its convolutions; give 1 or more"
            )
        if self.linear_value_head_dim not in (None, self.linear_head_dim):
            raise ConfigError(
                f"linear_value_head_dim ({self.linear_value_head_dim}) must equal linear_head_dim ({self.linear_head_dim}): "
                "kimi_delta_attention has square states"
            )
        bound = self.gate_lower_bound
        if bound is not None and not (isinstance(bound, (int, float)) and -5.0 <= bound < 0):
            raise ConfigError(f"gate_lower_bound must lie in [-5, 0), or be null for the softplus gate, got {bound!r}")

    def _check_experts(self) -> None:
        if not self.parts & set(_SPARSE):
            return
        one_of("hidden_act", self.hidden_act, ("silu", "situ"))
        one_of("moe_router_activation_func", self.moe_router_activation_func, ("sigmoid", "softmax"))
        for name in ("num_experts", "num_experts_per_token", "moe_intermediate_size", "num_expert_group", "topk_group"):
            positive_int(name, getattr(self, name))
        positive_int("num_shared_experts", self.num_shared_experts, minimum=0)
        if self.routed_expert_hidden_size is not None:
            positive_int("routed_expert_hidden_size", self.routed_expert_hidden_size)
        positive_float("routed_scaling_factor", self.routed_scaling_factor)
        experts, groups, kept = self.num_experts, self.num_expert_group, self.topk_group
        if experts % groups or (groups > kept and experts // groups < 2):
            raise ConfigError(
                f"num_expert_group ({groups}) must split num_experts ({experts}) into equal groups of 2 or more"
            )
        if not kept <= groups:
            raise ConfigError(f"topk_group ({kept}) is more than num_expert_group ({groups})")
        if kept * (experts // groups) < self.num_experts_per_token:
            raise ConfigError(
                f"num_experts_per_token ({self.num_experts_per_token}) is more than the {kept * (experts // groups)} experts "
                f"that num_experts ({experts}) and topk_group ({kept}) leave to choose from"
            )

    def delta_options(self, mixer: str) -> dict[str, Any]:
        """`short_conv_kernel_size`, `output_norm` and `output_gate` of "delta_net" or "gated_delta_net"."""
        return {
            name: default if getattr(self, name) is None else getattr(self, name)
            for name, default in _DELTA_DEFAULTS[mixer].items()
        }

    # Derived, so never written to config.json; the mixers shared with the Kimi models, transformers' caches and masks
    # read these names.

    @property
    def parts(self) -> set[str]:
        """All mixers, feed-forwards, residuals and norms in use."""
        return {*_as_list(self.mixer), *_as_list(self.feed_forward), self.residual, self.norm}

    @property
    def mixers(self) -> list[str]:
        """The mixer of every layer."""
        return _per_layer(self.mixer, self.num_hidden_layers)

    @property
    def feed_forwards(self) -> list[str]:
        """The feed-forward of every layer."""
        return _per_layer(self.feed_forward, self.num_hidden_layers)

    @property
    def layer_types(self) -> list[str]:
        return [MIXERS[name] for name in self.mixers]

    @property
    def mlp_layer_types(self) -> list[str]:
        return ["sparse" if name in _SPARSE else "dense" for name in self.feed_forwards]

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism cuts the feed-forwards that are there; the mixers stay whole, as on the Kimi models."""
        plan = {}
        if {"swiglu", "situ_glu"} & self.parts:
            plan["layers.*.mlp.gate_proj"] = "colwise"
        if {"swiglu", "situ_glu", "gelu_mlp"} & self.parts:
            plan.update({"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"})
        if self.parts & set(_SPARSE):
            experts = "layers.*.block_sparse_moe.experts"
            plan.update({f"{experts}.gate_up_proj": "packed_colwise", f"{experts}.down_proj": "rowwise"})
            plan[experts] = "moe_tp_experts"
            if self.num_shared_experts:
                shared = "layers.*.block_sparse_moe.shared_experts"
                plan.update({f"{shared}.gate_proj": "colwise", f"{shared}.up_proj": "colwise"})
                plan[f"{shared}.down_proj"] = "rowwise"
        return plan

    @property
    def base_model_ep_plan(self) -> dict[str, str]:
        """Which experts' tensors expert parallelism spreads."""
        experts = "layers.*.block_sparse_moe.experts"
        plan = {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}
        return {**plan, experts: "ep_dispatch_experts"} if self.parts & set(_SPARSE) else {}

    @property
    def linear_attn_config(self) -> dict[str, Any]:
        """What `KimiDeltaAttention` reads, in the released form."""
        return {
            "num_heads": self.linear_num_heads,
            "head_dim": self.linear_head_dim,
            "short_conv_kernel_size": self.short_conv_kernel_size or 4,
            "gate_lower_bound": self.gate_lower_bound,
            "use_full_rank_gate": self.use_full_rank_gate,
        }

    @property
    def rms_norm_eps(self) -> float:
        return self.norm_eps

    @rms_norm_eps.setter
    def rms_norm_eps(self, value: float) -> None:
        self.norm_eps = value

    @property
    def situ_beta(self) -> float:
        return float(self.activation_situ_beta or 1.0)

    @property
    def head_dim(self) -> int:
        """Width of a head of softmax attention."""
        return self.hidden_size // self.num_attention_heads

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key of latent attention (of softmax attention where there is none)."""
        if "latent_attention" not in self.parts:
            return self.head_dim
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads


def _as_list(names: str | list[str] | tuple[str, ...]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _per_layer(names: str | list[str], layers: int) -> list[str]:
    names = _as_list(names)
    return [names[i % len(names)] for i in range(layers)]
