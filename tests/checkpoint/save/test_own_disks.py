"""Machines that have disks of their own at a path: what can't be loaded isn't saved, and who doesn't see it isn't left.

Ranks stand for machines: each has a folder of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_shard import ModelCheckpoint, checkpoint
from lightning_shard.errors import CheckpointError, ConfigurationError
from lightning_shard.testing import ranks, run_ranks
from tests.parity import Model, loader, trainer_of


@ranks(2)
def test_a_save_that_no_machine_could_load_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / f"{dist.get_rank()}").mkdir()
    with pytest.raises(CheckpointError, match=r"rank-00001.*a disk of each machine's own.*local= folder"):
        checkpoint.save({"weight": torch.arange(400_000.0)}, tmp_path / f"{dist.get_rank()}")
    dist.barrier()
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == []


def resume(folder: Path, steps: int, ckpt_path: str | None) -> str:
    """The second time rank 1 has another folder."""
    dirpath = folder / ("0" if ckpt_path is None or dist.get_rank() == 0 else "1")
    keeps = ModelCheckpoint(dirpath, save_last=True, every_n_train_steps=1)
    trainer = trainer_of({"data_parallel_size": 2}, max_steps=steps, enable_checkpointing=True, callbacks=[keeps])
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
