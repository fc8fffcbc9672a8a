"""What all our models share towards transformers: loading, saving and `load_state_dict`."""

import os
import shutil
import tempfile
from pathlib import Path

from transformers.utils import logging

from ..checkpoint.key_maps import own_key_maps
from ..checkpoint.loading import check_after_loading, check_before_loading
from .decoder import DecoderLayer
from .moe import EXPERTS_IMPLEMENTATION

logger = logging.get_logger(__name__)
_INDEX = "model.safetensors.index.json"


class KimiPreTrainedMixin:
    """Loading and saving in the released layout: damaged input is refused before, half a folder is never left after."""

    # Whether the class holds the vision tower; a text class leaves a repository's tower unread.
    _has_vision = False
    _keys_to_ignore_on_load_unexpected = [r"^vision_tower\.", r"^mm_projector\."]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        return super().get_correct_experts_implementation(requested_experts or EXPERTS_IMPLEMENTATION)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, *args, **kwargs):
        """Load a checkpoint in the released layout (or one that this package wrote).

        Args:
            pretrained_model_name_or_path: a folder or a repository name; arguments are transformers' own.
        Raises:
            CheckpointError: shards that are truncated or absent, tensors of the wrong shape, layers with tensors
                missing, experts in a foreign 4-bit format. Headers are read for this; no weight has been loaded yet.
            ConfigError: a configuration that contradicts itself.
        """
        source = pretrained_model_name_or_path
        if kwargs.get("quantization_config") is None:
            kwargs.pop("quantization_config", None)
        if hasattr(kwargs.get("config"), "restore_quantization"):
            kwargs["config"].restore_quantization()
        from_files = source is not None and kwargs.get("state_dict") is None and kwargs.get("gguf_file") is None
        if from_files:
            config = kwargs.get("config") or cls.config_class
            cls._check_checkpoint(
                Path(source, kwargs.get("subfolder") or ""),
                config,
                variant=kwargs.get("variant"),
                allow_other_shapes=bool(kwargs.get("ignore_mismatched_sizes")),
            )
        wants_report = kwargs.pop("output_loading_info", False)
        with own_key_maps():
            model, report = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        if from_files:
            check_after_loading(source, model.state_dict(), report["missing_keys"])
        for module in model.modules():
            if isinstance(module, DecoderLayer):
                module.residual.freeze_unread(module)
        return (model, report) if wants_report else model

    @classmethod
    def _check_checkpoint(cls, folder: Path, config, *, variant: str | None, allow_other_shapes: bool) -> None:
        """Raise `CheckpointError` if the files in `folder` cannot be the model of `config` (an instance, or its class)."""
        vision = None if cls._has_vision else False
        check_before_loading(folder, config, vision=vision, variant=variant, allow_other_shapes=allow_other_shapes)

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> None:
        """Write the released names, shapes and dtypes, and the config in the released schema.

        Everything is written to a temporary folder beside `save_directory` and moved there when it is complete.
        Arguments are transformers' own.
        """
        with own_key_maps():
            if kwargs.get("push_to_hub") or not kwargs.get("is_main_process", True):
                return super().save_pretrained(save_directory, *args, **kwargs)
            target = Path(save_directory)
            if target.is_file():
                raise NotADirectoryError(f"save_pretrained: {target} is a file; name a folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
            try:
                super().save_pretrained(partial, *args, **kwargs)
                _move_into(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def _move_into(partial: Path, target: Path) -> None:
    """Rename every finished file into `target`, weights first; shards of an earlier save that are replaced go away."""
    target.mkdir(exist_ok=True)
    new = {path.name for path in partial.iterdir()}
    stale = set()
    if new & {_INDEX, "model.safetensors"}:
        stale = {p.name for p in target.glob("model*.safetensors")} | (
            {_INDEX} if (target / _INDEX).exists() else set()
        )
    order = sorted(new, key=lambda name: (not name.endswith(".safetensors"), name != _INDEX, name))
    for name in order:
        os.replace(partial / name, target / name)
    for name in stale - new:
        (target / name).unlink(missing_ok=True)
