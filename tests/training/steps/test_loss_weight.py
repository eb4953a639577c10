"""Batches whose parts count for more or less, and some for nothing, by ``loss_weight``."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_shard.testing import assert_trains_alike
from tests.training.habits.harness import Net
from tests.training.parallel.small import Descends


class Masked(Descends):
    """The mean over what a mask leaves; nothing but the mask keeps the rest out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        errors = (self.net(batch["x"]).sum(1) - batch["y"]).square()
        loss = (errors * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)
        self.log("train_loss", loss, batch_size=int(count(batch)))
        self.log("samples", float(len(errors)) / len(batch["x"]))
        return loss


def batches() -> list[dict[str, Tensor]]:
    """Of 8 samples 5 count, then none, then 7."""
    x, y = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(4)).split([4, 1], dim=2)
    masks = (torch.arange(8) < torch.tensor([[5], [0], [7]])).int()
    return [{"x": x[i], "y": y[i, :, 0], "mask": masks[i]} for i in range(3)]


def count(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


def test_batches_count_by_their_weight_and_one_of_which_nothing_counts_has_gradients_of_zero() -> None:
    assert_trains_alike(Masked, batches, ["pp2", "dp2"], loss_weight=count)
