"""LightningCLI with this package imported: names stay clear, arguments are there, checkpoints give hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_shard import HybridShardStrategy, checkpoint
from lightning_shard.errors import ConfigurationError

QUIET = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]


class Sized(BoringModel):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.extra = torch.nn.Linear(width, 1)


class NeverRuns(L.Trainer):
    def fit(self, model: Any, datamodule: Any = None, ckpt_path: str | None = None) -> None:  # type: ignore[override]
        return None


def command_line(*arguments: str, run: bool = False) -> Any:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    kind: Any = {"save_config_callback": None, "trainer_class": NeverRuns}
    return LightningCLI(Sized, BoringDataModule, run=run, args=[*arguments], **kind)


def test_hyperparameters_come_from_a_checkpoint_of_ours(tmp_path: Path) -> None:
    state = {"pytorch-lightning_version": L.__version__, "hyper_parameters": {"width": 7}}
    checkpoint.save(dict(Sized(7).state_dict()), tmp_path / "c", trainer_state=state)
    made = command_line("fit", *QUIET, f"--ckpt_path={tmp_path / 'c'}", run=True)
    assert made.model.hparams.width == 7
    made = command_line("fit", *QUIET, "--ckpt_path=last", run=True)
    assert made.model.hparams.width == 3


@pytest.mark.parametrize("strategy", [HybridShardStrategy, lambda: "hybrid_shard"], ids=["instance", "name"])
@pytest.mark.parametrize(
    ("precision", "says"),
    [
        ("transformer-engine", "'transformer-engine' isn't supported by HybridShardStrategy"),
        ("16-mixed", "'16-mixed' isn't done on the CPU .* use precision='bf16-mixed'"),
    ],
)
def test_precisions_are_refused_by_name_before_any_process_starts(precision: Any, says: str, strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match=says):
        L.Trainer(strategy=strategy(), precision=precision, accelerator="cpu", devices=1, logger=False)
