"""State that blocks keep, read by hooks on all stages: metrics in blocks, and statistics of normalisation layers."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import QUIET

WIDTH = 8


class Measured(nn.Linear):
    """Keeps how large its outputs are, as routers keep their load."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.size = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        self.size.update(y.detach().abs().mean())
        return x + y


class Module(L.LightningModule):
    """Refused before: what metrics count was taken for what the blocks keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.block() for _ in range(4))
        self.seen: list[float] = []

    def block(self) -> nn.Module:
        return Measured()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, batch[0].roll(1, -1))

    def on_train_epoch_end(self) -> None:
        for layer in self.layers:
            self.seen.append(float(layer.size.compute()))  # type: ignore[union-attr, operator]
            layer.size.reset()  # type: ignore[union-attr, operator]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MeasuredByOne(Measured):
    def __init__(self, size: torchmetrics.Metric) -> None:
        super().__init__()
        self.size = size


class Shared(Module):
    """A metric for two neighbours, on one stage; before, for all of them, those of one stage were counted."""

    per_metric = 2

    def __init__(self) -> None:
        super().__init__()
        metrics = [torchmetrics.MeanMetric() for _ in range(4 // self.per_metric)]
        self.layers = nn.ModuleList(MeasuredByOne(metrics[place // self.per_metric]) for place in range(4))

    def on_train_epoch_end(self) -> None:
        for layer in self.layers[:: self.per_metric]:
            self.seen.append(float(layer.size.compute()))  # type: ignore[union-attr, operator]
            layer.size.reset()  # type: ignore[union-attr, operator]


class SharedByAll(Shared):
    per_metric = 4


class Normed(Module):
    """Of a block on another stage it read the first values: BatchNorm doesn't change their versions."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def on_train_epoch_end(self) -> None:
        for layer in self.layers:
            self.seen.append(float(layer[1].running_var.mean()))  # type: ignore[index]


def fit(kind: type[Module], stages: int, **options: Any) -> list[float]:
    torch.manual_seed(1)
    module = kind()
    settings: dict[str, Any] = {"devices": 1, "strategy": "auto"}
    if stages > 1:
        settings = {"devices": stages, "strategy": HybridShardStrategy(pipeline_parallel_size=stages, **options)}
    data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2)))
    L.Trainer(max_epochs=2, **settings, **QUIET).fit(module, DataLoader(data, batch_size=16))
    return module.seen


@pytest.mark.parametrize("kind", [Module, pytest.param(Shared, marks=pytest.mark.long)])
def test_a_metric_in_a_block_is_on_all_stages_what_its_own_stage_computes(kind: type[Module]) -> None:
    expected = fit(kind, 1)
    for seen in run_ranks(fit, 2, kind, 2, elastic=True):
        assert seen == pytest.approx(expected, rel=1e-5)


def test_a_metric_that_blocks_of_several_stages_share_is_refused() -> None:
    with pytest.raises(RanksFailed, match=r"Several pipeline stages update one MeanMetric, .* layers\.0, layers\.1"):
        run_ranks(fit, 2, SharedByAll, 2, elastic=True)


def test_statistics_of_another_stages_blocks_are_refused_in_hooks() -> None:
    with pytest.raises(RanksFailed, match=r"A hook asks for what layers\.0 keeps as running_var.*a checkpoint has"):
        run_ranks(fit, 2, Normed, 2, schedule="Interleaved1F1B", elastic=True)
