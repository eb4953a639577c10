"""Leaves hyperparameters that a checkpoint can't hold out of it, as Lightning does with those that can't be pickled.

``save_hyperparameters()`` keeps whatever the module was made with, which in libraries' modules are losses and
transformations. Nothing is pickled, and such an object mustn't cost a checkpoint.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard.checkpoint.format.encode import encode
from lightning_shard.checkpoint.tensors import check_storable
from lightning_shard.errors import UnsupportedStateError

_TYPES = (pl.LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE, pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE)
_KEYS = (pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)


def leave_out_of(checkpoint: dict[str, Any]) -> None:
    """Remove those that can't be held from what Lightning is about to save, with a warning on rank 0."""
    for key in _KEYS:
        kept = checkpoint.get(key)
        if not isinstance(kept, dict):
            continue
        if _reason("hparams", kept) is None:
            continue
        reasons = {name: _reason(f"hparams.{name}", value) for name, value in kept.items()}
        checkpoint[key] = {name: value for name, value in kept.items() if reasons[name] is None}
        for name, reason in reasons.items():
            if reason is not None:
                rank_zero_warn(
                    f"The hyperparameter {name!r} that save_hyperparameters() keeps is left out of checkpoints:"
                    f" {reason} Without that, give it to load_from_checkpoint(…, {name}=…), or leave it out by"
                    " save_hyperparameters(ignore=[…])."
                )


def name_types(checkpoint: dict[str, Any]) -> None:
    """Replace the class of omegaconf's configs, which Lightning saves beside their values, by its name."""
    for key in _TYPES:
        if isinstance(kind := checkpoint.get(key), type):
            checkpoint[key] = kind.__name__


def find_types(checkpoint: dict[str, Any]) -> None:
    """Replace these names by the classes, which ``load_from_checkpoint`` makes of the values."""
    for key in _TYPES:
        if checkpoint.get(key) == "DictConfig":
            from omegaconf import DictConfig

            checkpoint[key] = DictConfig


def _reason(name: str, value: Any) -> UnsupportedStateError | None:
    try:
        encode({name: value})
    except UnsupportedStateError as error:
        return error
    return None


def warn_of_unstorable_buffers(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Warn, on rank 0, of saved buffers, such as a sparse adjacency, for which each save would be refused."""
    for prefix, part in module.named_modules() if trainer.checkpoint_callbacks else ():
        for key, buffer in part._buffers.items():
            if buffer is None or buffer.is_meta or key in part._non_persistent_buffers_set:
                continue
            try:
                check_storable(".".join(filter(None, (prefix, key))), buffer)
            except UnsupportedStateError as error:
                rank_zero_warn(
                    f"Every checkpoint of this run will be refused: {error} To leave it out, register it by"
                    " register_buffer(…, persistent=False)."
                )
