"""Steps that compute something else from some epoch on: a term of the loss, more blocks, another batch size."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET

WIDTH = 8


class Grows(L.LightningModule):
    """A loss of the first block's result is added in the second epoch, and blocks in the third and fourth."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.losses: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        number, states = (2, 2, 3, 4)[self.current_epoch], [batch]
        for block in self.blocks[:number]:
            states.append(states[-1] + block(states[-1]))
        loss = F.mse_loss(self.head(states[-1]), batch)
        return loss + states[1].square().mean() if self.current_epoch else loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics.get("val_loss", 0)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(schedule: str | None) -> tuple[list[float], dict[str, Tensor]]:
    module, generator = Grows(), torch.Generator().manual_seed(1)
    lengths = (3, 5, 3, 5)  # the second shape is known from the epoch before
    data = [torch.randn(4, length, WIDTH, generator=generator) for length in lengths]
    strategy: Any = HybridShardStrategy(pipeline_parallel_size=2, schedule=schedule) if schedule else "auto"
    trainer = L.Trainer(**QUIET, max_epochs=4, strategy=strategy, devices=2 if schedule else 1)
    trainer.fit(module, DataLoader(data, batch_size=None), DataLoader(data[:2], batch_size=None))  # type: ignore[arg-type]
    gather = getattr(trainer.strategy, "gather_full_parameters", None)
    parameters = gather() if gather is not None else dict(module.named_parameters())
    return module.losses, {name: value.detach().clone() for name, value in (parameters or {}).items()}


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.long)])
def test_what_crosses_is_looked_at_anew_in_each_epoch(schedule: str) -> None:
    losses, parameters = run_ranks(fit, 2, schedule, elastic=True)[0]
    expected = fit(None)
    assert losses == pytest.approx(expected[0], rel=2e-6)
    torch.testing.assert_close(parameters, expected[1], rtol=1e-5, atol=1e-6)
