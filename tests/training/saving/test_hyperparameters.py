"""Hyperparameters that no checkpoint holds: left out with a warning, and given again when loading."""

from __future__ import annotations

import enum
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, ModelCheckpoint, checkpoint
from lightning_shard.errors import UnsupportedStateError
from lightning_shard.testing import run_ranks


class Scaled:
    """As libraries' modules are made with: an object of a class of theirs."""

    def __init__(self, by: float) -> None:
        self.by = by


class Kept(L.LightningModule):
    def __init__(self, width: int, scale: Scaled, options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = scale
        self.layer = nn.Linear(width, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean() * self.scale.by

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, saves: bool) -> list[str]:
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_steps": 1}
    callbacks = [ModelCheckpoint(folder, save_last=True)] if saves else []
    trainer = L.Trainer(
        strategy=HybridShardStrategy(),
        accelerator="cpu",
        devices=1,
        enable_checkpointing=saves,
        callbacks=callbacks,
        **quiet,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Kept(2, Scaled(0.5), {"inner": complex, "depth": 1}), DataLoader(torch.ones(3, 2), batch_size=3))
    return [str(each.message) for each in told if "hyperparameter" in str(each.message)]


def test_what_no_checkpoint_holds_is_left_out_and_given_again(tmp_path: Path) -> None:
    [told] = run_ranks(fit, 1, tmp_path, True, elastic=True)
    assert "'scale' that save_hyperparameters() keeps is left out" in told[0]
    assert "load_from_checkpoint(…, scale=…)" in told[0]
    assert "hparams.options.inner" in told[1]
    with pytest.raises(TypeError, match="'scale' and 'options'"):
        Kept.load_from_checkpoint(tmp_path / "last.ckpt")
    again = Kept.load_from_checkpoint(tmp_path / "last.ckpt", scale=Scaled(2.0), options=None)
    assert again.layer.in_features == again.hparams["width"] == 2


class Activation(enum.Enum):
    RELU = "relu"
    TANH = "tanh"


class Chosen(L.LightningModule):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 2)
        self.activation = torch.relu if activation is Activation.RELU else torch.tanh

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.activation(self.layer(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def save_chosen(path: Path) -> None:
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_steps": 1}
    trainer = L.Trainer(
        strategy=HybridShardStrategy(), accelerator="cpu", devices=1, enable_checkpointing=False, **quiet
    )
    trainer.fit(Chosen(Activation.RELU), DataLoader(torch.ones(3, 2), batch_size=3))
    trainer.save_checkpoint(path)


def test_a_choice_by_an_enum_is_made_again(tmp_path: Path) -> None:
    """Its value came back, so that another network was built than was trained."""
    run_ranks(save_chosen, 1, tmp_path / "a.ckpt", elastic=True)
    again = Chosen.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.hparams["activation"] is Activation.RELU
    assert again.activation is torch.relu
    checkpoint.gather(tmp_path / "a.ckpt", tmp_path / "one.ckpt")
    kept = torch.load(tmp_path / "one.ckpt", weights_only=True)["hyper_parameters"]  # a member can't be read so
    assert kept["activation"] == "relu"


class Graph(Kept):
    def __init__(self) -> None:
        super().__init__(2, Scaled(1.0), None)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())
        self.register_buffer("unsaved", torch.eye(2).to_sparse(), persistent=False)


def refused(folder: Path) -> tuple[list[str], str]:
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_steps": 1}
    trainer = L.Trainer(
        strategy=HybridShardStrategy(), accelerator="cpu", devices=1, callbacks=[ModelCheckpoint(folder)], **quiet
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(UnsupportedStateError) as error:
            trainer.fit(Graph(), DataLoader(torch.ones(3, 2), batch_size=3))
    return [str(each.message) for each in told if "will be refused" in str(each.message)], str(error.value)


def test_a_buffer_for_which_every_save_is_refused_is_told_of_before_training(tmp_path: Path) -> None:
    [(told, error)] = run_ranks(refused, 1, tmp_path, elastic=True)
    assert len(told) == 1
    assert "'adjacency' has layout torch.sparse_coo" in error
    assert error in told[0]
    assert "persistent=False" in told[0]
