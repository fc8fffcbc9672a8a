"""The rungs of the ladder as configuration fields: each is its lower neighbour and the few fields that changed.

Those few fields are the lesson. Sizes that a rung does not name (ranks, head sizes, experts) follow from the width.
"""

from typing import Any

from ..errors import ConfigError
from .checks import layer_count

KDA, MLA = "kimi_delta_attention", "latent_attention"
_GPT2: dict[str, Any] = {
    "mixer": "softmax_attention",
    "feed_forward": "gelu_mlp",
    "residual": "sum",
    "positions": "learned",
    "norm": "layer_norm",
    "bias": True,
}
_LINEAR_TRANSFORMER = {**_GPT2, "mixer": "linear_attention"}
_DELTA_NET = {**_LINEAR_TRANSFORMER, "mixer": "delta_net"}
_GATED_DELTA_NET = {
    **_DELTA_NET,
    "mixer": "gated_delta_net",
    "feed_forward": "swiglu",
    "positions": "none",
    "norm": "rms_norm",
    "bias": False,
}
# A feed-forward of two names is (first layer, every other layer).
_KIMI_LINEAR = {**_GATED_DELTA_NET, "mixer": [KDA, KDA, KDA, MLA], "feed_forward": ("swiglu", "moe")}
_KIMI_K3 = {
    **_KIMI_LINEAR,
    "feed_forward": ("situ_glu", "latent_moe"),
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "residual": "block_attn_res",
    "gate_lower_bound": -5.0,
    "use_full_rank_gate": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
}
RUNGS = {
    "gpt2": _GPT2,
    "linear-transformer": _LINEAR_TRANSFORMER,
    "delta-net": _DELTA_NET,
    "gated-delta-net": _GATED_DELTA_NET,
    "kimi-linear": _KIMI_LINEAR,
    "kimi-k3": _KIMI_K3,
}

_GPT2_IDS = {"bos_token_id": 50256, "eos_token_id": 50256}
_SMALL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BASE = {"vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, **_GPT2_IDS}
_SMALL = {**_BASE, "vocab_size": 16384, **_SMALL_IDS}
_TINY = {"vocab_size": 512, "hidden_size": 320, "num_hidden_layers": 8, "num_attention_heads": 5, **_SMALL_IDS}
_SPARSE_SMALL = {"hidden_size": 512, "num_attention_heads": 8, "num_experts": 16, "num_experts_per_token": 4}
_SPARSE_TINY = {"hidden_size": 256, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_token": 2}
_SIZES = {"": _BASE, "-small": _SMALL, "-tiny": _TINY}
# The rungs with experts are narrower at the same number of parameters.
_SPARSE_SIZES = {
    "kimi-linear-small": {**_SPARSE_SMALL, "moe_intermediate_size": 272},
    "kimi-linear-tiny": {**_SPARSE_TINY, "moe_intermediate_size": 144},
    "kimi-k3-small": {**_SPARSE_SMALL, "moe_intermediate_size": 480},
    "kimi-k3-tiny": {**_SPARSE_TINY, "moe_intermediate_size": 256},
}


def rung_fields(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Fields of rung `name` with `changes` over them.

    Args:
        name: a key of `RUNGS`, alone (the size of GPT-2 small) or with "-small" (about 100 million parameters) or
            "-tiny" (about 10 million).
    Raises:
        ConfigError: an unknown name, or a number of layers that is none.
    """
    given = str(name)
    suffix = next((end for end in ("-small", "-tiny") if given.endswith(end)), "")
    rung = given.removesuffix(suffix)
    if rung not in RUNGS:
        raise ConfigError(
            f"rung {name!r} is not known; known are {', '.join(RUNGS)}, each also with -small and -tiny behind its name"
        )
    fields = {**_SIZES[suffix], **_SPARSE_SIZES.get(name, {}), **RUNGS[rung], **changes}
    layer_count("num_hidden_layers", fields["num_hidden_layers"])
    if "feed_forward" not in changes and isinstance(fields["feed_forward"], tuple):
        first, other = fields["feed_forward"]
        fields["feed_forward"] = [first] + [other] * (fields["num_hidden_layers"] - 1)
    return fields
