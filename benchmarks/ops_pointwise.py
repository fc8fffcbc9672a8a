"""Pointwise and attention operations against the obvious plain PyTorch: `python -m benchmarks.ops_pointwise`.

Each row first checks that the variants agree, then times them in turn. Options: `--threads N`, `--only situ,router`,
`--json FILE` (one JSON line a row).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.timing import interleave, machine, report
from kimi_hf.ops.depth_attention import depth_attention, inverse_rms
from kimi_hf.ops.latent_attention import latent_attention
from kimi_hf.ops.mxfp4 import pack, packed_matmul, unpack
from kimi_hf.ops.router import route
from kimi_hf.ops.situ import situ_glu

Row = tuple[str, dict[str, Callable[[], object]]]


def forward_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    """A closure that runs `function` and its backward from a fixed cotangent, and returns the value."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    with torch.no_grad():
        cotangent = torch.randn_like(function(*inputs))

    def run() -> Tensor:
        out = function(*leaves)
        torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], cotangent)
        return out.detach()

    return run


def without_grad(function: Callable[..., object], *inputs: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> object:
        return function(*inputs)

    return run


def both_ways(name: str, inputs: tuple[Tensor, ...], **variants: Callable[..., Tensor]) -> Iterator[Row]:
    yield f"{name} forward", {key: without_grad(f, *inputs) for key, f in variants.items()}
    yield f"{name} forward + backward", {key: forward_backward(f, *inputs) for key, f in variants.items()}


def situ_rows() -> Iterator[Row]:
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return (4.0 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)).to(gate_up.dtype)

    def ours(gate_up: Tensor) -> Tensor:
        return situ_glu(gate_up, beta=4.0, linear_beta=25.0)

    for tokens, width, dtype in ((1, 3072, torch.float32), (2048, 1024, torch.float32), (2048, 1024, torch.bfloat16)):
        gate_up = torch.randn(tokens, 2 * width, dtype=dtype)
        yield from both_ways(f"situ {tokens} x {width} {dtype}", (gate_up,), ours=ours, plain=plain)


def router_rows() -> Iterator[Row]:
    def plain(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        scores = torch.sigmoid(linear(hidden.float(), weight.float()))
        indices = (scores + bias).topk(16, dim=-1).indices
        chosen = torch.nn.functional.one_hot(indices, weight.shape[0]).sum(1)
        weights = scores * chosen
        return weights / weights.sum(-1, keepdim=True)

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return route(hidden, weight, bias, top_k=16)[1]

    for tokens in (1, 512):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = torch.randn(tokens, 2048).to(dtype), (torch.randn(896, 2048) / 45).to(dtype), torch.randn(896) / 9
            name = f"router {tokens} tokens, 896 experts, {dtype}"
            yield (
                f"{name} forward",
                {
                    "ours": without_grad(ours, *inputs),
                    "plain one-hot": without_grad(plain, *inputs),
                },
            )


def depth_rows() -> Iterator[Row]:
    def plain(weight: Tensor, *sources: Tensor) -> Tensor:
        v = torch.stack(sources, 2).float()
        keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5)
        return ((keys @ weight).softmax(-1).unsqueeze(-2) @ v).squeeze(-2).to(sources[0].dtype)

    for tokens, width, sealed, dtype in (
        (1, 1024, 8, torch.float32),
        (1024, 1024, 2, torch.float32),
        (1024, 1024, 8, torch.float32),
        (1024, 1024, 8, torch.bfloat16),
    ):
        sources = [torch.randn(1, tokens, width, dtype=dtype) for _ in range(sealed + 1)]
        inverse = torch.stack([inverse_rms(block, 1e-5) for block in sources[:-1]])

        def ours(weight: Tensor, *sources: Tensor, inverse: Tensor = inverse) -> Tensor:
            return depth_attention(sources[:-1], inverse, sources[-1], weight, eps=1e-5)

        name = f"depth_attention {tokens} x {width}, {sealed} sealed, {dtype}"
        yield from both_ways(name, (torch.randn(width) / 32, *sources), ours=ours, plain=plain)


