"""Has loggers that upload checkpoints (``log_model``) upload sharded ones, which are folders, once they are committed.

Lightning's loggers look for files, and skip folders without a word. MLflow and W&B take folders.

Private in Lightning 2.6, replaced on a run's loggers: ``_scan_and_log_checkpoints``; used here: ``_log_model``,
``_logged_model_time``, ``_run_id``, ``_checkpoint_name``.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME
from lightning_shard.checkpoint.store import local_path
from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO

_SETTINGS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")
Send = Callable[[Any, str, dict[str, Any], list[str]], None]


def upload_folders(trainer: pl.Trainer, io: ShardedCheckpointIO) -> None:
    """At the start of a fit, after callbacks' setup; warns, on rank 0, of loggers that will upload nothing."""
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    remote = [folder for folder in folders if folder and local_path(str(folder)) is None]
    for logger in trainer.loggers:
        if not (hasattr(type(logger), "_scan_and_log_checkpoints") and getattr(logger, "_log_model", False)):
            continue
        kind = type(logger).__name__
        send = next((send for of, send in _SENT_BY.items() if isinstance(logger, of)), None)
        if send is None or remote:
            rank_zero_warn(
                f"{kind}(log_model=…) will upload no checkpoints: "
                + (f"these are saved to {remote[0]}, not to a local folder." if send else "these are folders.")
                + " Leave log_model out; to log one, gather it to a file after training (lightning-shard gather)."
            )
        else:
            vars(logger)["_scan_and_log_checkpoints"] = partial(_upload, logger, io, send)


def _upload(logger: Any, io: ShardedCheckpointIO, send: Send, callback: Any) -> None:
    """Upload the callback's last, best and k best checkpoints, unless they were, after the save that is running."""
    scores = {callback.last_model_path: callback.current_score, callback.best_model_path: callback.best_model_score}
    scores |= callback.best_k_models
    best = callback.best_model_path
    settings = {key: getattr(callback, key) for key in _SETTINGS if hasattr(callback, key)}

    def upload() -> None:
        uploaded: dict[str, float] = logger._logged_model_time
        for path, score in scores.items():
            try:
                committed = os.stat(os.path.join(path, MANIFEST_NAME)).st_mtime
            except OSError:
                continue
            if uploaded.get(path, 0) < committed:
                value = score.item() if isinstance(score, Tensor) else score
                metadata = {"score": value, "original_filename": Path(path).name, "Checkpoint": settings}
                send(logger, path, metadata, ["latest", "best"] if path == best else ["latest"])
                uploaded[path] = committed

    io.after_save(upload)


def _to_mlflow(logger: MLFlowLogger, path: str, metadata: dict[str, Any], aliases: list[str]) -> None:
    name, run_id, client = Path(path).stem, logger.run_id, logger.experiment
    assert run_id is not None
    client.log_artifact(run_id, path, name)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "metadata.yaml").write_text(json.dumps(metadata))
        Path(folder, "aliases.txt").write_text(str(aliases))
        client.log_artifacts(run_id, folder, name)


def _to_wandb(logger: WandbLogger, path: str, metadata: dict[str, Any], aliases: list[str]) -> None:
    wandb: Any = importlib.import_module("wandb")
    logger._checkpoint_name = logger._checkpoint_name or f"model-{logger.experiment.id}"
    artifact = wandb.Artifact(name=logger._checkpoint_name, type="model", metadata=metadata)
    artifact.add_dir(path, name="model.ckpt", policy=logger.add_file_policy)
    logger.experiment.log_artifact(artifact, aliases=aliases)


_SENT_BY: dict[type, Any] = {MLFlowLogger: _to_mlflow, WandbLogger: _to_wandb}
