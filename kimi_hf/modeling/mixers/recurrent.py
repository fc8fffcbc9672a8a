"""What the recurrent mixers of the ladder share: project the tokens, run over them from the cache's state, finish."""

from torch import Tensor, nn

from ..cache import TokenInputs, recurrent_layer
from ..sequence import MaskInfo, PaddedRows, SequenceLayout


class RecurrentMixer(nn.Module):
    """A mixer with a state of constant size; a subclass says what it projects, how it advances, and how it ends.

    Args:
        config: a `LadderConfig`.
        layer_idx: 0-based, the cache layer this mixer owns.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.linear_num_heads
        self.head_dim, self.value_dim = config.linear_head_dim, config.linear_value_head_dim or config.linear_head_dim

    def forward(
        self, hidden_states: Tensor, mask_info: MaskInfo | None = None, past_key_values=None, **kwargs
    ) -> tuple[Tensor, None]:
        """(B, T, D) -> (B, T, D), None. Continues from the cache's state, and leaves the new one there."""
        layout = None if mask_info is None else mask_info.layout
        inputs = TokenInputs(self.project(hidden_states), layout.real if isinstance(layout, PaddedRows) else None)
        layer = recurrent_layer(past_key_values, self.layer_idx)
        if layer is None:
            mixed, _, _ = self.advance(inputs, None, None, layout, keep=False)
        else:
            mixed = layer.run(inputs, self.advance, layout)
        return self.finish(mixed, hidden_states), None

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """(B, T, D) -> what the recurrence consumes, tensors (B, T, C) that depend on their own token only."""
        raise NotImplementedError

    def advance(
        self,
        inputs: TokenInputs,
        window: Tensor | None,
        state: Tensor | None,
        layout: SequenceLayout | None,
        keep: bool,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run the recurrence over `inputs`.

        Args:
            inputs: what `project` gave.
            window: earlier raw inputs of the convolutions, or None.
            state: the state (B, H, K, V or V + 1) fp32, or None.
            layout: where sequences begin and which tokens are padding.
            keep: also return the window and state after the last token.
            inplace: the new state may be written over `state` (no gradients).
        Returns:
            o (B, T, H V); window (None without convolutions) and state, or None.
        """
        raise NotImplementedError

    def finish(self, mixed: Tensor, hidden_states: Tensor) -> Tensor:
        """o (B, T, H V) and the mixer's input (B, T, D) -> (B, T, D)."""
        raise NotImplementedError

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, H C) -> (B, T, H, C)."""
        return x.unflatten(-1, (self.num_heads, -1))
