"""Lightning's own ModelCheckpoint on remote stores: what it lists is there, whatever else saves, and however slowly."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest import mock

import fsspec
import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint as LightningsOwn

from lightning_shard import ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint.store.remote import RemoteStore
from lightning_shard.errors import CheckpointError, ConfigurationError
from lightning_shard.testing import run_ranks
from tests.parity import trainer_of
from tests.training.saving.test_model_checkpoint import AT_EACH, LOSSES, Scripted, data

EVERY: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": 1}
SLOW_S = 0.1


def slow(self: RemoteStore, name: str, *args: Any, original: Any = RemoteStore.publish, **kwargs: Any) -> None:
    time.sleep(SLOW_S)
    original(self, name, *args, **kwargs)


def failing(self: RemoteStore, name: str, *args: Any, original: Any = RemoteStore.write, **kwargs: Any) -> None:
    if "step=4" in self.root:
        raise OSError(5, "as the test asks for")
    original(self, name, *args, **kwargs)


def fit(callbacks: list[Any], steps: int, io: ShardedCheckpointIO) -> L.Trainer:
    trainer = trainer_of(
        {"checkpoint_io": io}, 1, callbacks=callbacks, max_steps=steps, val_check_interval=1, enable_checkpointing=True
    )
    with mock.patch.object(RemoteStore, "publish", slow):
        trainer.fit(Scripted(), data(2), data(1))
    return trainer


def listed(keep: Any) -> dict[str, int]:
    """The step of each checkpoint that a callback lists, by name; with a score, it is checked to be that step's."""
    steps = {}
    for path, score in {keep.best_model_path: None, keep.last_model_path: None, **keep.best_k_models}.items():
        if path:
            assert checkpoint.verify(path).ok
            step = checkpoint.read(path).trainer_state()["global_step"]
            assert score is None or float(score) == LOSSES[step - 1], path
            steps[path.rpartition("/")[2]] = step
    return steps


def with_names_that_repeat(root: str) -> None:
    def io() -> ShardedCheckpointIO:
        return ShardedCheckpointIO(None, True, fsync=False)

    keep = LightningsOwn(f"{root}/two", "best", save_top_k=2, save_last=True, **AT_EACH)
    trainer = fit([keep], 6, io())
    assert listed(keep) == {"best.ckpt": 4, "best-v1.ckpt": 5, "last.ckpt": 5}
    assert [type(each) for each in trainer.checkpoint_callbacks] == [ModelCheckpoint]
    keep = LightningsOwn(f"{root}/all", "best", save_top_k=-1, **AT_EACH)
    fit([keep], 3, io())
    assert sorted(listed(keep).values()) == [1, 2, 3]
    best, newest = LightningsOwn(f"{root}/both", "{step}", **AT_EACH), LightningsOwn(f"{root}/both", **EVERY)
    fit([best, newest], 6, io())
    assert list(listed(best).values()) == [4]
    assert list(listed(newest).values()) == [6]


def with_a_save_that_fails(root: str) -> None:
    keep = LightningsOwn(root, "{step}", **AT_EACH)
    with mock.patch.object(RemoteStore, "write", failing), contextlib.suppress(CheckpointError):
        fit([keep], 6, ShardedCheckpointIO(None, True, fsync=False))
        raise AssertionError("It should have been told.")
    filesystem = fsspec.filesystem("memory")
    there = [path for path in filesystem.find(root) if path.endswith("manifest.json")]
    assert [path.split("/")[-2] for path in there] == ["step=2.ckpt"]  # the best that could be written
    assert checkpoint.verify(f"{root}/step=2.ckpt").ok


class Derived(LightningsOwn):
    pass


def in_memory() -> None:
    with_names_that_repeat("memory://background")
    with_a_save_that_fails("memory://fails")
    with pytest.raises(ConfigurationError, match=r"Derived is derived from .* derive it from lightning_shard"):
        fit([Derived("memory://derived")], 1, ShardedCheckpointIO())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightnings_own_callback_loses_nothing_on_a_remote_store() -> None:
    run_ranks(in_memory, 1, elastic=True)
