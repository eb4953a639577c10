"""``ShardedCheckpointIO(asynchronous=True)`` under a Trainer: the same files as a save that is waited for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_shard
from lightning_shard import ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CheckpointError
from lightning_shard.plugin.running import failure
from lightning_shard.plugin.saving import checkpoint_io
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import GLOBAL_BATCH, Model, layout, loader, trainer_of

PIPELINE = layout(pipeline=2)
SLOW_S = 0.3


class Committed(L.Callback):
    """Which checkpoints are there at the end of every step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(sorted(path.parent.name for path in self.folder.glob("*/manifest.json")))


def slow_write(self: LocalStore, name: str, *args: Any, original: Any = LocalStore.write, **kwargs: Any) -> None:
    time.sleep(SLOW_S)
    original(self, name, *args, **kwargs)


def fit(folder: str, asynchronous: bool, steps: int, callbacks: list[L.Callback], keep: int = -1) -> None:
    every_step = {"filename": "{step}", "every_n_train_steps": 1, "monitor": "step", "mode": "max"}
    fit_with(asynchronous, steps, [ModelCheckpoint(folder, save_top_k=keep, **every_step), *callbacks])


def fit_with(asynchronous: bool, steps: int, callbacks: list[L.Callback]) -> None:
    L.seed_everything(3)
    checkpoint_io = ShardedCheckpointIO(asynchronous=asynchronous, fsync=False)
    trainer = trainer_of(
        {**PIPELINE, "checkpoint_io": checkpoint_io}, max_steps=steps, callbacks=callbacks, enable_checkpointing=True
    )
    trainer.fit(Model("gpt"), loader(GLOBAL_BATCH))


def keep_the_best_and_the_newest(folder: str, kind: type[ModelCheckpoint]) -> None:
    """By two callbacks that give equal names: while one saves, the other finds the name free."""
    best = kind(folder, monitor="step", mode="min", every_n_train_steps=1)
    with mock.patch.object(LocalStore, "write", slow_write):
        fit_with(True, 2, [best, kind(folder, every_n_train_steps=1)])
    assert checkpoint.read(best.best_model_path).trainer_state()["global_step"] == 1


class Scored(lightning_shard.ModelCheckpoint):
    """Each rank has a score of its own, which gives another name on the first save, and the same on the second."""

    def _monitor_candidates(self, trainer: L.Trainer) -> dict[str, torch.Tensor]:
        score = {1: (0.34, 0.44), 2: (0.28, 0.31)}[trainer.global_step][dist.get_rank()]
        return {**super()._monitor_candidates(trainer), "score": torch.tensor(score)}


def train_both(folder: str) -> list[list[str]]:
    fit(f"{folder}/waited", False, 2, [])
    with mock.patch.object(LocalStore, "write", slow_write):
        fit(f"{folder}/background", True, 2, [])
        committed = Committed(f"{folder}/one")
        fit(f"{folder}/one", True, 4, [committed], keep=1)
    return committed.seen


def train_with_equal_names(folder: str) -> None:
    keep_the_best_and_the_newest(f"{folder}/own", lightning_shard.ModelCheckpoint)
    keep_the_best_and_the_newest(f"{folder}/stock", ModelCheckpoint)
    fit_with(True, 2, [Scored(f"{folder}/scored", "{score:.1f}", monitor="score", every_n_train_steps=1)])
    assert [path.name for path in Path(folder, "scored").iterdir()] == ["score=0.3.ckpt"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_callbacks_that_give_equal_names_save_in_the_background(tmp_path: Path) -> None:
    run_ranks(train_with_equal_names, 2, str(tmp_path), elastic=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_training_changes_meanwhile_is_not_saved_and_nothing_is_removed_before_its_replacement_is_whole(
    tmp_path: Path,
) -> None:
    seen = run_ranks(train_both, 2, str(tmp_path), elastic=True)[0]
    # Looked at before the step's own save: training went on while the first was written. The second waited for it, and
    # from then on one was there at every moment.
    assert seen[:2] == [[], []]
    assert all(seen[2:])
    assert [path.parent.name for path in tmp_path.glob("one/*/manifest.json")] == ["step=4.ckpt"]
    for step in (1, 2):
        waited = checkpoint.read(tmp_path / "waited" / f"step={step}.ckpt")
        background = checkpoint.read(tmp_path / "background" / f"step={step}.ckpt")
        assert list(background) == list(waited)
        assert list(background.optimizer) == list(waited.optimizer)
        for name in waited:
            assert torch.equal(background[name].full(), waited[name].full()), (step, name)
        for name in waited.optimizer:
            assert torch.equal(background.optimizer[name].full(), waited.optimizer[name].full()), (step, name)
        assert background.trainer_state()["global_step"] == step


def fail_on_rank_1(self: LocalStore, name: str, *args: Any, original: Any = LocalStore.write, **kwargs: Any) -> None:
    if "step=2" in self.root and dist.get_rank() == 1:
        raise OSError(28, "No space left on device")
    original(self, name, *args, **kwargs)


def train_until_the_disk_is_full(folder: str, steps: int) -> str:
    with mock.patch.object(LocalStore, "write", fail_on_rank_1), pytest.raises(CheckpointError) as caught:
        fit(folder, True, steps, [])
    return str(caught.value)


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.long)], ids=["at the end", "by the next save"])
def test_a_failure_in_the_background_is_raised_on_every_rank(steps: int, tmp_path: Path) -> None:
    for error in run_ranks(train_until_the_disk_is_full, 2, str(tmp_path), steps, elastic=True):
        assert "No space left" in error
    assert [path.parent.name for path in tmp_path.glob("*/manifest.json")] == ["step=1.ckpt"]


class Stop(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:  # the first step's save is under way
            if self.how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif dist.get_rank() == 1:
                raise ValueError("stop here")


def train_until_stopped(folder: str, how: str) -> str:
    with mock.patch.object(LocalStore, "write", slow_write), mock.patch.object(failure, "_GRACE_S", 2.0):
        try:
            fit(folder, True, 3, [Stop(how)])
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("an error of one rank", marks=pytest.mark.long)])
def test_a_save_under_way_is_finished_when_the_job_ends(how: str, tmp_path: Path) -> None:
    if how == "SIGTERM":
        stopped = run_ranks(train_until_stopped, 2, str(tmp_path), how, elastic=True)
        assert all("SIGTERM" in what for what in stopped)
    else:
        with pytest.raises(RanksFailed):  # the other one waits for it, and is stopped
            run_ranks(train_until_stopped, 2, str(tmp_path), how, elastic=True)
    assert checkpoint.verify(tmp_path / "step=1.ckpt").ok


def die_on_rank_1(*_: Any, original: Any = checkpoint_io.absolute) -> Any:
    if dist.get_rank() == 1:
        time.sleep(1.0)  # rank 0 has left the collectives before
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*_)


def train_until_one_dies(folder: str) -> None:
    """In the first save, when its own process group is needed next."""
    # the settling time is shortened to tell before the test ends this rank, too
    with mock.patch.object(checkpoint_io, "absolute", die_on_rank_1), mock.patch.object(failure, "_SETTLE_S", 0.5):
        try:
            fit(folder, True, 1, [])
        except BaseException as error:
            Path(folder, "error").write_text(str(error))
            raise


def test_a_rank_that_dies_in_the_first_save_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2 failed first"):
        run_ranks(train_until_one_dies, 2, str(tmp_path))
    assert "rank 1 didn't join the collective: it has ended" in (tmp_path / "error").read_text()
