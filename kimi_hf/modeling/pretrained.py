"""What all our models share towards transformers: loading, saving and `load_state_dict`."""

import dataclasses
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

from ..checkpoint.geometry import as_dict, is_packed
from ..checkpoint.key_maps import own_key_maps
from ..checkpoint.loading import Reading, check_after_loading, check_before_loading
from ..checkpoint.offload import prepare_disk_offload, refuse_files_in_use
from ..checkpoint.saving import written_whole
from ..checkpoint.shards import Checkpoint
from ..checkpoint.sources import GIVEN, about_to_be_read, in_folder, opened_before
from ..errors import CheckpointError, ConfigError
from ..storage import ExpertStorageReport
from .decoder import DecoderLayer
from .disk_experts import (
    disk_experts,
    expert_store,
    leave_experts_on_disk,
    pop_expert_storage,
    refuse_experts_on_disk,
    save_experts_on_disk,
)
from .moe import EXPERTS_IMPLEMENTATION, KimiExperts
from .tying import check_tying

logger = logging.get_logger(__name__)


class KimiPreTrainedMixin:
    """Loading and saving in the released layout: damaged input is refused before, half a folder is never left after."""

    # Whether the class holds the vision tower; a text class leaves a repository's tower unread.
    _has_vision = False
    _keys_to_ignore_on_load_unexpected = [r"^vision_tower\.", r"^mm_projector\."]

    def __init__(self, config, *args, **kwargs):
        if not isinstance(config, self.config_class):
            wanted = self.config_class.__name__
            raise ConfigError(
                f"{type(self).__name__} is built from a {wanted}, got a {type(config).__name__}; make one with "
                f"{wanted}.from_pretrained or {wanted}.from_dict"
            )
        config.check()  # fields may have been changed since the configuration was made
        super().__init__(config, *args, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Tokens that have an embedding; the configuration's, also after `resize_token_embeddings`."""
        return self.config.get_text_config().vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.config.get_text_config().vocab_size = value

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
            expert_storage: "ram" (default), or "disk" ("mmap" means the same): routed experts stay in their safetensors
                files and are read when they are routed to, see `KimiDiskExperts` and docs/conversion.md.
            expert_cache_bytes: how much of the experts on disk is kept in memory, 1 GiB by default.
        Raises:
            CheckpointError: shards that are truncated or absent, tensors of the wrong shape, layers with tensors
                missing, experts in a foreign 4-bit format. Headers are read for this; no weight has been loaded yet.
            ConfigError: a configuration that contradicts itself.
        """
        source = pretrained_model_name_or_path
        cls.config_class.refuse_fields_of_parts(kwargs)
        if kwargs.get("quantization_config") is None:
            kwargs.pop("quantization_config", None)
        wants_report = kwargs.pop("output_loading_info", False)
        from_files = source is not None and kwargs.get("state_dict") is None
        with own_key_maps(), opened_before(source, kwargs), pop_expert_storage(kwargs):
            model, report = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        if kwargs.get("gguf_file") is None:
            headed = from_files and cls.__name__ in (model.config.architectures or ())
            check_after_loading(source or GIVEN, model.state_dict(), report["missing_keys"], headed=headed)
        for module in model.modules():
            if isinstance(module, DecoderLayer):
                module.residual.freeze_unread(module)
        check_tying(model)
        return (model, report) if wants_report else model

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        """transformers' step that reads the weights: the model is there, still empty, and its files are too.

        Wherever the weights come from (folder, repository, state dict), they are compared with the model here. An adapter,
        which comes with the keys it expects, is passed on.
        """
        if expected_keys is None:
            checkpoint = about_to_be_read(state_dict, checkpoint_files, load_config)
            if checkpoint is not None:
                vision = None if model._has_vision else False
                reading = Reading.of(load_config, model.config, vision)
                if disk_experts(model):
                    reading = dataclasses.replace(reading, scales=False)  # they are looked at whenever they are read
                with checkpoint:
                    model._check_checkpoint(checkpoint, reading)
            prepare_disk_offload(model, load_config)
            if disk_experts(model):
                state_dict, load_config = leave_experts_on_disk(model, checkpoint, load_config)
        load = super(KimiPreTrainedMixin, type(model))._load_pretrained_model
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)

    def _check_checkpoint(self, checkpoint: Checkpoint, reading: Reading) -> None:
        """Raise `CheckpointError` if the checkpoint cannot be this (still empty) model."""
        check_before_loading(checkpoint, reading)

    def expert_storage_report(self, reset: bool = False) -> ExpertStorageReport | None:
        """What lies on disk, what is cached, hits and misses; None for a model with its experts in memory.

        `reset` begins to count anew after this report.
        """
        store = expert_store(self)
        report = None if store is None else store.report()
        if reset and store is not None:
            store.reset()
        return report

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        **kwargs,
    ) -> None:
        """Write the released names, shapes and dtypes, and the config in the released schema.

        A model built from a configuration of packed experts, rather than loaded, has plain ones; its configuration is
        changed to say so.

        Everything is written to a temporary folder beside `save_directory` and moved there when it is complete. With
        `push_to_hub` or `distributed_checkpoint`, which write from several places, transformers writes directly.
        Arguments are transformers' own; weights are always safetensors.

        Raises:
            NotADirectoryError, PermissionError: `save_directory` is a file, or cannot be written to.
            ConfigError: a configuration that was changed and cannot be, or does not say whether the head is tied.
            CheckpointError: layers that are offloaded to disk are read from the very files that would be replaced.
        """
        if not kwargs.pop("safe_serialization", True):
            logger.warning("safe_serialization=False is not offered any more; safetensors files are written")
        self.config.check()
        check_tying(self)
        if is_packed(as_dict(self.config)) and any(isinstance(module, KimiExperts) for module in self.modules()):
            del self.config.quantization_config  # only loading packs experts; `from_config` leaves them plain
        distributed = bool(kwargs.get("distributed_checkpoint"))
        options = {
            "state_dict": self._with_released_dtypes(state_dict),
            "max_shard_size": max_shard_size,
            "variant": variant,
            **kwargs,
        }
        with own_key_maps():
            if push_to_hub or variant or distributed:
                refuse_experts_on_disk(self, "saving with push_to_hub, variant or distributed_checkpoint")
            if push_to_hub or distributed or not is_main_process:
                return super().save_pretrained(save_directory, is_main_process, push_to_hub=push_to_hub, **options)
            refuse_files_in_use(Path(save_directory))
            with written_whole(save_directory, variant) as partial:
                super().save_pretrained(partial, **options)
                if disk_experts(self):
                    save_experts_on_disk(self, partial, max_shard_size)
                if state_dict is None:
                    self._warn_if_unreadable(partial, variant)

    def _with_released_dtypes(self, state_dict: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        """The tensors to save, in fp32 where the release has fp32; None where that is what the model holds already.

        `model.to(torch.bfloat16)` rounds these too. The values that they still have are written exactly.
        """
        tensors = self.state_dict() if state_dict is None else state_dict
        kept = {
            name: tensor.float()
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor)
            and tensor.dtype in (torch.bfloat16, torch.float16)
            and not self._keep_in_fp32_modules_strict.isdisjoint(name.split("."))
        }
        return {**tensors, **kept} if kept else state_dict

    def _warn_if_unreadable(self, folder: Path, variant: str | None) -> None:
        """Say it now if what was just written will be refused on loading; the work of a training is not thrown away for it."""
        quantizer = getattr(self, "hf_quantizer", None)
        checkpoint = in_folder(folder, variant)
        if checkpoint is None or (quantizer is not None and not quantizer.pre_quantized):
            return
        try:
            with checkpoint:
                self._check_checkpoint(
                    checkpoint, Reading(as_dict(self.config), vision=None if self._has_vision else False)
                )
        except CheckpointError as error:
            logger.warning(
                "This model was saved, but will not load again: its modules are not those of its configuration. Adapters that "
                "were put into it can be merged first (merge_and_unload).\n%s",
                error,
            )
