"""The operations `gpu_check.py` checks and times: inputs, the call, and what it moves and computes at least.

`bytes` counts every input and output once, in the types they have; `flops` counts the matrix products of the chunked
algebra (two flops a multiply-add). A `train` row is forward and backward together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_hf.ops.delta_rule import delta_rule
from kimi_hf.ops.depth_attention import depth_attention, inverse_rms
from kimi_hf.ops.gated_norm import gated_norm
from kimi_hf.ops.grouped_experts import grouped_experts
from kimi_hf.ops.kda import kda
from kimi_hf.ops.kda_decode import kda_decode
from kimi_hf.ops.latent_attention import latent_attention
from kimi_hf.ops.linear_attention import linear_attention
from kimi_hf.ops.mxfp4.packed import PackedWeight
from kimi_hf.ops.short_conv import short_conv
from kimi_hf.ops.situ import situ_glu

Tensors = dict[str, Tensor]
FP32 = torch.float32


@dataclass(frozen=True)
class Sizes:
    """`tokens` of prefill and training, `rows` of decoding, and the model's dimensions."""

    tokens: int = 8192
    rows: int = 8
    heads: int = 96
    head_dim: int = 128
    hidden: int = 7168
    inner: int = 3072
    latent: int = 3584
    experts: int = 896
    top_k: int = 16
    blocks: int = 8
    context: int = 16384
    rank: int = 512
    rope: int = 64


SPEED = Sizes()
# A definition in float64 on the CPU must be affordable: real widths, fewer tokens and heads. 331 tokens end mid-chunk.
CHECK = Sizes(tokens=331, rows=3, heads=4, inner=256, latent=512, experts=16, top_k=4, context=700)
TOY = Sizes(tokens=19, rows=2, heads=1, head_dim=16, hidden=48, inner=32, latent=32, experts=3, top_k=2, blocks=2,
            context=20, rank=16, rope=8)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One operation.

    make(sizes, dtype, generator) gives its tensors on the generator's device; call(tensors, backend) gives its outputs.
    """

    name: str
    make: Callable[[Sizes, torch.dtype, torch.Generator], Tensors]
    call: Callable[[Tensors, str | None], object]
    bytes: Callable[[Sizes, bool], float]
    flops: Callable[[Sizes, bool], float] = lambda sizes, train: 0.0
    trains: bool = True
    decodes: bool = False  # timed as a CUDA graph
    updates: tuple[str, ...] = ()  # tensors written in place; they are outputs too
    rivals: tuple[str, ...] = ("eager", "compile")
    options: dict = field(default_factory=dict)


class _Random:
    """Shorthand for inputs of one case."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator):
        self.dtype, self.generator = dtype, generator

    def __call__(self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return values.mul_(scale).add_(shift).to(dtype or self.dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.generator.device).to(dtype)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        device = self.generator.device
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=self.generator, device=device)


