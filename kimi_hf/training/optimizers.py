"""Which parameters decay, and which go to Muon.

No weight decay on norms, biases, decay parameters (`A_log`, `dt_bias`), depth queries and embeddings: they set scales and
time constants, and pulling those to zero changes what they mean. Muon takes the matrices of the decoder's layers; the rest
goes to AdamW.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from ..errors import ConfigError
from ..quantization import KimiPackedExperts

logger = logging.get_logger(__name__)

_NO_DECAY = ("A_log", "dt_bias")
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "wpe")
# Projections whose rows are heads: Muon may treat each head as a matrix of its own.
_PER_HEAD = ("q_proj", "k_proj", "v_proj", "q_b_proj")


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay acts on a parameter: matrices, and the fused experts."""
    parts = name.split(".")
    if parameter.ndim < 2 or any(part in _NO_DECAY or part in _EMBEDDINGS for part in parts):
        return False
    return not any("norm" in part or part.endswith("res_proj") or part.endswith("conv1d") for part in parts)


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Two groups for AdamW, decayed and not; every trainable parameter is in exactly one."""
    _warn_of_frozen_experts(model)
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if is_decayed(name, parameter) else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _warn_of_frozen_experts(model: nn.Module) -> None:
    """Packed experts have no gradients; without adapters over them a training leaves most of the model as it was."""
    if not any(isinstance(module, KimiPackedExperts) for module in model.modules()):
        return
    if not any(".experts." in name and p.requires_grad for name, p in model.named_parameters()):
        logger.warning(
            "The routed experts are packed in MXFP4 and stay as they are. To train them, put adapters over them "
            '(kimi_hf.training.lora_config("experts", model=model)) or load with '
            "quantization_config=KimiMxfp4Config(dequantize=True)."
        )


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's own Muon on the layers' matrices, AdamW on everything else, as one optimiser that a Trainer can hold.

    Args:
        model: the model; 2-D weights of decoder layers go to Muon, fused experts and the rest to AdamW.
        lr: for both (Muon adjusts its updates to AdamW's size). weight_decay: of decayed parameters.
        per_head: orthogonalise the q, k, v projections head by head, as K3's training did.
        muon, adamw: further arguments of the two optimisers.
    Raises:
        ConfigError: this torch has no Muon, no matrix of a decoder layer is trainable, or `per_head` on a model that is
            split over processes.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        per_head: bool = False,
        muon: dict[str, Any] | None = None,
        adamw: dict[str, Any] | None = None,
    ):
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(f"torch {torch.__version__} has no torch.optim.Muon; use 2.9 or newer, or AdamW")
        _warn_of_frozen_experts(model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [(n, p) for n, p in named if ".layers." in f".{n}" and p.ndim == 2 and is_decayed(n, p)]
        if not matrices:
            raise ConfigError("MuonWithAdamW found no trainable matrix in a decoder layer; use AdamW")
        split = [n for n, p in matrices if isinstance(p, DTensor)]
        if per_head and split:
            raise ConfigError(
                f"per_head=True, but {split[0]} and {len(split) - 1} more are split over processes, across their heads; use "
                "per_head=False, or whole parameters (DDP)"
            )
        chosen = {id(p) for _, p in matrices}
        rest = [(n, p) for n, p in named if id(p) not in chosen]
        self.views: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        heads = _heads(model) if per_head else {}
        muon_parameters = [view for name, p in matrices for view in self._views_of(name, p, heads)]
        settings = {"adjust_lr_fn": "match_rms_adamw", **(muon or {})}
        self.muon = torch.optim.Muon(muon_parameters, lr=lr, weight_decay=weight_decay, **settings)
        groups = [
            {"params": [p for n, p in rest if is_decayed(n, p)], "weight_decay": weight_decay},
            {"params": [p for n, p in rest if not is_decayed(n, p)], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, **(adamw or {}))
        super().__init__([p for _, p in named], {"lr": lr})
        # A scheduler changes the rate where it looks for it; both optimisers read it from the same groups.
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def _views_of(self, name: str, parameter: nn.Parameter, heads: dict[str, int]) -> list[nn.Parameter]:
        count = next((heads[part] for part in name.split(".") if part in heads and part in _PER_HEAD), 1)
        if count == 1 or parameter.shape[0] % count:
            return [parameter]
        views = [nn.Parameter(rows) for rows in parameter.data.chunk(count)]
        self.views.append((parameter, views))
        return views

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, views in self.views:
            if parameter.grad is not None:
                for view, grad in zip(views, parameter.grad.chunk(len(views)), strict=True):
                    view.grad = grad
        self.muon.step()
        self.adamw.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in (self.muon, self.adamw):
            optimizer.zero_grad(set_to_none)
        for parameter, _ in self.views:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]


def _heads(model: nn.Module) -> dict[str, int]:
    """Heads of each per-head projection, by module name."""
    config = model.config.get_text_config()
    linear = config.linear_attn_config["num_heads"]
    names: Iterable[str] = ("q_proj", "k_proj", "v_proj")
    return {**dict.fromkeys(names, linear), "q_b_proj": config.num_attention_heads}
