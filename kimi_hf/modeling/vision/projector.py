"""From the tower's merged patches to the text model's embedding space."""

from collections.abc import Sequence

import torch
from torch import nn

from ...configuration.configuration_kimi_k3_vision import KimiK3VisionConfig
from ...errors import ShapeError
from .norm import VisionRMSNorm


class KimiK3PatchMergerV2(nn.Module):
    """patchmergerv2: flatten a token's patches, Linear, exact (erf) GELU, Linear, RMSNorm. No norm before, no biases.

    Its GELU is the exact one while the tower's is the tanh form, and its norm has an eps of its own
    (`projector_ln_eps`). Source: K3 specification 6.4; names of the released checkpoint below `mm_projector.`.
    """

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        rows, columns = config.merge_kernel_size
        self.input_size = rows * columns * config.mm_hidden_size
        self.proj = nn.Sequential(
            nn.Linear(self.input_size, self.input_size, bias=False),
            nn.GELU(),
            nn.Linear(self.input_size, config.text_hidden_size, bias=False),
        )
        self.post_norm = VisionRMSNorm(config.text_hidden_size, eps=config.projector_ln_eps)

    def forward(self, merged: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Project merged patches (n, 4, D) or (n, 4 * D) -> (n, text width).

        A sequence of such tensors, one per image as the tower returns them, gives a list: they are projected in one
        piece and taken apart again.

        Raises:
            ShapeError: rows of another size than the projector's input.
        """
        if isinstance(merged, torch.Tensor):
            return self.post_norm(self.proj(self._flatten(merged)))
        items = [self._flatten(item) for item in merged]
        if not items:
            return []
        return list(self(torch.cat(items)).split([len(item) for item in items]))

    def _flatten(self, merged: torch.Tensor) -> torch.Tensor:
        flat = merged.flatten(1) if merged.dim() > 1 else merged
        if flat.dim() != 2 or flat.shape[1] != self.input_size:
            raise ShapeError(
                f"the projector reads rows of {self.input_size} values, got a tensor of shape {tuple(merged.shape)}; "
                "pass the tower's pooler_output"
            )
        return flat
