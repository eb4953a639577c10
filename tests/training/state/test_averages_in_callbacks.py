"""Averages of weights that callbacks keep by name in whole tensors, of which each stage updates its own parameters'."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import QUIET

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
}


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Averages(L.Callback):
    """Whole tensors, of all parameters before they are laid out, and of those that a stage sees afterwards."""

    def __init__(self) -> None:
        self.early: dict[str, Tensor] = {}
        self.late: dict[str, Tensor] = {}

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.early = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            self.early[name].mul_(0.9).add_(parameter, alpha=0.1)
        for name, parameter in module.net.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()
            self.late[name] = self.late.get(name, 0.0) + whole

    def state_dict(self) -> dict[str, Any]:
        return {"early": self.early}

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["late"] = [{"of": self.late}]


def save(layout: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    sizes = LAYOUTS[layout]
    samples = torch.linspace(-3, 3, 3 * 8 * 8).sin().view(24, 8)
    quiet: dict[str, Any] = QUIET
    trainer = L.Trainer(
        strategy=HybridShardStrategy(**sizes) if sizes else "auto",
        devices=2 if sizes else 1,
        max_epochs=1,
        callbacks=[Averages()],
        **quiet,
    )
    size = 8 // sizes.get("data_parallel_size", 1)
    trainer.fit(Module(), DataLoader(samples, batch_size=size))  # type: ignore[arg-type]
    trainer.save_checkpoint(folder / f"{layout}.ckpt")


@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2", marks=pytest.mark.long)])
def test_each_stages_averages_are_saved(layout: str, tmp_path: Path) -> None:
    run_ranks(save, 1, "one process", tmp_path, init=False)
    run_ranks(save, 2, layout, tmp_path, elastic=True)
    checkpoint.gather(tmp_path / f"{layout}.ckpt", tmp_path / "gathered.ckpt")
    expected = torch.load(tmp_path / "one process.ckpt", weights_only=False)
    found = torch.load(tmp_path / "gathered.ckpt", weights_only=False)
    torch.testing.assert_close(found["callbacks"]["Averages"], expected["callbacks"]["Averages"])
    torch.testing.assert_close(found["late"], expected["late"])
    assert len(expected["late"][0]["of"]) == 10
