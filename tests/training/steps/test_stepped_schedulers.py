"""Learning-rate schedulers that a step steps itself, or that step by what one rank has: refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import Model, layout, train


class Steps(Model):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "frequency": 1000}]


def fit() -> None:
    train("gpt", layout(pipeline=2), module=Steps, steps=4)


def test_with_several_it_is_refused() -> None:
    """It was stepped once for each of them, and more often in the first batch."""
    with pytest.raises(RanksFailed, match=r"steps the ExponentialLR itself, and runs once for each of 4 microbatches"):
        run_ranks(fit, 2, elastic=True, timeout_s=60)


class Plateau(Model):
    """Its scheduler monitors a data rank's own value, and lowered the rate of that rank's shards only."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("own", float(batch_idx if self.global_rank else -batch_idx))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "own"}]


def fit_on_data_ranks() -> None:
    with pytest.raises(StepError, match=r"different settings \(this rank's learning rates: .*sync_dist=True"):
        train("gpt", layout(data=2), module=Plateau, steps=4)


def test_optimizers_with_other_settings_on_a_rank_are_refused_on_all() -> None:
    run_ranks(fit_on_data_ranks, 2, elastic=True)
