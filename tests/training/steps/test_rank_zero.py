"""Rank 0, where Lightning logs and prints, is where a step sees what one process would."""

from __future__ import annotations

import contextlib
import io
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
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


class Memory(Logger):
    """Keeps what it is given."""

    name, version = "memory", 0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def experiment(self) -> Memory:
        return self

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if metrics.keys() <= set("abc"):
            self.rows.append(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class Writes(Model):
    """Prints, and gives its loss to loggers itself, in either order."""

    def __init__(self, prints_first: bool) -> None:
        super().__init__()
        self.ways = [self.prints, self.logs] if prints_first else [self.logs, self.prints]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        for way in self.ways:
            way(float(loss))
        return loss

    def prints(self, loss: float) -> None:
        self.print("loss", loss)

    def logs(self, loss: float) -> None:
        assert isinstance(self.logger, Memory)
        assert self.logger.name == "memory"
        self.logger.log_metrics({"a": loss})
        self.logger.experiment.log_metrics({"b": loss})
        for logger in self.loggers:
            logger.log_metrics({"c": loss})  # type: ignore[union-attr]


Written = tuple[list[float], list[dict[str, float]], list[float], list[str]]


def written(prints_first: bool) -> Written:
    """What a step prints and logs on this rank, the losses of the batches, and warnings."""
    out, logger = io.StringIO(), Memory()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(record=True) as caught:
        module, settings = partial(Writes, prints_first), {"logger": logger}
        seen = train("gpt", layout(pipeline=2), module=module, steps=2, trainer=settings, microbatches=4)
    values = [float(line.split()[1]) for line in out.getvalue().split("\n") if line.startswith("loss")]
    return values, logger.rows, seen.losses, [str(each.message) for each in caught]


def written_in_both_orders() -> list[Written]:
    return [written(prints_first) for prints_first in (True, False)]


def test_what_a_step_prints_or_gives_to_loggers_is_there_once_for_each_microbatch_and_told_of() -> None:
    """Of what is run once more, to see what crosses and what steps leave, nothing is."""
    on_first, on_other = run_ranks(written_in_both_orders, 2, elastic=True)
    for (values, rows, losses, said), what in zip(on_first, ("print", "logger.log_metrics"), strict=True):
        assert len(values) == 8
        assert rows == [{name: value} for value in values for name in "abc"]
        for loss, of_batch in zip(losses, (values[:4], values[4:]), strict=True):
            assert sum(of_batch) / 4 == pytest.approx(loss, rel=1e-5)
        [told] = [each for each in said if "A step calls " in each]
        assert f"calls self.{what}." in told
        assert "on_train_batch_end" in told
    assert not any(values or rows for values, rows, _, _ in on_other)
