"""Routed experts against transformers' implementations on its native Kimi-Linear experts:
`python -m benchmarks.ops_experts`.

32 experts, top-4, 1024 -> 512 -> 1024, the same weights and routing; each row first checks that the results agree.
Options: `--threads N`, `--dtype bfloat16`, `--tokens 1,64,2048`, `--json FILE`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearExperts

from benchmarks.timing import interleave, machine, report
from kimi_hf.ops.grouped_experts import grouped_experts

EXPERTS, TOP_K, WIDTH, INNER = 32, 4, 1024, 512
PEERS = ("eager", "grouped_mm")
# gathers a matrix for every pair: 1.6 GB at 64 tokens, 50 GB at 2048, so it gets a row of its own and few tokens
GATHERING, GATHERS_AT_MOST = "batched_mm", 64


def gate(gate_up: Tensor) -> Tensor:
    halves = gate_up.chunk(2, -1)
    return silu(halves[0]) * halves[1]


def native(dtype: torch.dtype) -> nn.Module:
    config = SimpleNamespace(
        num_local_experts=EXPERTS,
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    experts = KimiLinearExperts(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return experts


def variants(experts: nn.Module, tokens: int, peers: tuple[str, ...], train: bool) -> dict[str, Callable[[], object]]:
    dtype = experts.gate_up_proj.dtype
    hidden = torch.randn(tokens, WIDTH).to(dtype).requires_grad_(train)
    indices = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
    weights = torch.softmax(torch.randn(tokens, TOP_K), -1).requires_grad_(train)
    parameters = experts.gate_up_proj, experts.down_proj
    cotangent = torch.randn(tokens, WIDTH).to(dtype)

    def run(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def once() -> Tensor:
            if not train:
                with torch.no_grad():
                    return function()
            out = function()
            torch.autograd.grad(out, (hidden, weights, *parameters), cotangent)
            return out.detach()

        return once

    def peer(name: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            experts.config._experts_implementation = name
            return experts(hidden, indices, weights)

        return call

    def products() -> None:
        """What no implementation can save: each chosen expert's two products, inputs already gathered."""
        for x, inner, expert in slices:
            torch.mm(x, parameters[0][expert].T)
            torch.mm(inner, parameters[1][expert].T)

    counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
    slices = [(torch.randn(n, WIDTH).to(dtype), torch.randn(n, INNER).to(dtype), e) for e, n in enumerate(counts) if n]
    alone = {} if train else {"the products alone": torch.no_grad()(products)}
    ours = {"ours": run(lambda: grouped_experts(hidden, indices, weights, *parameters, gate))}
    return ours | {f"transformers {name}": run(peer(name)) for name in peers} | alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds a row at most")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", default="1,64,2048")
    parser.add_argument("--train", action="store_true", help="also time forward + backward")
    parser.add_argument("--json", type=argparse.FileType("w"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(json.dumps(machine()))
    if options.json:
        options.json.write(json.dumps(machine()) + "\n")
    experts = native(getattr(torch, options.dtype))
    for tokens in map(int, options.tokens.split(",")):
        rows = [(PEERS, train) for train in ((False, True) if options.train else (False,))]
        if tokens <= GATHERS_AT_MOST:
            rows.append(((GATHERING,), False))
        for peers, train in rows:
            runs = variants(experts, tokens, peers, train)
            values = {name: run().float() for name, run in runs.items() if name != "the products alone"}
            for name, value in values.items():
                worst = (value - values["ours"]).abs().max() / values["ours"].abs().max()
                if worst > (5e-2 if options.dtype == "bfloat16" else 1e-4):
                    raise SystemExit(f"{name} differs from ours by {worst:.1e}, not timing a wrong result")
            row = f"experts {tokens} tokens, {options.dtype}, {'forward + backward' if train else 'forward'}"
            report(row, interleave(runs, rounds=options.rounds, budget=options.budget), "ours", stream=options.json)


if __name__ == "__main__":
    main()
