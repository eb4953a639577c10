"""``load_from_checkpoint`` reads directories of ours, and says as ever what it can't read."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_shard  # noqa: F401
from lightning_shard import checkpoint
from lightning_shard.errors import CorruptCheckpointError


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
