"""Does the paper's two-phase reading of sealed blocks pay on this machine? `python -m benchmarks.depth_two_phase`.

Two-phase: when a block is sealed, all later readers' queries (24 sub-layers share the same sealed blocks in Kimi K3)
attend to the sealed blocks together, reading them once; each reader later merges its part with the open block by the
online softmax. It keeps one [B, T, D] part a reader. Compared with reading the bank afresh for every reader.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.timing import interleave, report
from kimi_hf.ops.depth_attention import depth_attention, inverse_rms

EPS = 1e-5
TILE = 64  # tokens


def sealed_parts(bank: list[Tensor], inv_rms: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """bank M x [T, D], inv_rms [M, T], queries [S, D] -> un-normalised parts [S, T, D], largest scores and sums [T, S]."""
    tokens, width = bank[0].shape
    parts = torch.empty(len(queries), tokens, width)
    largest, sums = torch.empty(tokens, len(queries)), torch.empty(tokens, len(queries))
    for start in range(0, tokens, TILE):
        tile = slice(start, start + TILE)
        v = torch.stack([block[tile] for block in bank], 1)  # [tile, M, D]
        scores = torch.matmul(v, queries.T) * inv_rms[:, tile].T[:, :, None]
        largest[tile] = scores.amax(1)
        weights = torch.exp(scores - largest[tile, None])
        sums[tile] = weights.sum(1)
        parts[:, tile] = torch.bmm(weights.mT, v).transpose(0, 1)
    return parts, largest, sums


def merge(part: Tensor, largest: Tensor, total: Tensor, prefix: Tensor, query: Tensor) -> Tensor:
    score = torch.mv(prefix, query) * inverse_rms(prefix, EPS)
    top = torch.maximum(largest, score)
    sealed, own = torch.exp(largest - top), torch.exp(score - top)
    norm = sealed * total + own
    return (part * (sealed / norm)[:, None]).addcmul_(prefix, (own / norm)[:, None])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--readers", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for tokens, width, sealed in ((1024, 1024, 2), (1024, 1024, 8), (256, 7168, 8)):
        bank = [torch.randn(tokens, width) for _ in range(sealed)]
        prefix, queries = torch.randn(tokens, width), torch.randn(options.readers, width) * width**-0.5
        inv_rms = torch.stack([inverse_rms(block, EPS) for block in bank])
        lifted = [block[None] for block in bank]

        def afresh(lifted=lifted, inv_rms=inv_rms, prefix=prefix, queries=queries) -> list[Tensor]:
            return [depth_attention(lifted, inv_rms[:, None], prefix[None], q, eps=EPS)[0] for q in queries]

        def two_phase(bank=bank, inv_rms=inv_rms, prefix=prefix, queries=queries) -> list[Tensor]:
            parts, largest, sums = sealed_parts(bank, inv_rms, queries)
            return [merge(parts[i], largest[:, i], sums[:, i], prefix, q) for i, q in enumerate(queries)]

        for a, b in zip(afresh(), two_phase(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        row = f"{options.readers} readers of {sealed} sealed blocks, {tokens} x {width}, parts keep "
        row += f"{options.readers * tokens * width * 4 / 2**20:.0f} MiB"
        report(row, interleave({"afresh": afresh, "two-phase": two_phase}, rounds=5), "afresh")


if __name__ == "__main__":
    main()
