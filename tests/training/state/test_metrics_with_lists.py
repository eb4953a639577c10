"""A metric that keeps lists, called in a training step, is as on one process with several stages on each rank."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_shard.testing import assert_trains_alike

CLASSES = 8


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.Tanh()) for _ in range(4)))
        self.collected = MetricCollection({"auroc": MulticlassAUROC(CLASSES), "acc": MulticlassAccuracy(CLASSES)})
        self.logged = MulticlassAUROC(CLASSES)
        self.updated = MulticlassAUROC(CLASSES)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        result = self.blocks(batch)
        # Metric.forward empties its lists for the batch's value, and then sets new ones; update adds to them
        self.collected(result.softmax(-1), batch.argmax(-1))
        self.logged(result.softmax(-1), batch.argmax(-1))
        self.updated.update(result.softmax(-1), batch.argmax(-1))
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        return (result - 2 * batch).square().mean()

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.collected.compute())
        self.log("updated", self.updated.compute())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(8, CLASSES, generator=made) for _ in range(3)]


def test_it_is_called_or_updated() -> None:
    assert_trains_alike(Module, batches, [{"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"}])
