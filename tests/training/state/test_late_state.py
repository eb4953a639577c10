"""What a step leaves on the last stage, and parameters without a gradient, in a fit on two stages."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.alike import Trains, assert_train_alike
from tests.parity import GLOBAL_BATCH, VOCABULARY, loader, trainer_of

WIDTH = 8


class Counts(L.LightningModule):
    """Scales its input by what its last step has left, and trains its head only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = self.last = 1
        self.shadows = {"of the head": [nn.Parameter(torch.ones(()), requires_grad=False)]}
        self.noise = torch.Generator().manual_seed(1)

    def on_train_batch_start(self, *_: Any) -> None:
        self.scale = self.last

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.embed(batch["x"]) * self.scale
        hidden = hidden + torch.rand(WIDTH, generator=self.noise).to(hidden.device) * 0
        for block in self.blocks:
            hidden = block(hidden)
        self.last = batch_idx + 2
        self.shadows["of the head"][0].fill_(self.last)
        return F.cross_entropy(self.head(hidden.detach()).flatten(0, 1), batch["y"].flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        self.log_dict({"last": float(self.last), "shadow": float(self.shadows["of the head"][0])})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def batches() -> list[dict[str, Tensor]]:
    return [*loader(GLOBAL_BATCH, samples=4 * GLOBAL_BATCH)]


class Normed(nn.Linear):
    """Keeps its weight's norm."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(2 * self.weight.norm())
        return super().forward(x)


class InPlaceInABlock(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed(WIDTH, WIDTH) for _ in range(2))


def test_a_change_of_a_blocks_parameter_in_its_call_is_refused() -> None:
    with pytest.raises(StepError, match=r"The parameter blocks\.0\.weight .*changed in place.*Sentence 8"):
        assert_trains_alike(InPlaceInABlock, batches, "dp2")


class KeepsLoss(Counts):
    """In a tensor that is first made in a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.loss = loss.detach()
        return loss


def warned(kind: type[Counts]) -> list[str]:
    trainer = trainer_of({"pipeline_parallel_size": 2}, max_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind(), loader(GLOBAL_BATCH))
    return [
        str(each.message)
        for each in caught
        if re.search(r"^- loss: .*counts once per microbatch", str(each.message), re.M)
    ]


def test_a_loss_that_each_microbatch_keeps_is_reported_once() -> None:
    assert [len(each) for each in run_ranks(warned, 2, KeepsLoss, elastic=True)] == [1, 0]


class Evaluator:
    def __init__(self) -> None:
        self.matrix = np.zeros((VOCABULARY, VOCABULARY), dtype=np.int64)

    def add(self, expected: Any, found: Any) -> None:
        np.add.at(self.matrix, (expected, found), 1)


class Confuses(Counts):
    """In arrays, of its own and of an object, and in a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = np.zeros((VOCABULARY, VOCABULARY), dtype=np.int64)
        self.evaluator = Evaluator()
        self.listed = [torch.zeros(VOCABULARY), torch.zeros(VOCABULARY)]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        found, expected = self.head(hidden).argmax(-1).flatten(), batch["y"].flatten()
        np.add.at(self.matrix, (expected.numpy(), found.numpy()), 1)
        self.evaluator.add(expected.numpy(), found.numpy())
        self.listed[1] += torch.bincount(found, minlength=VOCABULARY)

    def on_validation_epoch_end(self) -> None:
        for name, each in {"own": self.matrix, "object's": self.evaluator.matrix}.items():
            self.log_dict({f"{name} trace": float(np.trace(each) / each.sum()), f"{name} most": float(each.argmax())})
            each[:] = 0
        self.log_dict({f"listed {place}": value for place, value in enumerate(self.listed[1])})


class Changes(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"scale": 1.0})
        self.first = True
        self.turns = {"a": 1.0, "b": 2.0, "c": 3.0}
        self.ring = [0.0] * 200
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.hparams.scale = 1.0 + batch_idx
        if hasattr(self, "first"):
            del self.first
        name = next(iter(self.turns))
        self.turns[name] = self.turns.pop(name)
        self.ring[150 + batch_idx] = float(loss)
        self.mean.data.add_(loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        held = (self.hparams.scale, hasattr(self, "first"), [*self.turns].index("a"), sum(self.ring), self.mean)
        self.log_dict({f"{place}": float(value) for place, value in enumerate(held)})


def test_what_a_step_leaves_is_on_all_stages_as_in_one_process() -> None:
    validated = {"val_check_interval": 2}
    assert_train_alike(
        {
            "late state, and parameters that aren't trained": Trains(Counts, batches, options={"microbatches": 2}),
            "arrays that steps count in": Trains(Confuses, batches, steps=4, trainer=validated),
            "every kind of change": Trains(Changes, batches, options={"microbatches": 1}),
        }
    )


class BeginsLater(L.LightningModule):
    """Scales what it validates by what an earlier batch has left, from the fourth batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = 1.0

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0] * self.scale
        for block in self.blocks:
            x = block(x)
        if batch_idx >= 3:
            self.scale = 2.0 + batch_idx
        return x


def validated() -> list[str]:
    trainer = trainer_of({"pipeline_parallel_size": 2, "microbatches": 1})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.validate(BeginsLater(), DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=2), verbose=False)
    return [text for each in said if "didn't in its first batch" in (text := str(each.message))]


def test_an_evaluation_that_begins_to_leave_state_after_others_have_begun_is_warned_of() -> None:
    last, first = run_ranks(validated, 2, elastic=True, timeout_s=50)
    assert last == []
    assert len(first) == 1
    assert "changes self.scale after" in first[0]
