"""Values of sharded blocks that reach the loss by another way than the blocks' output, on data ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike
from tests.alike import Trains, assert_train_alike
from tests.training.parallel.small import WIDTH, Descends, batches


class Block(nn.Module):
    """It scales, whose backward reads a parameter as it is: from freed memory that would be a segmentation fault."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.inner, self.outer, self.aside = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x) * self.scale
        output = x + self.outer(self.kept)
        self.late = self.aside(x * self.scale)
        return output


class Module(Descends):
    """Its loss is of what blocks keep; of the last block's output there is none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        self.run(batch)
        return F.mse_loss(self.head(sum(block.kept for block in self.blocks)), batch)  # type: ignore[misc, arg-type]


class Late(Module):
    """Besides the output, of what blocks compute after it, whose backward comes before the output's."""

    def loss(self, batch: Tensor) -> Tensor:
        output = self.run(batch)
        return F.mse_loss(self.head(output), batch) + sum(block.late.square().mean() for block in self.blocks)  # type: ignore[operator, misc]


class Begins(Module):
    """Of the output alone, until the step ``first``."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.head(self.run(batch)), batch)
        if batch_idx >= self.first:
            loss = loss + sum(block.late.square().mean() for block in self.blocks)  # type: ignore[operator, misc]
        return loss


def test_a_gradient_that_enters_a_unit_elsewhere_than_at_its_output() -> None:
    kinds = {"kept": Module, "late": Late, "late, from the second step on": partial(Begins, 1)}
    assert_train_alike({name: Trains(kind, batches, "dp2") for name, kind in kinds.items()})


@pytest.mark.long
def test_on_stages_that_free_parameters_after_each_forward() -> None:
    freed = {"layouts": "pp2 x dp2", "options": {"reshard_after_forward": True}}
    assert_train_alike({kind.__name__: Trains(kind, batches, **freed) for kind in (Module, Late)})


def test_a_loss_that_begins_after_the_second_step_to_use_what_units_compute_is_refused() -> None:
    with pytest.raises(StepError, match=r"loss begins in this step to use what blocks\.0, blocks\.1 keep or compute"):
        assert_trains_alike(partial(Begins, 2), batches, ["dp2"])
    with pytest.raises(StepError, match=r"blocks\.0 keeps as late.* in a loss, with a weight of 0"):
        assert_trains_alike(partial(Begins, 2), batches, ["pp2"])
