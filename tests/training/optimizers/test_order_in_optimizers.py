"""Optimizers that list parameters in an order of their own: plain torch numbers state by that order, on stages too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, checkpoint
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import QUIET

WIDTH = 6
Moments = dict[str, Tensor]


class Module(L.LightningModule):
    """All weights are of one shape, so that any may be taken for another."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.moments: Moments = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.net(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        if self.order == "head first":
            return torch.optim.Adam([*self.head.parameters(), *self.net.parameters()], lr=0.01)
        weights, biases = ([p for p in self.parameters() if p.ndim == dims] for dims in (2, 1))
        return torch.optim.Adam([{"params": biases[::-1], "lr": 0.1}, {"params": weights[2:] + weights[:2]}], lr=0.01)

    def on_train_start(self) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.moments = moments(optimizer, self.named_parameters())


def moments(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Tensor]]) -> Moments:
    held = {name: optimizer.state[p]["exp_avg"] for name, p in parameters if p in optimizer.state}
    return {name: full_tensor(value).clone() for name, value in held.items()}


def loader() -> DataLoader[Any]:
    return DataLoader(torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).sin(), batch_size=4)  # type: ignore[arg-type]


def train(order: str, path: Path, resumed: Path | None, strategy: Any = None) -> Moments:
    """Two steps, saved; after a resume none, and the moments that were restored."""
    strategy = strategy or HybridShardStrategy(pipeline_parallel_size=2, microbatches=2)
    devices = 1 if strategy == "auto" else 2
    trainer = L.Trainer(max_epochs=1 if resumed is None else 2, devices=devices, strategy=strategy, **QUIET)
    module = Module(order)
    trainer.fit(module, loader(), ckpt_path=resumed)
    trainer.save_checkpoint(path)
    if resumed is not None:
        return module.moments
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    return moments(optimizer, module.named_parameters())


@pytest.mark.parametrize("order", ["two groups", pytest.param("head first", marks=pytest.mark.long)])
def test_files_of_one_process_and_of_stages_number_parameters_alike(order: str, tmp_path: Path) -> None:
    plain = train(order, tmp_path / "plain.ckpt", None, "auto")
    ours: Moments = {}
    for of_stage in run_ranks(train, 2, order, tmp_path / "ours", None, elastic=True):
        ours |= of_stage
    checkpoint.gather(tmp_path / "ours", tmp_path / "gathered.ckpt")

    module = Module(order)
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(torch.load(tmp_path / "gathered.ckpt", weights_only=False)["optimizer_states"][0])
    gathered = moments(optimizer, module.named_parameters())
    resumed: Moments = {}
    for of_stage in run_ranks(train, 2, order, tmp_path / "again", tmp_path / "plain.ckpt", elastic=True):
        resumed |= of_stage

    assert plain.keys() == ours.keys() == gathered.keys() == resumed.keys()
    for name, moment in plain.items():
        torch.testing.assert_close(ours[name].cpu(), moment.cpu())
        assert torch.equal(gathered[name].cpu(), ours[name].cpu()), name
        assert torch.equal(resumed[name].cpu(), moment.cpu()), name
