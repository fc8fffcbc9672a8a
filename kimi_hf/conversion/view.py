"""One way to look at checkpoints in any of our layouts: canonical names, and expert matrices one by one.

Canonical names are the released ones without the composite prefix: `model.layers.3.self_attn.A_log`, `lm_head.weight`,
`vision_tower...`; an expert matrix is (layer, expert, "w1" | "w2" | "w3"), however it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kimi_hf.checkpoint.check import expert_layout, text_prefix
from kimi_hf.checkpoint.geometry import TextGeometry, is_kimi, load_config
from kimi_hf.checkpoint.layout import DTYPE_BYTES, is_vision
from kimi_hf.checkpoint.shards import Checkpoint, TensorEntry, open_checkpoint
from kimi_hf.conversion.recipes import ByteRange, Matrix
from kimi_hf.errors import CheckpointError

MATRICES = ("w1", "w2", "w3")


class CheckpointView:
    """A checkpoint and its config, addressed by canonical names.

    `experts` says how routed experts are stored (see `layout.EXPERT_LAYOUTS`), `common` maps canonical names of all
    other tensors to their entries.
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]):
        self.checkpoint = checkpoint
        self.config = config
        self.text = TextGeometry.from_config(config)
        self.experts = expert_layout(checkpoint)
        self.prefix, self.inner = text_prefix(checkpoint.entries)
        self.common = {
            self.canonical(name): entry for name, entry in checkpoint.entries.items() if ".experts." not in name
        }

    @classmethod
    def open(cls, folder: str | Path, allow_absent: bool = False) -> CheckpointView:
        """Open a checkpoint folder with its config.json; see `open_checkpoint`.

        Raises: CheckpointError for a damaged folder, or one of another kind of model.
        """
        checkpoint = open_checkpoint(folder, allow_absent)
        config = load_config(checkpoint.folder)
        if not is_kimi(config):
            raise CheckpointError(
                f"{checkpoint.folder}: model_type is {config.get('model_type')!r}; expected kimi_k3 or kimi_linear "
                f"(GPT-2 layouts are converted with --to gpt2, nanogpt or ladder)"
            )
        return cls(checkpoint, config)

    def canonical(self, name: str) -> str:
        """A stored name without prefix, with `model.`."""
        if is_vision(name):
            return name
        bare = name.removeprefix(self.prefix)
        return bare if self.inner or bare.startswith("lm_head.") else f"model.{bare}"

    @property
    def has_vision(self) -> bool:
        return any(is_vision(name) for name in self.common)

    @property
    def has_head(self) -> bool:
        return "lm_head.weight" in self.common

    @property
    def is_fused(self) -> bool:
        return self.experts.startswith("fused")

    @property
    def is_packed(self) -> bool:
        return self.experts.endswith("packed")

    def get(self, canonical: str) -> TensorEntry:
        entry = self.common.get(canonical)
        return self.checkpoint.entry(self.stored(canonical)) if entry is None else entry

    def stored(self, canonical: str) -> str:
        """The stored spelling of a canonical name of a text tensor."""
        bare = canonical if self.inner or canonical.startswith("lm_head.") else canonical.removeprefix("model.")
        return f"{self.prefix}{bare}"

    def whole(self, canonical: str) -> ByteRange:
        return ByteRange.whole(self.checkpoint, self.get(canonical))

    def stem(self, layer: int) -> str:
        """Stored name of a layer's experts, up to and with `experts.`."""
        return f"{self.prefix}{self.inner}layers.{layer}.block_sparse_moe.experts."

    def matrix(self, layer: int, expert: int, which: str) -> Matrix:
        """Expert matrix w1 (gate, (I, Z)), w2 (down, (Z, I)) or w3 (up, (I, Z)) of a 0-based layer.

        Raises: CheckpointError if it is not there.
        """
        inter, width = self.text.moe_intermediate, self.text.expert_width
        rows, cols = (width, inter) if which == "w2" else (inter, width)
        stem = self.stem(layer)
        name = f"{stem}{expert}.{which}"
        parts = {
            part: self._part(stem, name, expert, which, part)
            for part in (("packed", "scale") if self.is_packed else ("dense",))
        }
        first = next(iter(parts.values()))
        expected = rows * (cols // 2 if self.is_packed else cols * DTYPE_BYTES[first.entry.dtype])
        if first.nbytes != expected:
            raise CheckpointError(f"{name}: {first.nbytes} bytes, the config gives {expected}; config.json is wrong")
        return Matrix(name, rows, cols, first.entry.dtype, parts.get("dense"), parts.get("packed"), parts.get("scale"))

    def _part(self, stem: str, name: str, expert: int, which: str, part: str) -> ByteRange:
        if not self.is_fused:
            ending = "weight" if part == "dense" else f"weight_{part}"
            return ByteRange.whole(self.checkpoint, self.checkpoint.entry(f"{name}.{ending}"))
        fused = f"{stem}{'down_proj' if which == 'w2' else 'gate_up_proj'}" + ("" if part == "dense" else f"_{part}")
        entry = self.checkpoint.entry(fused)
        one = ByteRange.whole(self.checkpoint, entry).row(expert, entry.shape[0])
        if which == "w2":
            return one
        return one.row(0 if which == "w1" else 1, 2)  # gate_up_proj = [w1; w3]

    def expert_count(self, layer: int) -> int:
        """How many experts a layer holds, as stored."""
        return self.text.num_experts if self.text.is_moe(layer) else 0

    def matrices(self) -> Iterator[tuple[int, int, str]]:
        """(layer, expert, matrix) of every routed expert, in order."""
        for layer in range(self.text.num_layers):
            for expert in range(self.expert_count(layer)):
                for which in MATRICES:
                    yield layer, expert, which
