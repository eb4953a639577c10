"""State that parts keep, read by hooks on all stages: a head's running sum, metrics and statistics in blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.errors import StepError
from lightning_shard.testing import RanksFailed, assert_trains_alike, run_ranks
from tests.parity import trainer_of
from tests.training.parallel.small import WIDTH, Layer, Trained, batches


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(()))
        self.samples = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            self.total += y.detach().abs().mean(-1).sum()
            self.samples += len(y)
        return y


class Module(Trained):
    """Its learning rate follows what the head has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def on_validation_epoch_end(self) -> None:
        size = float(self.head.total) / self.head.samples
        self.head.total.zero_()
        self.head.samples = 0
        self.log_dict({"size": size, "rate": self.trainer.optimizers[0].param_groups[0]["lr"]})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "size"}}


class ReadsBefore(Module):
    """Scales its input by what the head has kept."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch / (1 + self.head.seen), batch_idx)

    def __init__(self) -> None:
        super().__init__()
        self.head = Seeing()


class Seeing(Head):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.fill_(x.detach().abs().mean())
        return super().forward(x)


def test_hooks_on_all_stages_read_what_the_head_has_kept() -> None:
    assert_trains_alike(Module, batches, "pp2", steps=15, trainer={"val_check_interval": 3}, microbatches=4)


def test_code_before_the_network_that_reads_it_is_refused() -> None:
    with pytest.raises(StepError, match=r"head\.seen changes|changes self\.head\.seen after"):
        assert_trains_alike(ReadsBefore, batches, "pp2", microbatches=4)


class Measured(Layer):
    """Keeps how large its outputs are, as routers keep their load."""

    def __init__(self) -> None:
        super().__init__()
        self.size = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.size.update(y.detach().abs().mean())
        return y


class HasMetrics(Trained):
    block = Measured

    def on_train_epoch_end(self) -> None:
        for block in self.blocks:
            block.size.compute()


class Normed(Trained):
    """Of a block on another stage it read the first values: BatchNorm doesn't change their versions."""

    block = staticmethod(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))

    def on_train_epoch_end(self) -> None:
        for block in self.blocks:
            float(block[1].running_var.mean())


def fit(kind: type[Trained], **options: Any) -> None:
    data = DataLoader(torch.randn(32, WIDTH), batch_size=16)
    trainer_of({"pipeline_parallel_size": 2, **options}, max_epochs=2).fit(kind(), data)


def test_a_metric_in_a_block_counts_its_own_stages_calls_and_is_refused_between_steps() -> None:
    with pytest.raises(RanksFailed, match=r"blocks\.0\.size is a metric in a block, .*Sentence 6 "):
        run_ranks(fit, 2, HasMetrics, elastic=True)


def test_statistics_of_another_stages_blocks_are_refused_in_hooks() -> None:
    with pytest.raises(RanksFailed, match=r"A hook asks for what blocks\.0 keeps as running_var.*a checkpoint has"):
        run_ranks(fit, 2, Normed, schedule="Interleaved1F1B", elastic=True)
