"""``ShardedCheckpointIO(local=…, asynchronous=True)`` under a Trainer, on an S3 server: killed, and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_shard import ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.store.s3 import S3Store
from lightning_shard.checkpoint.tiers import LocalTier
from lightning_shard.errors import CheckpointError, ConfigurationError
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import Seen, combine, layout, train
from tests.servers import let_servers_forget, serve

SHARDS, STAGES = layout(data=2), layout(pipeline=2)
TRAINED = 3


def run(
    sizes: dict[str, int], url: str, options: dict[str, Any], local: str, steps: int, resume: str | None = None
) -> Seen:
    keep = ModelCheckpoint(
        url, "{step}", save_last=True, save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
    )
    io = ShardedCheckpointIO(options, asynchronous=True, local=local, fsync=False)
    return train(
        "gpt",
        sizes,
        steps=steps,
        shuffle=True,
        callbacks=[keep],
        trainer={"enable_checkpointing": True, "limit_val_batches": 0},
        resume=resume,
        checkpoint_io=io,
    )


def run_until_killed(url: str, options: dict[str, Any], local: str) -> None:
    """All ranks are killed while the second step's ``last`` is carried: some of its files are on the store."""
    original = S3Store.write

    def write(self: S3Store, name: str, *args: Any, **kwargs: Any) -> None:
        if self.root.endswith("last.ckpt") and checkpoint.exists(f"{url}/step=2.ckpt", storage_options=options):
            if dist.get_rank() == 0:
                original(self, name, *args, **kwargs)
            else:
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, name, *args, **kwargs)

    with mock.patch.object(S3Store, "write", write):
        run(SHARDS, url, options, local, TRAINED)


def curves(url: str, options: dict[str, Any], folder: str) -> tuple[Seen, Seen, Seen]:
    """Resumed from the local copy, and where that is lost, from the store; beside an uninterrupted run."""
    local = run(STAGES, url, options, f"{folder}/disk", TRAINED, resume="last")
    remote = run(STAGES, f"{url}-2", options, f"{folder}/lost", TRAINED, resume=f"{url}-2/last.ckpt")
    return local, remote, train("gpt", STAGES, steps=TRAINED, shuffle=True, trainer={"limit_val_batches": 0})


def steps_of(folder: Path) -> dict[str, int | None]:
    return {entry.name: entry.step for entry in checkpoint.list(folder)}


def test_a_run_killed_while_carrying_goes_on_from_the_local_copy_or_from_the_store_where_that_is_lost(
    tmp_path: Path,
) -> None:
    local, folder = tmp_path / "disk", tmp_path / "s3" / "bucket" / "run"
    with serve("s3", tmp_path / "s3") as server:
        url, options = f"{server.url}/run", server.options
        with pytest.raises(RanksFailed):
            run_ranks(run_until_killed, 2, url, options, str(local), elastic=True)
        (copies,) = local.iterdir()
        assert steps_of(folder) == {"step=1.ckpt": 1, "step=2.ckpt": 2, "last.ckpt": 1}
        assert steps_of(copies) == {"step=2.ckpt": 2, "last.ckpt": 2}

        shutil.copytree(folder, tmp_path / "s3" / "bucket" / "run-2")
        let_servers_forget()
        results = run_ranks(curves, 2, url, options, str(tmp_path), elastic=True)
        here, remote, whole = (combine(list(seen), STAGES).losses for seen in zip(*results))
        assert remote == pytest.approx(whole[1:], rel=2e-6)
        assert here == pytest.approx(whole[2:], rel=2e-6)
        assert [len(here), len(remote), len(whole)] == [1, 2, TRAINED]
        # carried to their ends, two of them kept
        assert steps_of(folder)["last.ckpt"] == steps_of(folder)["step=3.ckpt"] == 3
        assert all(checkpoint.verify(path).ok for path in folder.iterdir())
        assert steps_of(copies) == {"step=3.ckpt": 3, "last.ckpt": 3}


def carry_with_a_fault(folder: str) -> list[str]:
    """Each rank's error where rank 1 can't read its file."""
    tier = LocalTier.at(f"{folder}/disk", {})
    path = f"{folder}/store/last.ckpt"
    state = {"w": torch.arange(300_000)}
    checkpoint.save(state, tier.copy_of(path), fsync=False)
    tier.carry(path, Ranks.of(), fsync=False)
    checkpoint.save({"w": torch.arange(1, 300_001)}, tier.copy_of(path), fsync=False)
    dist.barrier()
    if dist.get_rank() == 1:
        (own,) = Path(tier.copy_of(path)).glob("model/rank-00001-*")
        own.write_bytes(own.read_bytes()[:-1] + b"\x55")
    dist.barrier()
    errors = []
    try:
        tier.carry(path, Ranks.of(), fsync=False)
    except CheckpointError as error:
        errors.append(str(error))
    dist.barrier()
    assert torch.equal(checkpoint.read(path)["w"].full(), state["w"])
    assert len(list(Path(path).rglob("rank-*"))) == 2  # nothing is left over

    # one rank doesn't see what the others do
    assert tier.choose(path, Ranks.of()).path == path
    checkpoint.save(state, tier.copy_of(f"{path}x"), fsync=False)
    seen_by_all = tier.choose(f"{path}x", Ranks.of())
    own = tier if dist.get_rank() == 0 else LocalTier.at(f"{folder}/disk-1", {})
    seen_by_one = own.choose(f"{path}x", Ranks.of())
    assert [seen_by_all.local, seen_by_one.local] == [True, False]
    tier.check_shared(Ranks.of())
    try:
        own.check_shared(Ranks.of())
    except ConfigurationError as error:
        errors.append(str(error))
    return errors


def test_a_failure_is_raised_on_every_rank_and_disks_of_their_own_are_refused(tmp_path: Path) -> None:
    for carried, shared in run_ranks(carry_with_a_fault, 2, str(tmp_path)):
        assert "differ from their digest" in carried
        assert "rank 1 doesn't see what rank 0 wrote" in shared
    assert [path.name for path in (tmp_path / "disk").iterdir() if path.is_file()] == []
