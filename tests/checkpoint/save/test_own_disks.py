"""Machines that have disks of their own at a path: what can't be loaded isn't saved, and who doesn't see it isn't left.

Ranks stand for machines: each has a folder of its own.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_shard import HybridShardStrategy, ModelCheckpoint, checkpoint
from lightning_shard.errors import CheckpointError, ConfigurationError
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, loader

STATE = {"weight": torch.arange(400_000.0)}


def save(folder: Path, own_disks: bool) -> list[str]:
    path = folder / f"{dist.get_rank()}"
    path.mkdir()
    checkpoint.save(STATE, path, own_disks=own_disks)
    return sorted(file.name for file in path.rglob("*") if file.is_file())


def refused(folder: Path) -> tuple[str, list[str]]:
    with pytest.raises(CheckpointError) as raised:
        save(folder, False)
    dist.barrier()
    return str(raised.value), [file.name for file in folder.rglob("*") if file.is_file()]


def test_a_save_that_no_machine_could_load_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for said, left in run_ranks(refused, 2, tmp_path):
        assert "rank-00001" in said
        assert "a disk of each machine's own" in said
        assert "local= folder" in said
        assert left == []


def test_where_it_is_to_be_carried_it_is_made(tmp_path: Path) -> None:
    first, second = run_ranks(save, 2, tmp_path, True)
    assert "manifest.json" in first
    assert len(second) == 1


def resume(folder: Path, steps: int, ckpt_path: str | None) -> str:
    """The second time rank 1 has another folder."""
    dirpath = folder / ("0" if ckpt_path is None or dist.get_rank() == 0 else "1")
    keeps = ModelCheckpoint(dirpath, save_last=True, every_n_train_steps=1)
    options = {**QUIET, "enable_checkpointing": True, "callbacks": [keeps]}
    trainer = L.Trainer(strategy=HybridShardStrategy(data_parallel_size=2), devices=2, max_steps=steps, **options)
    try:
        trainer.fit(Model("gpt"), loader(2), ckpt_path=ckpt_path)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_last_checkpoint_that_some_ranks_see_is_refused_on_all(tmp_path: Path) -> None:
    assert run_ranks(resume, 2, tmp_path, 1, None) == ["", ""]
    for said in run_ranks(resume, 2, tmp_path, 2, "last"):
        assert 'ckpt_path="last" finds a checkpoint' in said
        assert "on some ranks only" in said
