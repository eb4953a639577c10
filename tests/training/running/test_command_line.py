"""LightningCLI from a command line, on ranks: what is asked for there is what trains, and its config file says so."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.training.habits.harness import Samples, Steps, difference

pytest.importorskip("jsonargparse")

STRATEGY = "--trainer.strategy=lightning_shard.HybridShardStrategy"
STAGES = [
    STRATEGY,
    "--trainer.strategy.pipeline_parallel_size=2",
    "--trainer.strategy.data_parallel_size=1",
    "--trainer.strategy.microbatches=2",
    "--trainer.strategy.schedule=GPipe",
    "--trainer.strategy.placement=[1, 1]",
    "--trainer.strategy.pipeline_blocks=net.blocks",
    "--trainer.strategy.loss_weight=tests.training.running.test_command_line.weight",
    "--trainer.strategy.checkpoint_io=lightning_shard.ShardedCheckpointIO",
    "--trainer.strategy.checkpoint_io.exclude_frozen=true",
    "--trainer.strategy.process_group_backend=gloo",
]
DATA = ["--trainer.strategy=hybrid_shard", "--data.batch_size=4"]
CONFIGURED = [
    "--optimizer=AdamW",
    "--optimizer.lr=0.05",
    "--lr_scheduler=ExponentialLR",
    "--lr_scheduler.gamma=0.5",
]


class Scaled(Steps):
    """Leaves the optimizer to the command line."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = scale

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=self.batch_size)


def weight(batch: Any) -> int:
    return len(batch["x"])


def command_lines(folder: Path, *lines: list[str]) -> list[dict[str, Any]]:
    from lightning.pytorch.cli import LightningCLI

    quiet = [
        "--seed_everything=3",
        "--trainer.accelerator=cpu",
        "--trainer.max_epochs=2",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        f"--trainer.default_root_dir={folder}",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
    ]
    seen = []
    for line in lines:
        sys.argv = ["script.py", "fit", *([] if line[0].startswith("--config") else quiet), *line]
        cli = LightningCLI(Scaled, Data)
        [group] = cli.trainer.optimizers[0].param_groups
        seen.append(
            {
                "loss": float(cli.trainer.callback_metrics["train_loss"]),
                "optimizer": type(cli.trainer.optimizers[0]).__name__,
                "lr": group["lr"],
                "scale": cli.model.hparams.scale,
                "steps": cli.trainer.global_step,
            }
        )
    return seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two epochs; and three, the last of them with another scale."""
    folder = tmp_path_factory.mktemp("plain")
    saved = save_to(folder)
    line = [*CONFIGURED, "--trainer.devices=1", "--model.scale=0.5"]
    longer = ["--trainer.max_epochs=3", f"--ckpt_path={folder}/c/last.ckpt"]
    [seen] = run_ranks(command_lines, 1, folder, [*line, *saved], [*line[:-1], *saved, *longer], init=False)
    return seen


def save_to(folder: Path) -> list[str]:
    return [
        "--trainer.callbacks=lightning_shard.ModelCheckpoint",
        f"--trainer.callbacks.dirpath={folder}/c",
        "--trainer.callbacks.save_last=true",
    ]


@pytest.mark.parametrize("layout", [STAGES, pytest.param(DATA, marks=pytest.mark.long)], ids=["pp2", "dp2"])
def test_it_trains_what_it_says_and_its_config_and_checkpoint_say_it_again(
    layout: list[str], plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    line = [*CONFIGURED, *layout, *save_to(tmp_path), "--trainer.devices=2"]
    again = [f"--config={tmp_path}/lightning_logs/version_0/config.yaml", "--trainer.callbacks=null"]
    longer = ["--trainer.max_epochs=3", f"--ckpt_path={tmp_path}/c/last.ckpt"]
    lines = [[*line, "--model.scale=0.5"], again, [*line, *longer]]
    for first, from_config, resumed in run_ranks(command_lines, 2, tmp_path, *lines, elastic=True):
        assert first == from_config
        assert not difference(plain, [first, resumed], tolerance=1e-5)
        assert resumed["scale"] == 0.5
    config = yaml.safe_load((tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text())
    strategy = config["fit"]["trainer"]["strategy"] if "fit" in config else config["trainer"]["strategy"]
    if layout is STAGES:
        arguments = set(inspect.signature(HybridShardStrategy.__init__).parameters) - {"self"}
        assert set(strategy["init_args"]) == arguments
        assert strategy["init_args"]["placement"] == [1, 1]
    else:
        assert strategy == "hybrid_shard"
