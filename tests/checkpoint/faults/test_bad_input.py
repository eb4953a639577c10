"""Checkpoints that no run resumes from, and strategies that can't save: refused on every rank, and nothing hangs."""

from __future__ import annotations

import re
import shutil
import traceback
from pathlib import Path

import lightning as L
import pytest
from torch import nn

from lightning_shard import ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    FormatVersionError,
    ShardError,
    StateMismatchError,
)
from lightning_shard.testing import run_ranks
from tests.checkpoint.manifests import edit
from tests.parity import QUIET, Model, loader, trainer_of


class Net(Model):
    def __init__(self) -> None:
        super().__init__("gpt")


class Extra(Net):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[3].added = nn.Linear(32, 32)  # type: ignore[union-attr, index]


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.model.head = nn.Linear(32, 65, bias=False)  # type: ignore[union-attr]


class WiderAndLenient(Wider):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


def trainer(steps: int) -> L.Trainer:
    L.seed_everything(3)
    return trainer_of({"pipeline_parallel_size": 2}, max_steps=steps)


def save(path: str) -> None:
    made = trainer(1)
    made.fit(Net(), loader(16))
    made.save_checkpoint(path)


def resume(paths: list[tuple[str, type[Net], type[ShardError]]]) -> list[str]:
    """What each is refused with; where it isn't, why not."""
    messages = []
    for path, make, error in paths:
        try:
            trainer(2).fit(make(), loader(16), loader(16, samples=32), ckpt_path=path)
            messages.append("not refused")
        except error as refusal:
            messages.append(str(refusal))
        except Exception:
            messages.append(traceback.format_exc())
    return messages


def test_checkpoints_that_no_run_resumes_from(tmp_path: Path) -> None:
    saved = tmp_path / "one.ckpt"
    run_ranks(save, 2, str(saved), elastic=True)

    def copied(name: str) -> Path:
        return Path(shutil.copytree(saved, tmp_path / name))

    edit(copied("newer.ckpt"), lambda manifest: manifest.update(format_version=99))
    (tmp_path / "empty.ckpt").mkdir()
    lacking = r"2 missing \(model\.blocks\.3\.added"
    cases: list[tuple[str, type[Net], type[ShardError], str]] = [
        ("empty.ckpt", Net, CheckpointNotFoundError, "manifest"),
        ("newer.ckpt", Net, FormatVersionError, "99"),
        ("one.ckpt", Extra, StateMismatchError, lacking),
        ("one.ckpt", Wider, StateMismatchError, "shape"),
        ("one.ckpt", WiderAndLenient, StateMismatchError, "shape"),  # as in torch
    ]
    for fault in ("missing", "truncated", "changed"):
        file = sorted((copied(f"{fault}.ckpt") / "model").iterdir())[0]
        data = file.read_bytes()
        if fault == "missing":
            file.unlink()
        else:
            file.write_bytes(data[:-100] if fault == "truncated" else data[:-100] + bytes(100))
        assert not checkpoint.verify(tmp_path / f"{fault}.ckpt").ok
        cases.append((f"{fault}.ckpt", Net, CorruptCheckpointError, file.name))
    asked = [(str(tmp_path / name), make, error) for name, make, error, _ in cases]
    for messages in run_ranks(resume, 2, asked, elastic=True, timeout_s=50 + 5 * len(cases)):
        for (*_, says), message in zip(cases, messages, strict=True):
            assert re.search(says, message), message


def with_ddp(path: str) -> list[str]:
    """A run that is to save by a callback, and one that saves when it has trained; rank 0 alone is asked to."""
    options = {"strategy": "ddp", "devices": 2, "max_steps": 1, "plugins": [ShardedCheckpointIO()]}
    saving = L.Trainer(**options, callbacks=[ModelCheckpoint(path)], **{**QUIET, "enable_checkpointing": True})
    with pytest.raises(ConfigurationError) as before:
        saving.fit(Net(), loader(8))
    trainer = L.Trainer(**options, **QUIET)
    trainer.fit(Net(), loader(8))
    if not trainer.is_global_zero:
        return [str(before.value)]
    with pytest.raises(ConfigurationError) as after:
        trainer.strategy.save_checkpoint({"state_dict": {}}, path)
    return [str(before.value), str(after.value)]


def test_a_strategy_that_saves_on_one_rank_only(tmp_path: Path) -> None:
    first, second = run_ranks(with_ddp, 2, str(tmp_path / "run"), elastic=True, timeout_s=50)
    assert (len(first), len(second)) == (2, 1)
    assert all("hybrid_shard" in message for message in first + second)
    assert not (tmp_path / "run").exists()
