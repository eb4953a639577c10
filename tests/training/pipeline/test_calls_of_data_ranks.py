"""Steps that call other data ranks, on stages: all run them equally often, whatever each rank's batches are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, SumMetric

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import StepError
from lightning_shard.plugin.steps.batches import OwnCalls
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, trainer_of
from tests.training.parallel.small import WIDTH, Trained
from tests.training.steps.test_uneven_batches import Ragged


class Lengths(Dataset[tuple[Tensor, int]]):
    """Sequences padded on each data rank by itself: on one of them as long as a microbatch has samples."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        length = (4 if dist.get_rank() % 2 else 5) + index // 32  # another shape in the second batch
        return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(index)), index % WIDTH


class Gathers(Trained):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        everyones: Any = self.all_gather(out.detach().mean(0))
        return F.cross_entropy(out + everyones.mean(0), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.all_gather(loss)
        if self.global_rank == 0:
            self.log("val_loss", loss, rank_zero_only=True)


def fit() -> int:
    trainer = trainer_of({"pipeline_parallel_size": 2, "data_parallel_size": 2, "microbatches": 4}, 4, max_epochs=2)
    loader: Any = DataLoader(Lengths(), batch_size=8, num_workers=0)
    trainer.fit(Gathers(), loader, loader)
    return trainer.global_step


@pytest.mark.filterwarnings("ignore")
def test_data_ranks_do_not_wait_for_each_other() -> None:
    assert run_ranks(fit, 4, elastic=True) == [6] * 4


class Metrics(Ragged):
    """Sums and means that are kept in lists, dicts and callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.means = {"train": SumMetric(), "val": SumMetric()}, [MeanMetric()]
        self.logged = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.counts["train"].update(len(batch[0]))
        self.of_epoch.update(len(batch[0]))
        return self.loss(batch)

    def on_train_epoch_start(self) -> None:
        self.of_epoch = SumMetric()

    def on_train_epoch_end(self) -> None:
        self.log("of_epoch", self.of_epoch.compute())
        self.log("trained", self.counts["train"].compute())  # never reset

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.counts["val"].update(len(batch[0]))
        own = SumMetric()
        own.update(len(batch[0]))
        self.logged += float(own.compute())
        self.means[0].update(loss)
        self.log("val_loss", loss)

    def on_validation_epoch_end(self) -> None:
        self.log("own", self.logged)
        self.logged = 0.0
        self.log("validated", self.counts["val"].compute())
        self.log("val_mean", self.means[0].compute())


class Counts(L.Callback):
    def __init__(self) -> None:
        self.batches = {"val": [SumMetric()]}

    def on_validation_batch_end(self, *_: Any) -> None:
        self.batches["val"][0].update(1.0)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("val_batches", self.batches["val"][0].compute())


def kept(sizes: dict[str, int]) -> dict[str, float]:
    strategy: Any = HybridShardStrategy(**sizes) if sizes else "auto"
    L.seed_everything(3, verbose=False)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data_ranks, stages = sizes.get("data_parallel_size", 1), sizes.get("pipeline_parallel_size", 1)
    loader: Any = DataLoader([*zip(x, 3 * x[:, :2])], batch_size=8 // data_ranks)
    settings = {**QUIET, "devices": data_ranks * stages, "max_steps": -1, "max_epochs": 3}
    trainer = L.Trainer(strategy=strategy, callbacks=[Counts()], **settings)
    trainer.fit(Metrics(), loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name != "val_loss"}


def test_metrics_outside_of_modules_are_reduced_over_data_ranks_only() -> None:
    expected = run_ranks(kept, 1, {}, init=False)[0]
    expected["val_batches"] *= 2
    for found in run_ranks(kept, 4, {"pipeline_parallel_size": 2, "data_parallel_size": 2}, elastic=True):
        assert found == pytest.approx(expected, rel=1e-4)


@dataclass
class Stages:
    in_step: bool


@pytest.mark.parametrize("in_step", [True, False])
def test_a_steps_own_collective_calls_over_the_world_are_refused(in_step: bool) -> None:
    own, calls = dist.all_reduce, OwnCalls(cast(Any, Stages(in_step)))
    with calls.watched():
        assert not calls.made
        for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier):
            with pytest.raises(StepError, match=r"calls torch\.distributed\.(all_reduce|barrier) over all ranks"):
                call()
    assert dist.all_reduce is own
    assert calls.made == in_step  # what was logged is reduced when the step has ended
