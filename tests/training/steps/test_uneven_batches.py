"""Batches that differ in size, on stages: data ranks don't wait for each other, and a smaller one counts as alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_shard.testing import run_ranks
from tests.parity import trainer_of
from tests.training.habits.harness import Block, Net
from tests.training.parallel.small import Descends

BATCH = 8
PP2_DP2 = {"pipeline_parallel_size": 2, "data_parallel_size": 2}


class Module(Descends):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - 1).square().mean()
        return loss + 0 * self.all_gather(loss.detach()).sum()  # a collective call of the step's own

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.trained = strategy.gather_full_parameters()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch)
        return out + 0 * self.all_gather(out.sum()).sum()


def samples(number: int) -> Tensor:
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(2))


class Stream(IterableDataset[Tensor]):
    """Deals by data rank, as users' streams do: with 31 samples the last batches have 8 and 7."""

    def __init__(self, data_rank: int) -> None:
        self.data_rank = data_rank

    def __iter__(self) -> Iterator[Tensor]:
        yield from samples(31)[self.data_rank :: 2]


class Buckets:
    """Batches of as many samples as a budget of tokens allows. Each data rank gets every other one."""

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in (8, 8, 6, 9, 8, 5, 7, 3, 1, 1):
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return 10


def run(settings: dict[str, Any], data: str) -> tuple[dict[str, Tensor], float, Tensor]:
    devices = 2 * settings.get("pipeline_parallel_size", 1)
    trainer = trainer_of(settings, devices, max_epochs=2)
    loader: Any = (
        DataLoader(Stream(trainer.strategy.layout.data_rank), batch_size=BATCH)
        if data == "stream"
        else DataLoader(samples(56), batch_sampler=Buckets())  # type: ignore[arg-type]
    )
    module = Module()
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)
    loss = float(trainer.callback_metrics["val_loss"])
    predicted: Any = trainer.predict(module, DataLoader(samples(29), batch_size=BATCH))  # 7 and 6 in the last batches
    predicted += trainer.predict(Module(), DataLoader(samples(15), batch_size=BATCH))  # 8 and 7 in the first
    return module.trained, loss, torch.cat(predicted)


RESHARDED = {"reshard_after_forward": True}
REDUCED = {"reduce_each_microbatch": True}


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        ("stream", [{}]),
        pytest.param("stream", [RESHARDED, REDUCED], marks=pytest.mark.long),
        pytest.param("buckets", [{}, RESHARDED, REDUCED], marks=pytest.mark.long),
    ],
)
def test_batches_of_different_sizes_train_and_evaluate_as_without_stages(
    data: str, settings: list[dict[str, bool]]
) -> None:
    expected = run_ranks(run, 2, {"data_parallel_size": 2}, data, elastic=True)
    for more in settings:
        found = run_ranks(run, 4, {**PP2_DP2, **more}, data, elastic=True)
        for rank, (weights, loss, predicted) in enumerate(found):
            plain_weights, plain_loss, plain_predicted = expected[rank % 2]
            assert loss == pytest.approx(plain_loss, rel=1e-5), more
            torch.testing.assert_close(predicted, plain_predicted, msg=str(more))
            for name, weight in weights.items():
                torch.testing.assert_close(weight, plain_weights[name], msg=f"{more} {name}")


class Ragged(L.LightningModule):
    """As templates of Lightning projects do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.blocks = nn.ModuleList(Block() for _ in range(4))
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.train_loss(loss)
        self.log("train_loss", self.train_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.val_loss.update(loss)
        self.log("val_loss", self.val_loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def ragged(settings: dict[str, Any] | None) -> dict[str, float]:
    L.seed_everything(3, verbose=False)
    x = torch.randn(29, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader([*zip(x, 3 * x[:, :2])], batch_size=8)
    devices = 1 if settings is None else 2
    trainer = trainer_of(settings, devices, max_steps=-1, max_epochs=2)
    trainer.fit(Ragged(), loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_smaller_batch_counts_as_in_one_process() -> None:
    (expected,) = run_ranks(ragged, 1, None, init=False)
    for found in run_ranks(ragged, 2, {"pipeline_parallel_size": 2}, elastic=True):
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
