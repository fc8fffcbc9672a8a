"""Packing documents into rows, so that no token is spent on padding."""

from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError


class DocumentCollator:
    """Lay documents behind one another in rows of `row_length` tokens, longest first into the emptiest row that fits.

    Positions restart at every document, which is how the models know their boundaries; the first label of a document
    is ignored, since nothing before it predicts it. Rows are filled up with `pad_token_id`, masked out.

    Args:
        row_length: tokens a row. Longer documents are refused.
        pad_token_id: fills the rest of a row.
        label_pad: the ignored label.
    """

    def __init__(self, row_length: int, pad_token_id: int = 0, label_pad: int = -100):
        self.row_length, self.pad_token_id, self.label_pad = row_length, pad_token_id, label_pad

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Documents with `input_ids` (and `labels`) -> `input_ids`, `labels`, `position_ids`, `attention_mask`, (B, L).

        Raises:
            ShapeError: a document longer than a row, or labels of another length than its ids.
        """
        rows: list[list[dict[str, Any]]] = []
        space: list[int] = []
        for index, document in sorted(enumerate(features), key=lambda item: -len(item[1]["input_ids"])):
            length = len(document["input_ids"])
            if length > self.row_length:
                raise ShapeError(
                    f"document {index} has {length} tokens, more than row_length {self.row_length}; cut it first"
                )
            if "labels" in document and len(document["labels"]) != length:
                raise ShapeError(f"document {index} has {length} ids but {len(document['labels'])} labels")
            fitting = [i for i, left in enumerate(space) if left >= length]
            if not fitting:
                rows.append([])
                space.append(self.row_length)
                fitting = [len(rows) - 1]
            best = min(fitting, key=lambda i: space[i])
            rows[best].append(document)
            space[best] -= length
        batch = [self._row(row) for row in rows]
        return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}

    def _row(self, documents: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids, labels, positions = [], [], []
        for document in documents:
            tokens = list(document["input_ids"])
            given = list(document.get("labels", tokens))
            ids += tokens
            labels += [self.label_pad, *given[1:]]
            positions += range(len(tokens))
        missing = self.row_length - len(ids)
        return {
            "input_ids": torch.tensor(ids + [self.pad_token_id] * missing),
            "labels": torch.tensor(labels + [self.label_pad] * missing),
            "position_ids": torch.tensor(positions + list(range(missing))),
            "attention_mask": torch.tensor([1] * len(ids) + [0] * missing),
        }
