"""What a Trainer's checkpoint has beside tensors: hyperparameters that it can hold, and a transformers folder's files.

``save_hyperparameters()`` keeps whatever the module was made with, which in libraries' modules are losses and
transformations. Nothing is pickled, and such an object mustn't cost a checkpoint: it is left out, as Lightning does
with those that can't be pickled.

The files are those that a folder has beside the weights, of a module with a transformers model and a tokenizer.
transformers isn't imported here: if a module has parts of it, it has been imported already.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.checkpoint.convert.export import CONFIG, GENERATION_CONFIG
from lightning_shard.checkpoint.format.typed_json import encode
from lightning_shard.checkpoint.tensors import check_storable
from lightning_shard.errors import UnsupportedStateError
from lightning_shard.parallel.fsdp.units import class_name

_TYPES = (pl.LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE, pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE)
_KEYS = (pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)


def leave_out_of(checkpoint: dict[str, Any]) -> None:
    """Remove those that can't be held from what Lightning is about to save, with a warning on rank 0."""
    for key in _KEYS:
        kept = checkpoint.get(key)
        if not isinstance(kept, dict) or _reason("hparams", kept) is None:
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


MAX_TOKENIZER_BYTES = 64 * 2**20


def describe(module: nn.Module, *holders: Any) -> dict[str, Any] | None:
    """The configs of the transformers models in a module, and a tokenizer's files; None if it holds no model.

    Args:
        holders: Objects other than the module that may have the tokenizer as an attribute, such as a data module.

    Returns:
        ``"models"``: by the prefix of their tensors' names (``"model."``), file names to their text; ``"tokenizer"``:
        file names to their bytes, as tensors.
    """
    models: dict[str, dict[str, str]] = {}
    for prefix, model in models_of_transformers(module):
        if not any(prefix.startswith(outer) for outer in models):
            models[prefix] = _configs(model)
    if not models:
        return None
    base = sys.modules.get("transformers.tokenization_utils_base")
    attributes = [value for holder in (module, *holders) if holder is not None for value in vars(holder).values()]
    tokenizer = next((v for v in attributes if base is not None and isinstance(v, base.PreTrainedTokenizerBase)), None)
    return {"models": models, "tokenizer": _files(tokenizer, len(tokenizer)) if tokenizer is not None else {}}


def models_of_transformers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each with the prefix of its tensors' names."""
    known: Any = sys.modules.get("transformers.modeling_utils")
    for name, part in module.named_modules() if known is not None else ():
        if isinstance(part, known.PreTrainedModel):
            yield f"{name}." if name else "", part


def _configs(model: Any) -> dict[str, str]:
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [class_name(model)]
    files = {CONFIG: json.dumps(config)}
    if getattr(model, "generation_config", None) is not None:
        files[GENERATION_CONFIG] = model.generation_config.to_json_string()
    return files


@functools.lru_cache(maxsize=1)
def _files(tokenizer: Any, size: int) -> dict[str, Tensor]:
    """A tokenizer's files, cached by it and its number of tokens; a failure doesn't fail the checkpoint."""
    files: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:
            rank_zero_warn(f"The tokenizer isn't in the checkpoint, since it can't be saved: {error!r}.")
            return {}
        paths = [entry.path for entry in os.scandir(folder) if entry.is_file()]
        total = sum(os.path.getsize(path) for path in paths)
        if total > MAX_TOKENIZER_BYTES:
            rank_zero_warn(f"The tokenizer isn't in the checkpoint, since it has {total:,} bytes.")
            return {}
        for path in sorted(paths):
            files[os.path.basename(path)] = torch.from_numpy(np.fromfile(path, np.uint8))
    return files
