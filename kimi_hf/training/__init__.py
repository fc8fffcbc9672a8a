"""Fine-tuning and pre-training: adapters that reach what they name, router balance, optimiser groups, collators."""

from .adapters import LORA_KINDS, lora_config
from .balance import RouterBalanceCallback, RouterStatistics
from .collate import DocumentCollator
from .optimizers import MuonWithAdamW, parameter_groups

__all__ = [
    "LORA_KINDS",
    "DocumentCollator",
    "MuonWithAdamW",
    "RouterBalanceCallback",
    "RouterStatistics",
    "lora_config",
    "parameter_groups",
]
