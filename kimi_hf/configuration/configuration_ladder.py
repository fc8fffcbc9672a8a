"""`LadderConfig`: any mixer per layer, any feed-forward, any residual stream, with or without positions."""

import copy
from typing import Any

from ..errors import ConfigError
from .base import ReleasedSchemaConfig
from .checks import (
    fraction,
    known_names,
    lower_bound,
    one_of,
    optional_int,
    positive_float,
    positive_int,
    special_tokens,
    spread,
    switch,
)
from .ladder_parts import DELTA_DEFAULTS, MIXERS, READERS, SPARSE, as_list, check_parts
from .routing import check_routing
from .rungs import rung_fields

_SWITCHES = (
    "tie_word_embeddings",
    "use_cache",
    "use_full_rank_gate",
    "mla_use_output_gate",
    "latent_moe_use_norm",
    "output_router_logits",
)
# Keywords of transformers' configurations that are no fields.
_KEYWORDS = ("attn_implementation", "experts_implementation", "torch_dtype", "num_labels", "output_attentions")
_OPTIONAL_SWITCHES = ("bias", "output_norm", "output_gate", "moe_renormalize")


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
            ConfigError: an unknown name, a change that is no field, or a combination that does not hold.
        """
        known_names(changes, {*cls.__dataclass_fields__, *_KEYWORDS}, f"a field of {cls.__name__}")
        fields = rung_fields(name, changes)
        check_parts(fields)
        present = {*as_list(fields["mixer"]), *as_list(fields["feed_forward"]), fields["residual"], fields["norm"]}
        kept = {
            key: value
            for key, value in fields.items()
            if key in changes or key not in READERS or present & set(READERS[key])
        }
        return cls(**{"architectures": ["LadderForCausalLM"], **kept})

    def __post_init__(self, **kwargs):
        for name in ("mixer", "feed_forward"):
            if isinstance(getattr(self, name), tuple):
                setattr(self, name, list(getattr(self, name)))
        self._fill()
        self.check()
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise `ConfigError` if a field contradicts another, or if nothing reads it."""
        super().check()
        check_parts(self.__dict__)
        self._refuse_unread()
        self._check_sizes()
        self._check_activations()
        self._check_recurrent()
        if self.parts & set(SPARSE):
            one_of("hidden_act", self.hidden_act, ("silu", "situ"))
            check_routing(self)

    def _refuse_unread(self) -> None:
        present, defaults = self.parts, self._declared_defaults()
        for field, readers in READERS.items():
            value = getattr(self, field)
            off = value is False and field in (*_SWITCHES, *_OPTIONAL_SWITCHES)
            idle = value is None or off or value == defaults[field]
            if not idle and not present & set(readers):
                raise ConfigError(f"{field} is {value!r}, but nothing reads it: it belongs to {', '.join(readers)}")

    def _fill(self) -> None:
        """Give every field that a chosen part reads its value."""
        self._cut_lists()
        check_parts(self.__dict__)
        # What an earlier call filled in follows from the fields as they are now, or is not read any more.
        for field in [*self._memory.filled]:
            if self.__dict__.get(field) == self._memory.filled.pop(field):
                self.__dict__[field] = self._declared_defaults()[field]
        positive_int("hidden_size", self.hidden_size)
        positive_int("num_attention_heads", self.num_attention_heads)
        width, head = self.hidden_size, max(1, self.hidden_size // self.num_attention_heads)
        gelu = "gelu_mlp" in self.parts
        situ = "situ_glu" in self.parts or self.activation_situ_beta
        defaults = {
            "bias": True,
            "linear_num_heads": self.num_attention_heads,
            "linear_head_dim": head,
            "linear_value_head_dim": head if self.linear_head_dim is None else self.linear_head_dim,
            "kv_lora_rank": max(1, width // 4),
            "qk_nope_head_dim": head,
            "qk_rope_head_dim": max(1, head // 2),
            "v_head_dim": head,
            "intermediate_size": 4 * width if gelu else -(-8 * width // 3 // 8) * 8,
            "activation_function": "gelu_new",
            "hidden_act": "situ" if situ else "silu",
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
            if self.parts & set(READERS[field]):
                self._derive(field, value)

    def _cut_lists(self) -> None:
        """Keep the first layers of lists that were given for more, when `num_hidden_layers` was lowered since."""
        for field in ("mixer", "feed_forward"):
            names = getattr(self, field)
            shown, origin = self._memory.notes.get(field, (None, None))
            if names != shown:
                shown = origin = copy.deepcopy(names)
            layers = self.num_hidden_layers
            if self._memory.complete and isinstance(origin, list) and isinstance(layers, int) and layers > 0:
                shown = self.__dict__[field] = origin[:layers]
            self._memory.notes[field] = (shown, origin)

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"):
            positive_int(name, getattr(self, name))
        special_tokens(self, self.vocab_size)
        for name in ("residual_dropout", "embedding_dropout", "attention_dropout"):
            fraction(name, getattr(self, name))
        positive_float("norm_eps", self.norm_eps)
        spread("initializer_range", self.initializer_range)
        if "softmax_attention" in self.parts and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) does not divide hidden_size ({self.hidden_size}); give a "
                "divisor"
            )
        given = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for name in (*given, "intermediate_size", "attn_res_block_size"):
            optional_int(name, getattr(self, name))
        for name in _SWITCHES:
            switch(name, getattr(self, name))
        for name in _OPTIONAL_SWITCHES:
            if getattr(self, name) is not None:
                switch(name, getattr(self, name))

    def _check_activations(self) -> None:
        if self.activation_function is not None:
            one_of("activation_function", self.activation_function, ("gelu_new", "gelu"))
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            if getattr(self, name) is not None:
                positive_float(name, getattr(self, name))
                if "situ_glu" not in self.parts and self.hidden_act != "situ":
                    raise ConfigError(
                        f"{name} is set, but neither a layer nor the experts (hidden_act) use situ; leave it out"
                    )

    def _check_recurrent(self) -> None:
        for name in ("linear_num_heads", "linear_head_dim", "linear_value_head_dim"):
            optional_int(name, getattr(self, name))
        width = self.short_conv_kernel_size
        optional_int("short_conv_kernel_size", width, minimum=0)
        lower_bound("gate_lower_bound", self.gate_lower_bound)
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

    def delta_options(self, mixer: str) -> dict[str, Any]:
        """`short_conv_kernel_size`, `output_norm` and `output_gate` of "delta_net" or "gated_delta_net"."""
        return {
            name: default if getattr(self, name) is None else getattr(self, name)
            for name, default in DELTA_DEFAULTS[mixer].items()
        }

    # Derived, so never written to config.json; the mixers shared with the Kimi models, transformers' caches and masks
    # read these names.

    @property
    def parts(self) -> set[str]:
        """All mixers, feed-forwards, residuals and norms in use."""
        return {*as_list(self.mixer), *as_list(self.feed_forward), self.residual, self.norm}

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
        return ["sparse" if name in SPARSE else "dense" for name in self.feed_forwards]

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """How tensor parallelism cuts the feed-forwards that are there; the mixers stay whole, as on the Kimi models."""
        plan = {}
        if {"swiglu", "situ_glu"} & self.parts:
            plan["layers.*.mlp.gate_proj"] = "colwise"
        if {"swiglu", "situ_glu", "gelu_mlp"} & self.parts:
            plan.update({"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"})
        if self.parts & set(SPARSE):
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
        return {**plan, experts: "ep_dispatch_experts"} if self.parts & set(SPARSE) else {}

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


def _per_layer(names: str | list[str], layers: int) -> list[str]:
    names = as_list(names)
    return [names[i % len(names)] for i in range(layers)]
