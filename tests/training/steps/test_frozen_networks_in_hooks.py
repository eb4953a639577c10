"""Frozen networks beside the one that trains, that hooks call: a teacher, an autoencoder that latents are scaled by."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike
from tests.alike import Trains, assert_train_alike


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(12)
        self.teacher = Net(6).requires_grad_(False)
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(3))

    def on_fit_start(self) -> None:
        self.seen += self.teacher(torch.ones(1, 8))[0]

    @torch.no_grad()
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:  # as latent diffusion's scale_by_std
            del self.scale
            self.register_buffer("scale", 1 / self.encoder(torch.arange(8.0)).std())

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += self.teacher.blocks[1](torch.ones(1, 6)).mean() + self.teacher(torch.ones(2, 8)).mean(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            targets = self.teacher(batch).softmax(-1)
        scale: Any = self.scale
        return F.cross_entropy(self.net(scale * self.encoder(batch)), targets)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def on_validation_epoch_end(self) -> None:
        self.seen += self.teacher(torch.ones(2, 8)).mean(0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class MeanTeacher(L.LightningModule):
    """Its teacher is averaged by name; ``by_position`` also tries what goes wrong on a stage, which has a part."""

    def __init__(self, by_position: bool = False) -> None:
        super().__init__()
        self.by_position = by_position
        self.student, self.teacher = Net(8), Net(8).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            targets = self.teacher(batch.flip(-1)).softmax(-1)
        return F.cross_entropy(self.student(batch), targets)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        named = dict(self.student.blocks.named_parameters())
        teachers = dict(self.teacher.blocks.named_parameters())
        pairs = zip(named.values(), teachers.values()) if self.by_position else ((named[n], teachers[n]) for n in named)
        for parameter, average in pairs:
            average.mul_(0.5).add_(parameter, alpha=0.5)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.teacher(batch) - self.student(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=0.01)


class OfTheNetwork(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        self.net.head(torch.ones(12))


def batches() -> list[Tensor]:
    return list(torch.linspace(-3, 3, 3 * 8 * 8).sin().view(3, 8, 8))


def test_hooks_call_frozen_networks_on_stages_and_average_a_teacher_by_name() -> None:
    validations = {"val_check_interval": 2}
    averaged = Trains(MeanTeacher, batches, "pp2 x dp2", trainer=validations)
    assert_train_alike({"called": Trains(Module, batches, steps=2), "averaged": averaged})


def test_a_teacher_that_is_averaged_by_position_is_refused() -> None:
    with pytest.raises(StepError, match="stages' copies differ"):
        assert_trains_alike(partial(MeanTeacher, by_position=True), batches, "pp2")


def test_hooks_that_call_a_stages_part_are_refused() -> None:
    with pytest.raises(StepError, match="a Linear, was called outside a step"):
        assert_trains_alike(OfTheNetwork, batches, "pp2")
