"""Rank 0, where Lightning logs and prints, is where a step sees what one process would."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.parity import GLOBAL_BATCH, Model, layout, loader, train


class ByHand(Model):
    """Keeps outputs in lists, dicts and numbers, as Lightning's guide shows, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.kept: list[Tensor] = []
        self.of_kinds: dict[str, list[float]] = {"right": [], "seen": []}
        self.samples = 0

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["x"])
        right = (logits.argmax(-1) == batch["y"]).float()
        self.kept.append(right)
        self.of_kinds["right"].append(right.sum().item())
        self.of_kinds["seen"].append(float(right.numel()))
        self.samples += len(batch["x"])
        self.seen += len(batch["x"])

    def on_validation_epoch_end(self) -> None:
        accuracy = torch.cat(self.kept).mean()
        self.log("accuracy", accuracy)
        self.log("by_kinds", sum(self.of_kinds["right"]) / sum(self.of_kinds["seen"]))
        self.log("samples", float(self.samples))
        if self.trainer.is_global_zero:
            assert sum(map(len, self.kept)) == len(BATCHES) * GLOBAL_BATCH
        self.kept.clear()
        self.of_kinds = {"right": [], "seen": []}
        self.samples = 0


BATCHES = [*loader(GLOBAL_BATCH, samples=2 * GLOBAL_BATCH)]


def batches() -> list[dict[str, Tensor]]:
    return BATCHES


def test_what_a_step_keeps_by_hand_is_whole_where_lightning_logs() -> None:
    assert_trains_alike(ByHand, batches, "pp2", steps=2, trainer={"val_check_interval": 2})


class Printing(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.print("loss", float(loss))
        return loss


def printed() -> tuple[list[float], list[float], list[str]]:
    """What a step prints on this rank, the losses of the batches, and warnings."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(record=True) as caught:
        seen = train("gpt", layout(pipeline=2), module=Printing, steps=2, microbatches=4)
    values = [float(line.split()[1]) for line in out.getvalue().split("\n") if line.startswith("loss")]
    return values, seen.losses, [str(each.message) for each in caught]


def test_what_a_step_prints_is_there_once_for_each_microbatch_and_told_of() -> None:
    """The first batch's first two run once more, to see what crosses and what they leave."""
    (values, losses, said), (other, *_) = run_ranks(printed, 2, elastic=True)
    assert len(values) == 8
    assert not other
    for loss, of_batch in zip(losses, (values[:4], values[4:]), strict=True):
        assert sum(of_batch) / 4 == pytest.approx(loss, rel=1e-5)
    assert sum("calls self.print" in each for each in said) == 1
