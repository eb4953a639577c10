"""Rank 0, where Lightning logs and prints, is where a step sees what one process would."""

from __future__ import annotations

import contextlib
import io
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, Model, Tokens, layout, train


class ByHand(Model):
    """Keeps outputs in lists, dicts and numbers, as Lightning's guide shows, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__("gpt")
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
            self.logger.log_metrics({"by_hand": float(accuracy)}, step=7)
        self.kept.clear()
        self.of_kinds = {"right": [], "seen": []}
        self.samples = 0


def fit(folder: Path, sizes: dict[str, int] | None) -> tuple[dict[str, float], str]:
    L.seed_everything(3)
    options: dict[str, Any] = {**QUIET, "logger": CSVLogger(folder), "max_steps": 2, "limit_val_batches": 2}
    strategy: Any = HybridShardStrategy(**sizes) if sizes else "auto"
    stopping = EarlyStopping("accuracy", patience=9)  # fails where a rank hasn't logged it
    trainer = L.Trainer(
        strategy=strategy, devices=2 if sizes else 1, val_check_interval=2, callbacks=[stopping], **options
    )
    loader = DataLoader(Tokens(), batch_size=GLOBAL_BATCH)
    module = ByHand()
    trainer.fit(module, loader, loader)
    if sizes:
        trainer.save_checkpoint(folder / "saved.ckpt")
    written = (Path(trainer.logger.log_dir) / "metrics.csv").read_text() if trainer.is_global_zero else ""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, written


def test_what_a_step_keeps_by_hand_is_whole_where_lightning_logs(tmp_path: Path) -> None:
    expected, _ = fit(tmp_path / "plain", None)
    sizes = {"pipeline_parallel_size": 2}
    (seen, written), (on_first_stage, _) = run_ranks(fit, 2, tmp_path / "ours", sizes, elastic=True)
    assert seen == on_first_stage == expected
    assert 0 < expected["accuracy"] < 1
    assert f"{expected['accuracy']}" in written
    saved = checkpoint.read(tmp_path / "ours" / "saved.ckpt")
    assert saved["seen"].full() == 2 * GLOBAL_BATCH


class Printing(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.print("loss", float(loss))
        return loss


def printed() -> tuple[list[float], list[float], list[str]]:
    """What a step prints on this rank, the losses of the batches, and warnings."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(record=True) as caught:
        seen = train("gpt", layout(pipeline=2), module=partial(Printing, "gpt"), steps=2, microbatches=4)
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
