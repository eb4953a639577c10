"""``load_from_checkpoint`` reads directories of ours, and says as ever what it can't read.

Hyperparameters that no checkpoint holds are left out with a warning, and given again when loading.
"""

from __future__ import annotations

import enum
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_shard  # noqa: F401
from lightning_shard import HybridShardStrategy, ModelCheckpoint, checkpoint
from lightning_shard.errors import CorruptCheckpointError, UnsupportedStateError
from lightning_shard.testing import run_ranks
from tests.training.parallel.small import Descends


class Module(L.LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, width)


def saved(path: Path) -> Module:
    module = Module(3)
    trainer_state = {"pytorch-lightning_version": L.__version__, "hyper_parameters": dict(module.hparams)}
    checkpoint.save(module, path, trainer_state=trainer_state)
    return module


def test_a_directory_and_its_hyperparameters(tmp_path: Path) -> None:
    module = saved(tmp_path / "c")
    for path in (tmp_path / "c", str(tmp_path / "c"), f"file://{tmp_path}/c", tmp_path / "c" / "manifest.json"):
        again = Module.load_from_checkpoint(path)
        assert torch.equal(again.layer.weight, module.layer.weight)
    assert Module.load_from_checkpoint(tmp_path / "c", map_location=torch.device("cpu")).layer.weight.is_cpu


def test_in_a_store() -> None:
    module = saved("memory://from_checkpoint/c")  # type: ignore[arg-type]
    assert torch.equal(Module.load_from_checkpoint("memory://from_checkpoint/c").layer.weight, module.layer.weight)


def test_what_is_not_ours_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Module.load_from_checkpoint(tmp_path / "nothing.ckpt")
    with pytest.raises(IsADirectoryError):
        Module.load_from_checkpoint(tmp_path)
    saved(tmp_path / "c")
    next((tmp_path / "c" / "model").iterdir()).unlink()
    with pytest.raises(CorruptCheckpointError):
        Module.load_from_checkpoint(tmp_path / "c")


class Scaled:
    """As libraries' modules are made with: an object of a class of theirs."""

    def __init__(self, by: float) -> None:
        self.by = by


class Activation(enum.Enum):
    RELU = "relu"
    TANH = "tanh"


class Kept(Descends):
    def __init__(self, width: int, scale: Scaled, options: Any, activation: Activation = Activation.TANH) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = scale
        self.layer = nn.Linear(width, width)
        self.activation = torch.relu if activation is Activation.RELU else torch.tanh

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.activation(self.layer(batch)).square().mean() * self.scale.by


class Graph(Kept):
    def __init__(self) -> None:
        super().__init__(2, Scaled(1.0), None)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())
        self.register_buffer("unsaved", torch.eye(2).to_sparse(), persistent=False)


def fit(make: Any, arguments: tuple[Any, ...], folder: Path, fails: bool) -> tuple[list[str], str]:
    """Train a step, and save as last; returns what is warned of, and what is raised."""
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_steps": 1}
    callbacks = [ModelCheckpoint(folder, save_last=True)]
    trainer = L.Trainer(strategy=HybridShardStrategy(), accelerator="cpu", devices=1, callbacks=callbacks, **quiet)
    refused: AbstractContextManager[Any] = pytest.raises(UnsupportedStateError) if fails else nullcontext()
    with warnings.catch_warnings(record=True) as told, refused as error:
        warnings.simplefilter("always")
        trainer.fit(make(*arguments), DataLoader(torch.ones(3, 2), batch_size=3))
    return [str(each.message) for each in told], str(error.value) if fails else ""


def test_what_no_checkpoint_holds_is_left_out_and_given_again(tmp_path: Path) -> None:
    arguments = 2, Scaled(0.5), {"inner": complex, "depth": 1}
    [(warned, _)] = run_ranks(fit, 1, Kept, arguments, tmp_path, False, elastic=True)
    told = [text for text in warned if "hyperparameter" in text]
    assert "'scale' that save_hyperparameters() keeps is left out" in told[0]
    assert "load_from_checkpoint(…, scale=…)" in told[0]
    assert "hparams.options.inner" in told[1]
    with pytest.raises(TypeError, match="'scale' and 'options'"):
        Kept.load_from_checkpoint(tmp_path / "last.ckpt")
    again = Kept.load_from_checkpoint(tmp_path / "last.ckpt", scale=Scaled(2.0), options=None)
    assert again.layer.in_features == again.hparams["width"] == 2


def test_a_choice_by_an_enum_is_made_again(tmp_path: Path) -> None:
    """Its value came back, so that another network was built than was trained."""
    run_ranks(fit, 1, Kept, (2, Scaled(1.0), None, Activation.RELU), tmp_path, False, elastic=True)
    again = Kept.load_from_checkpoint(tmp_path / "last.ckpt", scale=Scaled(1.0))
    assert again.hparams["activation"] is Activation.RELU
    assert again.activation is torch.relu
    checkpoint.gather(tmp_path / "last.ckpt", tmp_path / "one.ckpt")
    kept = torch.load(tmp_path / "one.ckpt", weights_only=True)["hyper_parameters"]  # a member can't be read so
    assert kept["activation"] == "relu"


def test_a_buffer_for_which_every_save_is_refused_is_told_of_before_training(tmp_path: Path) -> None:
    [(warned, error)] = run_ranks(fit, 1, Graph, (), tmp_path, True, elastic=True)
    [told] = [text for text in warned if "will be refused" in text]
    assert "'adjacency' is a tensor of layout torch.sparse_coo" in error
    assert error in told
    assert "persistent=False" in told
