"""Rank 0, where Lightning logs and prints, is where a step sees what one process would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, Model, Tokens


class ByHand(Model):
    """Keeps outputs in a list, logs a mean of them, writes to the logger, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__("gpt")
        self.register_buffer("seen", torch.zeros(()))
        self.kept: list[Tensor] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["x"])
        self.kept.append((logits.argmax(-1) == batch["y"]).float())
        self.seen += len(batch["x"])

    def on_validation_epoch_end(self) -> None:
        if self.kept:
            accuracy = torch.cat(self.kept).mean()
            self.log("accuracy", accuracy, rank_zero_only=True)
            if self.trainer.is_global_zero:
                self.logger.log_metrics({"by_hand": float(accuracy)}, step=7)
        self.kept.clear()


def fit(folder: Path, sizes: dict[str, int] | None) -> tuple[float, str]:
    L.seed_everything(3)
    options: dict[str, Any] = {**QUIET, "logger": CSVLogger(folder), "max_steps": 2, "limit_val_batches": 2}
    strategy: Any = HybridShardStrategy(**sizes) if sizes else "auto"
    trainer = L.Trainer(strategy=strategy, devices=2 if sizes else 1, val_check_interval=2, **options)
    loader = DataLoader(Tokens(), batch_size=GLOBAL_BATCH)
    module = ByHand()
    trainer.fit(module, loader, loader)
    if sizes:
        trainer.save_checkpoint(folder / "saved.ckpt")
    written = (Path(trainer.logger.log_dir) / "metrics.csv").read_text() if trainer.is_global_zero else ""
    return float(trainer.callback_metrics.get("accuracy", -1)), written


def test_what_a_step_keeps_by_hand_is_whole_where_lightning_logs(tmp_path: Path) -> None:
    expected, _ = fit(tmp_path / "plain", None)
    sizes = {"pipeline_parallel_size": 2}
    (seen, written), _ = run_ranks(fit, 2, tmp_path / "ours", sizes, elastic=True)
    assert seen == expected > 0
    assert f"{expected}" in written
    saved = checkpoint.read(tmp_path / "ours" / "saved.ckpt")
    assert saved["seen"].full() == 2 * GLOBAL_BATCH