def _gated_norm(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    r, shape = _Random(dtype, g), (1, s.tokens, s.heads, s.head_dim)
    return {"x": r(*shape), "weight": r(s.head_dim, dtype=FP32), "gate": r(*shape)}


def _situ(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    return {"gate_up": _Random(dtype, g)(s.tokens, 4 * s.inner, scale=4.0)}


def _short_conv(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    r, C = _Random(dtype, g), s.heads * s.head_dim
    return {"x": r(1, s.tokens, C), "weight": r(C, 4, dtype=FP32), "initial_state": r(1, C, 4)}


def _depth(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    r = _Random(dtype, g)
    bank = r(s.blocks, 1, s.tokens, s.hidden)
    inverse = inverse_rms(bank.float(), 1e-5)
    return {"bank": bank, "inv_rms": inverse, "prefix": r(1, s.tokens, s.hidden), "weight": r(s.hidden, dtype=FP32)}


def _kda(s: Sizes, dtype: torch.dtype, g: torch.Generator, rows: int = 1, tokens: int | None = None) -> Tensors:
    r, tokens = _Random(dtype, g), s.tokens if tokens is None else tokens
    wide = (rows, tokens, s.heads, s.head_dim)
    return {
        "q": r(*wide), "k": r(*wide), "v": r(*wide), "g": r(*wide), "beta": r(*wide[:3]),
        "A_log": r.uniform(s.heads), "dt_bias": r(s.heads * s.head_dim, shift=-4.0, dtype=FP32),
        "initial_state": r(rows, s.heads, s.head_dim, s.head_dim, dtype=FP32),
    }  # fmt: skip


def _packed(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    """Four sequences, one of them empty, in one row."""
    tensors, ends = _kda(s, dtype, g), [0, s.tokens // 3, s.tokens // 3, s.tokens // 2, s.tokens]
    tensors["initial_state"] = tensors["initial_state"].expand(4, -1, -1, -1).clone()
    return tensors | {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=g.device)}


def _delta(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    r, wide = _Random(dtype, g), (1, s.tokens, s.heads, s.head_dim)
    return {
        "q": r(*wide), "k": torch.nn.functional.normalize(r(*wide, dtype=FP32), dim=-1).to(dtype), "v": r(*wide),
        "beta": r.uniform(*wide[:3], dtype=dtype), "g": -r.uniform(*wide[:3]),
    }  # fmt: skip


def _linear(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    r, wide = _Random(dtype, g), (1, s.tokens, s.heads, s.head_dim)
    return {"q": r(*wide), "k": r(*wide), "v": r(*wide)}


def _step(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    r, P = _Random(dtype, g), s.heads * s.head_dim
    flat = {name: r(s.rows, P) for name in ("q", "k", "v", "g", "gate")}
    return flat | {
        "beta": r(s.rows, s.heads), "window": r(s.rows, 3 * P, 4),
        "state": r(s.rows, s.heads, s.head_dim, s.head_dim, dtype=FP32),
        **{f"conv{i}": r(P, 4, dtype=FP32) for i in range(3)}, "A_log": r.uniform(s.heads),
        "dt_bias": r(P, shift=-4.0, dtype=FP32), "norm_weight": r(s.head_dim, dtype=FP32),
    }  # fmt: skip


def _run_step(t: Tensors, backend: str | None) -> Tensor:
    inputs = (t[n] for n in ("q", "k", "v", "g", "beta", "gate", "window", "state"))
    gates = {n: t[n] for n in ("A_log", "dt_bias", "norm_weight")}
    convs = (t["conv0"], t["conv1"], t["conv2"])
    return kda_decode(*inputs, conv_weights=convs, **gates, lower_bound=-5.0, eps=1e-5, backend=backend)


def _latent(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
    r, n = _Random(dtype, g), s.head_dim
    return {
        "q_nope": r(s.rows, 1, s.heads, n), "q_rope": r(s.rows, 1, s.heads, s.rope),
        "latent": r(s.rows, s.context, s.rank), "k_rope": r(s.rows, s.context, s.rope),
        "kv_b_weight": r(s.heads * 2 * n, s.rank, scale=s.rank**-0.5),
    }  # fmt: skip


def _run_latent(t: Tensors, backend: str | None) -> Tensor:
    n, rope = t["q_nope"].shape[-1], t["q_rope"].shape[-1]
    form = "absorbed" if backend in ("triton", "reference") else None
    return latent_attention(**t, v_head_dim=n, scale=(n + rope) ** -0.5, form=form, backend=backend)[0]


def _experts(tokens: Callable[[Sizes], int]) -> Callable[..., Tensors]:
    def make(s: Sizes, dtype: torch.dtype, g: torch.Generator) -> Tensors:
        r, N = _Random(dtype, g), tokens(s)
        return {
            "hidden": r(N, s.latent), "weights": r.uniform(N, s.top_k),
            "indices": r.uniform(N, s.experts).topk(s.top_k).indices,
            "up_packed": r.bytes(s.experts, 2 * s.inner, s.latent // 2),
            "up_scale": r.bytes(s.experts, 2 * s.inner, s.latent // 32, low=118, high=122),
            "down_packed": r.bytes(s.experts, s.latent, s.inner // 2),
            "down_scale": r.bytes(s.experts, s.latent, s.inner // 32, low=118, high=122),
        }  # fmt: skip

    return make


def _run_experts(t: Tensors, backend: str | None) -> Tensor:
    up, down = PackedWeight(t["up_packed"], t["up_scale"]), PackedWeight(t["down_packed"], t["down_scale"])

    def act(x: Tensor) -> Tensor:
        return situ_glu(x, beta=4.0, linear_beta=25.0, backend=backend)

    return grouped_experts(t["hidden"], t["indices"], t["weights"], up, down, act, backend=backend)


def _run_kda(lower_bound: float | None) -> Callable[[Tensors, str | None], object]:
    return lambda t, backend: kda(**t, lower_bound=lower_bound, output_final_state=True, backend=backend)


def _rule_flops(s: Sizes, train: bool, *, delta: bool = True, chunk: int = 64) -> float:
    """Products of the chunked algebra of one token and head, K = V; the backward is counted as twice the forward."""
    K, C = s.head_dim, chunk
    scores, solve = 2 * C * K * (2 if delta else 1), C * C / 3 + 4 * C * K if delta else 0
    scan, output = 2 * K * K * (2 if delta else 1), 2 * K * K + 2 * C * K
    return s.tokens * s.heads * (scores + solve + scan + output) * (3 if train else 1)


def _wide(s: Sizes) -> float:
    """Bytes of one bf16 tensor [tokens, heads, head_dim]."""
    return 2.0 * s.tokens * s.heads * s.head_dim


def _expert_bytes(s: Sizes, tokens: int) -> float:
    touched = s.experts * (1 - (1 - s.top_k / s.experts) ** tokens)  # expected, tokens choosing independently
    return touched * 3 * s.inner * s.latent * (0.5 + 1 / 32)


def _state_bytes(s: Sizes) -> float:
    """One read and one write of the states of all rows."""
    return 8.0 * s.rows * s.heads * s.head_dim**2


CASES = (
    Case("gated_norm", _gated_norm, lambda t, b: gated_norm(**t, eps=1e-5, backend=b),
         lambda s, train: _wide(s) * (8 if train else 3)),
    Case("situ_glu", _situ, lambda t, b: situ_glu(**t, beta=4.0, linear_beta=25.0, backend=b),
         lambda s, train: 4.0 * s.tokens * s.inner * (8 if train else 3)),
    Case("short_conv", _short_conv, lambda t, b: short_conv(**t, output_final_state=True, backend=b),
         lambda s, train: _wide(s) * (5 if train else 2)),
    Case("depth_attention", _depth, lambda t, b: depth_attention(**t, eps=1e-5, backend=b),
         lambda s, train: 2.0 * s.tokens * s.hidden * ((3 * s.blocks + 5) if train else s.blocks + 2)),
    Case("kda bounded", _kda, _run_kda(-5.0), lambda s, train: _wide(s) * (14 if train else 5), _rule_flops,
         rivals=("eager", "fla")),
    Case("kda packed", _packed, _run_kda(-5.0), lambda s, train: _wide(s) * (14 if train else 5), _rule_flops,
         rivals=("fla",)),
    Case("kda softplus", _kda, _run_kda(None), lambda s, train: _wide(s) * (14 if train else 5), _rule_flops,
         rivals=("fla",)),
    Case("gated delta rule", _delta, lambda t, b: delta_rule(**t, output_final_state=True, backend=b),
         lambda s, train: _wide(s) * (11 if train else 4), _rule_flops, rivals=()),
    Case("delta rule", _delta, lambda t, b: delta_rule(**{n: x for n, x in t.items() if n != "g"}, backend=b),
         lambda s, train: _wide(s) * (11 if train else 4), _rule_flops, rivals=()),
    Case("linear attention", _linear, lambda t, b: linear_attention(**t, backend=b),
         lambda s, train: _wide(s) * (11 if train else 4),
         lambda s, train: _rule_flops(s, train, delta=False), rivals=()),
    Case("kda one token", lambda s, d, g: _kda(s, d, g, s.rows, 1),
         lambda t, b: kda(**t, lower_bound=-5.0, inplace_state=True, backend=b)[0],
         lambda s, train: _state_bytes(s), trains=False, decodes=True, updates=("initial_state",),
         rivals=("eager", "fla")),
    Case("kda_decode", _step, _run_step, lambda s, train: _state_bytes(s), trains=False, decodes=True,
         updates=("state", "window"), rivals=("eager",)),
    Case("latent_attention", _latent, _run_latent, lambda s, train: 2.0 * s.rows * s.context * (s.rank + s.rope),
         lambda s, train: 2.0 * s.rows * s.heads * s.context * (2 * s.rank + s.rope), trains=False, decodes=True,
         rivals=("eager",)),
    Case("experts decode", _experts(lambda s: s.rows), _run_experts, lambda s, train: _expert_bytes(s, s.rows),
         trains=False, decodes=True, rivals=("eager",)),
    Case("experts prefill", _experts(lambda s: s.tokens), _run_experts,
         lambda s, train: _expert_bytes(s, s.tokens),
         lambda s, train: s.tokens * s.top_k * 6.0 * s.inner * s.latent * (2 if train else 1), rivals=("eager",)),
)  # fmt: skip
