"""Whether head and embedding are one tensor, and whether the configuration says so."""

import torch
from torch import nn

from ..errors import ConfigError


def check_tying(model: nn.Module) -> None:
    """Raise `ConfigError` unless head and embedding are one tensor exactly where the configuration says so.

    Weights that are not in memory are not looked at.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or head.weight.is_meta or embedding.weight.is_meta:
        return
    said = model.config.get_text_config().tie_word_embeddings
    same = head.weight is embedding.weight
    if said and not same and not torch.equal(head.weight, embedding.weight):
        raise ConfigError(
            "tie_word_embeddings is true, but the head's weight is another tensor than the embedding's; set it to false, or "
            "leave the head out of the checkpoint (of a model: call tie_weights())"
        )
    if same and not said:
        raise ConfigError(
            "tie_word_embeddings is false, but head and embedding are one tensor, of which a file holds one name; set it to "
            "true, or give the head a weight of its own"
        )
