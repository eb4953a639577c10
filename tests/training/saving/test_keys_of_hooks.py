"""What hooks put into Lightning's checkpoint is there again, under any key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.errors import UnsupportedStateError
from tests.parity import QUIET, Model, loader

KEPT: dict[str, Any] = {
    "transformers": "4.1",
    "extra_state": {"ema": 1.5},
    "rank_state": {"w": torch.ones(2)},
    "layout": 1,
    "current_model_state": None,
    "$": "dollar",
}


class Keeping(Model):
    put = KEPT
    found: dict[str, Any] | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.put)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = {key: checkpoint[key] for key in self.put if key in checkpoint}


def fit(strategy: str, steps: int, path: Path | None, ckpt_path: Path | None = None, **put: Any) -> Keeping:
    L.seed_everything(3)
    module = Keeping()
    module.put = put or KEPT
    trainer = L.Trainer(strategy=strategy, devices=1, max_steps=steps, **QUIET)
    trainer.fit(module, loader(16), ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    return module


def same(found: dict[str, Any] | None) -> bool:
    assert torch.equal(found["rank_state"]["w"], torch.ones(2))
    return {**found, "rank_state": None} == {**KEPT, "rank_state": None}


def test_hooks_find_what_they_put(tmp_path: Path) -> None:
    fit("hybrid_shard", 1, tmp_path / "ours")
    assert same(fit("hybrid_shard", 2, None, tmp_path / "ours").found)
    checkpoint.gather(tmp_path / "ours", tmp_path / "gathered.ckpt")
    assert same(fit("auto", 2, None, tmp_path / "gathered.ckpt").found)
    fit("auto", 1, tmp_path / "plain.ckpt")
    for other in ("gathered.ckpt", "plain.ckpt"):
        assert same(fit("hybrid_shard", 2, None, tmp_path / other).found)


def test_a_key_that_is_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="'optimizer_tensors' into the checkpoint"):
        fit("hybrid_shard", 1, tmp_path / "ours", optimizer_tensors=1)
