"""The shapes at which kernels are compiled ahead of time: the geometry of Kimi K3, in bf16, and fp32 where it differs.

Each case calls an operation's Triton door on tensors without storage; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kimi_hf.ops.delta_rule.kernels import delta_rule_triton
from kimi_hf.ops.depth_attention.kernels import depth_attention_triton, inverse_rms_triton
from kimi_hf.ops.gated_norm.kernels import gated_norm_triton
from kimi_hf.ops.grouped_experts.kernels import grouped_experts_triton
from kimi_hf.ops.kda.kernels import kda_triton
from kimi_hf.ops.kda_decode.kernels import kda_decode_triton
from kimi_hf.ops.latent_attention.kernels import latent_attention_triton
from kimi_hf.ops.linear_attention.kernels import linear_attention_triton
from kimi_hf.ops.mxfp4.packed import PackedWeight
from kimi_hf.ops.short_conv.kernels import short_conv_triton
from kimi_hf.ops.situ.kernels import situ_glu_triton, situ_triton

TOKENS, HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE = 4096, 7168, 96, 128, 3072
FP32 = torch.float32


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def _train(*outputs: Tensor) -> None:
    """Run the backward, so that its launches are recorded too."""
    used = [o for o in outputs if o is not None]
    torch.autograd.backward(used, [torch.empty_like(o) for o in used])


def _gated_norm(width: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    def case() -> None:
        x, gate = (_tensor(TOKENS, HEADS, width, dtype=dtype) for _ in range(2))
        _train(gated_norm_triton(x, _tensor(width, dtype=FP32), gate, eps=1e-5, activation="sigmoid"))

    return case


def _situ() -> None:
    _train(situ_glu_triton(_tensor(1, TOKENS, 2 * INTERMEDIATE), beta=4.0, linear_beta=25.0))
    _train(situ_triton(_tensor(1, TOKENS, 6144), _tensor(1, TOKENS, 6144), beta=4.0, linear_beta=25.0))


def _short_conv(tokens: int, packed: bool, train: bool) -> Callable[[], None]:
    def case() -> None:
        cu = torch.empty(9, dtype=torch.int32, device="meta") if packed else None
        sequences = 8 if packed else 1
        with torch.set_grad_enabled(train):
            outputs = short_conv_triton(
                _tensor(1, tokens, HEADS * HEAD_DIM, grad=train),
                _tensor(HEADS * HEAD_DIM, 4, dtype=FP32, grad=train),
                activation="silu",
                initial_state=_tensor(sequences, HEADS * HEAD_DIM, 4, grad=train),
                output_final_state=True,
                cu_seqlens=cu,
            )
        if train:
            _train(*outputs)

    return case


def _depth_attention(blocks: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    def case() -> None:
        bank = [_tensor(1, TOKENS, width, dtype=dtype) for _ in range(blocks)]
        weight, inverse = _tensor(width, dtype=FP32), _tensor(blocks, 1, TOKENS, dtype=FP32)
        _train(depth_attention_triton(bank, inverse, _tensor(1, TOKENS, width, dtype=dtype), weight, eps=1e-5))
        _train(inverse_rms_triton(_tensor(1, TOKENS, width, dtype=dtype), 1e-5))

    return case


def _cu_seqlens(sequences: int) -> Tensor:
    return torch.empty(sequences + 1, dtype=torch.int32, device="meta")


def _kda(
    lower_bound: float | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = False,
    train: bool = True,
    tokens: int = TOKENS,
    head_dim: int = HEAD_DIM,
) -> Callable[[], None]:
    def case() -> None:
        def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return _tensor(*shape, dtype=dtype, grad=train)

        wide = (1, tokens, HEADS, head_dim)
        with torch.set_grad_enabled(train):
            outputs = kda_triton(
                *(tensor(*wide) for _ in range(4)),
                tensor(1, tokens, HEADS),
                A_log=tensor(HEADS, dtype=FP32),
                dt_bias=tensor(HEADS * head_dim, dtype=FP32),
                lower_bound=lower_bound,
                initial_state=tensor(8 if packed else 1, HEADS, head_dim, head_dim, dtype=FP32),
                output_final_state=True,
                cu_seqlens=_cu_seqlens(8) if packed else None,
                inplace_state=False,
            )
        if train:
            _train(*outputs)

    return case


def _delta_rule(gated: bool) -> Callable[[], None]:
    def case() -> None:
        wide, heads = (1, TOKENS, 16, HEAD_DIM), (1, TOKENS, 16)
        _train(
            *delta_rule_triton(
                *(_tensor(*wide) for _ in range(3)),
                _tensor(*heads),
                g=_tensor(*heads, dtype=FP32) if gated else None,
                scale=0.1,
                initial_state=None,
                output_final_state=True,
                cu_seqlens=None,
                inplace_state=False,
            )
        )

    return case


def _linear_attention() -> None:
    o, _ = linear_attention_triton(
        *(_tensor(1, TOKENS, 16, 64) for _ in range(3)),
        normalize=True,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=None,
        inplace_state=False,
    )
    _train(o)


def _kda_decode(rows: int, head_dim: int = HEAD_DIM) -> Callable[[], None]:
    def case() -> None:
        P = HEADS * head_dim
        flat = [_tensor(rows, width, grad=False) for width in (P, P, P, P, HEADS, P)]
        kda_decode_triton(
            *flat,
            _tensor(rows, 3 * P, 4, grad=False),
            _tensor(rows, HEADS, head_dim, head_dim, dtype=FP32, grad=False),
            conv_weights=tuple(_tensor(P, 4, dtype=FP32, grad=False) for _ in range(3)),
            A_log=_tensor(HEADS, dtype=FP32, grad=False),
            dt_bias=_tensor(P, dtype=FP32, grad=False),
            lower_bound=-5.0,
            norm_weight=_tensor(head_dim, dtype=FP32, grad=False),
            eps=1e-5,
            real=None if rows == 1 else torch.empty(rows, dtype=torch.bool, device="meta"),
        )

    return case


def _latent_attention(masked: bool, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    def case() -> None:
        B, A, S = 8, HEADS, 16384
        shapes = ((B, 1, A, 128), (B, 1, A, 64), (B, S, 512), (B, S, 64), (A, 256, 512))
        latent_attention_triton(
            *(_tensor(*shape, dtype=dtype, grad=False) for shape in shapes),
            scale=0.07,
            mask=torch.empty(B, 1, 1, S, dtype=torch.bool, device="meta") if masked else None,
            is_causal=True,
            form=None,
            need_weights=False,
        )

    return case


def _experts(tokens: int, train: bool, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    def case() -> None:
        E, Z, k = 896, 3584, 16

        def packed(out: int, width: int) -> PackedWeight:
            return PackedWeight(
                torch.empty(E, out, width // 2, dtype=torch.uint8, device="meta"),
                torch.empty(E, out, width // 32, dtype=torch.uint8, device="meta"),
            )

        y = grouped_experts_triton(
            _tensor(tokens, Z, dtype=dtype, grad=train),
            torch.empty(tokens, k, dtype=torch.int64, device="meta"),
            _tensor(tokens, k, dtype=FP32, grad=train),
            packed(2 * INTERMEDIATE, Z),
            packed(Z, INTERMEDIATE),
            lambda x: situ_glu_triton(x, beta=4.0, linear_beta=25.0),
        )
        if train:
            _train(y)

    return case


# What a model of Kimi K3's kind runs: these spill nothing.
MAIN: dict[str, Callable[[], None]] = {
    "gated_norm": _gated_norm(HEAD_DIM),
    "situ": _situ,
    "short_conv": _short_conv(TOKENS, packed=False, train=True),
    "short_conv packed": _short_conv(TOKENS, packed=True, train=True),
    "short_conv decode": _short_conv(1, packed=False, train=False),
    "depth_attention": _depth_attention(8, HIDDEN),
    "kda": _kda(-5.0),
    "kda packed": _kda(-5.0, packed=True),
    "kda softplus": _kda(None),
    "kda few tokens": _kda(-5.0, train=False, tokens=4),
    "gated delta rule": _delta_rule(gated=True),
    "delta rule": _delta_rule(gated=False),
    "linear attention": _linear_attention,
    "kda_decode 1 row": _kda_decode(1),
    "kda_decode 64 rows": _kda_decode(64),
    "latent_attention": _latent_attention(masked=False),
    "latent_attention masked": _latent_attention(masked=True),
    "experts 1 token": _experts(1, train=False),
    "experts 64 tokens": _experts(64, train=False),
    "experts 8192 tokens": _experts(8192, train=True),
}
# The ends of what the kernels accept.
OTHERS: dict[str, Callable[[], None]] = {
    "gated_norm rows of 8192": _gated_norm(8192, FP32),
    "depth_attention fp32": _depth_attention(8, HIDDEN, FP32),
    "depth_attention 16 blocks": _depth_attention(16, 8192),
    "depth_attention fp32, 16 blocks": _depth_attention(16, 8192, FP32),
    "kda fp32": _kda(-5.0, dtype=FP32),
    "kda heads of 256": _kda(None, head_dim=256, tokens=1024),
    "kda fp32, heads of 256": _kda(None, dtype=FP32, head_dim=256, tokens=1024),
    "kda_decode 1 row, heads of 256": _kda_decode(1, 256),
    "latent_attention fp32": _latent_attention(masked=False, dtype=FP32),
    "experts fp32": _experts(8192, train=True, dtype=FP32),
}
CASES = MAIN | OTHERS
