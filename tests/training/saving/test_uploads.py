"""Loggers that upload checkpoints upload folders, or say before training that they can't.

mlflow 3.17 and wandb 0.31 were tried by hand; here their clients are stand-ins.
"""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import LitLogger, Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_shard import HybridShardStrategy, ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, loader


class Experiment:
    """A client that remembers which files it was given, and under which names; the folders must be committed."""

    id = "run"

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def log_artifact(self, first: Any, path: str = "", name: str = "", aliases: Any = ()) -> None:
        if isinstance(first, Artifact):
            self.given[f"{first.name}/{first.file}"] = {**first.content, **first.metadata, "aliases": aliases}
        else:
            self.given[f"{name}/{Path(path).name}"] = dict(checkpoint.load(path))

    def log_artifacts(self, run: str, folder: str, name: str) -> None:
        self.given[name] = sorted(path.name for path in Path(folder).iterdir())

    def get_run(self, run: str) -> None: ...

    def log_metrics(self, *_: Any, **__: Any) -> None: ...


class Artifact:
    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.name, self.metadata = name, metadata

    def add_dir(self, path: str, name: str, policy: str) -> None:
        self.file, self.content = name, dict(checkpoint.load(path))


def made(kind: type, log_model: Any) -> Any:
    """Lightning's logger, with a stand-in for its client."""

    class Made(kind):  # type: ignore[misc]
        experiment = Experiment()
        add_file_policy = "mutable"
        name = version = save_dir = run_id = None

        def __init__(self) -> None:
            Logger.__init__(self)
            self._log_model, self._logged_model_time, self._run_id = log_model, {}, "run"
            self._checkpoint_callback, self._checkpoint_callbacks, self._checkpoint_name = None, {}, None
            self._initialized = True
            if kind is MLFlowLogger:
                self.run_id = "run"

        def log_metrics(self, *_: Any, **__: Any) -> None: ...

        def log_hyperparams(self, *_: Any) -> None: ...

        def finalize(self, status: str) -> None:
            found = [self._checkpoint_callback, *self._checkpoint_callbacks.values()]
            for callback in found if log_model is True else ():
                if callback is not None:
                    self._scan_and_log_checkpoints(callback)

    Made.__name__ = kind.__name__
    return Made()


def fit(folder: str, asynchronous: bool, log_model: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    sys.modules["wandb"] = types.ModuleType("wandb")
    sys.modules["wandb"].Artifact = Artifact  # type: ignore[attr-defined]
    loggers = [made(kind, log_model) for kind in (MLFlowLogger, WandbLogger, LitLogger)]
    loggers.append(DummyLogger())  # has every name that it is asked for, as fast_dev_run's; no word about it
    keep = ModelCheckpoint(folder, "{step}", monitor="val_loss", save_last=True, save_top_k=2)
    strategy = HybridShardStrategy(data_parallel_size=1, checkpoint_io=ShardedCheckpointIO(asynchronous=asynchronous))
    settings: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "logger": loggers}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = L.Trainer(max_epochs=1, devices=1, strategy=strategy, callbacks=[keep], **settings)
        trainer.fit(Model(), loader(8), loader(8, samples=32))
    said = [str(each.message) for each in told if "log_model" in str(each.message)]
    return loggers[0].experiment.given, loggers[1].experiment.given, said


@pytest.mark.parametrize(("asynchronous", "log_model"), [(False, "all"), (True, True)])
def test_folders_are_uploaded_once_they_are_committed(asynchronous: bool, log_model: Any, tmp_path: Path) -> None:
    ((mlflow, wandb, said),) = run_ranks(fit, 1, str(tmp_path / "run"), asynchronous, log_model, elastic=True)
    (best,) = sorted(path.name for path in (tmp_path / "run").glob("step=*"))
    stem = best.removesuffix(".ckpt")
    assert mlflow.keys() == {f"{stem}/{best}", stem, "last/last.ckpt", "last"}
    assert mlflow[stem] == ["aliases.txt", "metadata.yaml"]
    assert mlflow[f"{stem}/{best}"].keys() == checkpoint.load(tmp_path / "run" / best).keys()
    (artifact,) = wandb.items()
    assert artifact[0] == "model-run/model.ckpt"
    assert artifact[1].keys() > {"score", "original_filename", "aliases", "model.head.weight"}
    assert said == [
        "LitLogger(log_model=…) will upload no checkpoints: these are folders. Leave log_model out; to log one, gather"
        " it to a file after training (lightning-shard gather)."
    ]


def test_it_is_said_that_what_is_saved_to_a_store_is_not_uploaded() -> None:
    ((mlflow, _, said),) = run_ranks(fit, 1, "memory://run", False, "all", elastic=True)
    assert mlflow == {}
    assert [text.partition("(")[0] for text in said] == ["MLFlowLogger", "WandbLogger", "LitLogger"]
    assert "these are saved to memory://run, not to a local folder" in said[0]
