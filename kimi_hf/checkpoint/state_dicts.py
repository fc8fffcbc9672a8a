"""Released names for `load_state_dict`, which knows none of the rules of `key_maps.py`: what Trainer resumes by."""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from .key_maps import narrow_decay

_EXPERT = re.compile(
    r"^(?P<stem>.*\bexperts)\.(?P<index>\d+)\.(?P<which>w[123])\.(?P<kind>weight|weight_packed|weight_scale)$"
)
_FUSED_SUFFIX = {"weight": "", "weight_packed": "_packed", "weight_scale": "_scale"}
# Fused matrix -> the parts of an expert that are its rows, in this order.
_MATRICES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def fuse_released_names(model: nn.Module, state_dict: dict[str, Any], prefix: str, missing: list[str]) -> None:
    """Rewrite released names below `prefix` to the model's own, in place; names already fused pass through.

    Args:
        model: a decoder whose `config` gives the heads, about to load `state_dict`.
        missing: as in `fuse_expert_names`.
    Raises:
        CheckpointError: as `fuse_expert_names`, or a decay parameter that does not fit.
    """
    heads = model.config.linear_attn_config["num_heads"]
    for name in [name for name in state_dict if name.startswith(prefix) and name.endswith(".A_log")]:
        state_dict[name] = narrow_decay(state_dict[name], heads, name)
    fuse_expert_names(model, state_dict, prefix, missing)


def fuse_expert_names(model: nn.Module, state_dict: dict[str, Any], prefix: str, missing: list[str]) -> None:
    """Stack the experts of `state_dict` that have released names, in place.

    A state dict that lacks other tensors as well is one shard of several: the experts it holds take their places among
    those that `model` has, and the names of the others are added to `missing`, as `load_state_dict` does for any tensor.

    Raises:
        CheckpointError: an expert is absent from a state dict that is whole otherwise, or is one too many; shapes differ
            between experts; experts are packed and the model's are not, or the other way round.
    """
    own = {prefix + name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    whole = all(name in state_dict for name in own if ".experts." not in name)
    groups: dict[tuple[str, str], _Experts] = {}
    for name in [name for name in state_dict if name.startswith(prefix) and ".experts." in name]:
        found = _EXPERT.match(name)
        if found is None:
            stem, _, last = name.rpartition(".")
            _refuse_other_form(name, stem, last.endswith(("_packed", "_scale")), own)
            continue
        stem, kind = found["stem"], found["kind"]
        _refuse_other_form(name, stem, kind != "weight", own)
        group = groups.setdefault((stem, kind), _Experts(stem, kind))
        group.tensors[found["which"], int(found["index"])] = state_dict.pop(name)
    for group in groups.values():
        for matrix in _MATRICES:
            target = f"{group.stem}.{matrix}{_FUSED_SUFFIX[group.kind]}"
            stacked = group.stacked(matrix, own.get(target), None if whole else missing)
            if stacked is not None:
                state_dict[target] = stacked


def _refuse_other_form(name: str, stem: str, is_packed: bool, own: dict[str, Tensor]) -> None:
    """Raise if the experts at `stem` are packed in the model and plain in the state dict, or the other way round."""
    if f"{stem}.down_proj{'' if is_packed else '_packed'}" in own:
        raise CheckpointError(
            f"the state dict holds {name}, which is {'packed (MXFP4)' if is_packed else 'not packed'}, but the model's "
            f"experts are{' not' if is_packed else ''}; call kimi_hf.quantization."
            f"{'quantize' if is_packed else 'dequantize'}(model) first, or load the checkpoint with from_pretrained"
        )


@dataclass
class _Experts:
    """The experts of one layer in a state dict: (w1, w2 or w3; expert) -> tensor."""

    stem: str
    kind: str
    tensors: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def name(self, part: str, index: int) -> str:
        return f"{self.stem}.{index}.{part}.{self.kind}"

    def stacked(self, matrix: str, current: Tensor | None, missing: list[str] | None) -> Tensor | None:
        """One tensor for all experts; with `missing`, absent ones stay as in `current` (None if nothing changes)."""
        parts = _MATRICES[matrix]
        found = {key: tensor for key, tensor in self.tensors.items() if key[0] in parts}
        count = 1 + max(index for _, index in self.tensors) if current is None else current.shape[0]
        extra = [self.name(*key) for key in found if key[1] >= count]
        if extra:
            raise CheckpointError(f"the state dict holds {extra[0]}, but the model has {count} experts in a layer")
        self._refuse_odd_shapes(found)
        absent = [(part, i) for i in range(count) for part in parts if (part, i) not in found]
        if not absent:
            return torch.stack([torch.cat([found[part, i] for part in parts]) for i in range(count)])
        if missing is None or current is None or current.is_meta or isinstance(current, DTensor):
            told = ", ".join(self.name(*key) for key in absent[:4])
            raise CheckpointError(f"the state dict lacks {told}; every expert needs w1, w2 and w3")
        return self._put_into(current, found, parts, missing, absent) if found else None

    def _put_into(
        self, current: Tensor, found: dict[tuple[str, int], Tensor], parts: tuple[str, ...], missing: list[str], absent
    ) -> Tensor:
        missing.extend(self.name(*key) for key in absent)
        stacked = current.detach().clone()
        rows = stacked.shape[1] // len(parts)
        for (part, index), tensor in found.items():
            place = stacked[index].narrow(0, rows * parts.index(part), rows)
            if tensor.shape != place.shape:
                told = f"{self.name(part, index)} is {list(tensor.shape)}"
                raise CheckpointError(f"{told}, the model's are {list(place.shape)}; it is of another model")
            place.copy_(tensor)
        return stacked

    def _refuse_odd_shapes(self, found: dict[tuple[str, int], Tensor]) -> None:
        usual = next(iter(found.values())).shape if found else None
        odd = next((key for key, tensor in found.items() if tensor.shape != usual), None)
        if odd is not None:
            shape = list(found[odd].shape)
            raise CheckpointError(f"{self.name(*odd)} is {shape}, but other experts are {list(usual)}; fetch it again")