def latent_rows() -> Iterator[Row]:
    heads, nope, rope, width, rank = 8, 128, 64, 128, 512

    def plain(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        expanded = linear(latent, weight).unflatten(-1, (heads, -1)).transpose(1, 2)
        key = torch.cat([expanded[..., :nope], k_rope.unsqueeze(1).expand(-1, heads, -1, -1)], -1)
        causal = q.shape[1] > 1
        out = scaled_dot_product_attention(q.transpose(1, 2), key, expanded[..., nope:], is_causal=causal)
        return out.transpose(1, 2)

    def ours(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        q_nope, q_rope = q.split([nope, rope], -1)
        scale = (nope + rope) ** -0.5
        return latent_attention(q_nope, q_rope, latent, k_rope, weight, v_head_dim=width, scale=scale)[0]

    for queries, keys, dtype in (
        (1, 128, torch.float32),
        (1, 4096, torch.float32),
        (1024, 1024, torch.float32),
        (1024, 1024, torch.bfloat16),
    ):
        inputs = (
            torch.randn(1, queries, heads, nope + rope).to(dtype),
            torch.randn(1, keys, rank).to(dtype),
            torch.randn(1, keys, rope).to(dtype),
            (torch.randn(heads * (nope + width), rank) * rank**-0.5).to(dtype),
        )
        name = f"latent_attention T {queries}, S {keys}, {heads} heads, {dtype}"
        yield (
            f"{name} forward",
            {"ours": without_grad(ours, *inputs), "plain expand + sdpa": without_grad(plain, *inputs)},
        )
        if queries > 1 and dtype == torch.float32:
            yield (
                f"{name} forward + backward",
                {
                    "ours": forward_backward(ours, *inputs),
                    "plain expand + sdpa": forward_backward(plain, *inputs),
                },
            )


def mxfp4_rows() -> Iterator[Row]:
    def plain(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=dtype)
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
        groups = values[codes].unflatten(-1, (-1, 32))
        return torch.ldexp(groups, (scale.int() - 127).unsqueeze(-1)).flatten(-2).to(dtype)

    packed, scale = pack(torch.randn(3072, 3584))
    for dtype in (torch.float32, torch.bfloat16):
        yield (
            f"mxfp4 unpack 3072 x 3584 to {dtype}",
            {
                "ours": lambda dtype=dtype: unpack(packed, scale, dtype),
                "plain codes + ldexp": lambda dtype=dtype: plain(packed, scale, dtype),
            },
        )
        for tokens in (1, 64):
            x = torch.randn(tokens, 3584).to(dtype)
            yield (
                f"mxfp4 packed_matmul {tokens} x 3584 -> 3072, {dtype}",
                {
                    "ours": lambda x=x: packed_matmul(x, packed, scale),
                    "plain codes + ldexp + linear": lambda x=x: linear(x, plain(packed, scale, x.dtype)),
                },
            )


SECTIONS = {
    "situ": situ_rows,
    "router": router_rows,
    "depth_attention": depth_rows,
    "latent_attention": latent_rows,
    "mxfp4": mxfp4_rows,
}


def check(name: str, variants: dict[str, Callable[[], object]]) -> None:
    """Refuse to time variants whose values differ (sums for those that lay their weights out differently)."""
    ours, other = (run() for run in variants.values())
    if ours.shape != other.shape:  # the one-hot router's weights cover all experts
        ours, other = ours.sum(-1), other.sum(-1)
    tolerance = 3e-2 if ours.dtype == torch.bfloat16 else 1e-4
    worst = (ours.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1)
    if worst > tolerance:
        raise SystemExit(f"{name}: variants differ by {worst:.2e}, not timing a wrong result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds a row at most")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--json", type=argparse.FileType("w"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(json.dumps(machine()))
    if options.json:
        options.json.write(json.dumps(machine()) + "\n")
    for section in options.only.split(","):
        for name, variants in SECTIONS[section]():
            check(name, variants)
            report(
                name, interleave(variants, rounds=options.rounds, budget=options.budget), "ours", stream=options.json
            )


if __name__ == "__main__":
    main()
