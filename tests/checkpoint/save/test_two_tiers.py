"""``ShardedCheckpointIO(local=…, asynchronous=True)`` under a Trainer, on an S3 server: killed, and resumed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_shard import ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint import tiers
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.checkpoint.store.s3 import S3Store
from lightning_shard.checkpoint.tiers import LocalTier, Source
from lightning_shard.errors import CheckpointError, ConfigurationError
from lightning_shard.testing import RanksFailed, ranks, run_ranks
from tests.parity import Seen, combine, layout, train
from tests.servers import let_servers_forget, serve
from tests.training.saving import test_exclude_frozen

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


def curves(url: str, options: dict[str, Any], folder: str) -> tuple[list[str], list[Seen]]:
    """Where checkpoints were read, as the run said; and runs that resumed from the local copy and from what lies on
    disks of their own, beside an uninterrupted one.
    """
    said = BufferingHandler(1000)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(said)
    local = run(STAGES, url, options, f"{folder}/disk", TRAINED, resume="last")
    own = run(STAGES, f"{url}-2", options, own_disk(folder, dist.get_rank()), TRAINED, resume="last")
    whole = train("gpt", STAGES, steps=TRAINED, shuffle=True, trainer={"limit_val_batches": 0})
    lines = [record.getMessage() for record in said.buffer]
    return [line for line in lines if line.startswith("Reading the checkpoint ")], [local, own, whole]


def own_disk(folder: str | Path, rank: int) -> str:
    return f"{folder}/disk-of-{rank}"


def tier_of(folder: str, rank: int) -> LocalTier:
    return LocalTier.at(own_disk(folder, rank), {})


def spread(copies: Path, folder: Path, url: str, options: dict[str, Any]) -> None:
    """What the copies would be if each rank had a disk of its own, and they were of another URL."""
    for rank in range(2):
        own = LocalTier.at(own_disk(folder, rank), options).folder(url)
        of_the_first = ["state-*", "table-*", "manifest.json"] if rank else []
        others = shutil.ignore_patterns(f"rank-0000{1 - rank}-*", *of_the_first)
        shutil.copytree(copies, own, ignore=others)


def steps_of(folder: Path) -> dict[str, int | None]:
    return {entry.name: entry.step for entry in checkpoint.list(folder)}


def test_a_run_killed_while_carrying_goes_on_from_the_newest_that_is_whole(tmp_path: Path) -> None:
    local, store = tmp_path / "disk", tmp_path / "s3" / "bucket"
    with serve("s3", tmp_path / "s3") as server:
        url, options = f"{server.url}/run", server.options
        with pytest.raises(RanksFailed):
            run_ranks(run_until_killed, 2, url, options, str(local), elastic=True)
        (copies,) = local.iterdir()
        assert steps_of(store / "run") == {"step=1.ckpt": 1, "step=2.ckpt": 2, "last.ckpt": 1}
        assert steps_of(copies) == {"step=2.ckpt": 2, "last.ckpt": 2}

        shutil.copytree(store / "run", store / "run-2")
        spread(copies, tmp_path, f"{url}-2", options)
        let_servers_forget()
        results = run_ranks(curves, 2, url, options, str(tmp_path), elastic=True)
        said = results[0][0]
        newer = f"a local copy, newer than {url}/last.ckpt, and carried there now"
        assert said[0] == f"Reading the checkpoint {copies}/last.ckpt: {newer}."
        assert said[1].startswith(f"Reading the checkpoint {url}-2/last.ckpt: a local copy, newer than")
        assert "several machines' disks" in said[1]
        here, own, whole = (combine(list(seen), STAGES).losses for seen in zip(*(seen for _, seen in results)))
        assert here == pytest.approx(whole[2:], rel=2e-6)
        assert own == pytest.approx(whole[2:], rel=2e-6)
        assert [len(here), len(own), len(whole)] == [1, 1, TRAINED]
        # carried to their ends, two of them kept
        assert steps_of(store / "run") == {"step=1.ckpt": 1, "step=2.ckpt": 2, "step=3.ckpt": 3, "last.ckpt": 3}
        assert steps_of(store / "run-2")["last.ckpt"] == 2
        for folder in ("run", "run-2"):
            assert all(checkpoint.verify(path).ok for path in (store / folder).iterdir())
        assert steps_of(copies) == {"step=3.ckpt": 3, "last.ckpt": 3}


def save(path: str, step: int) -> None:
    state = {"w": torch.arange(300_000) + step}
    checkpoint.save(state, path, trainer_state={"global_step": step}, fsync=False, own_disks=True)


def step_at(path: str) -> int:
    dist.barrier()
    stored = checkpoint.read(path)
    step = int(stored.trainer_state()["global_step"])
    assert torch.equal(stored["w"].full(), torch.arange(300_000) + step)
    dist.barrier()
    return step


@ranks(2)
def test_damage_that_one_rank_finds_is_raised_on_every_rank_and_passed_over_by_all(tmp_path: Path) -> None:
    folder = tmp_path
    tier, path = LocalTier.at(f"{folder}/disk", {}), f"{folder}/store/last.ckpt"
    save(tier.copy_of(path), 1)
    tier.carry(path, Ranks.of(), fsync=False)
    assert tier.source(path, Ranks.of(), fsync=False).local
    save(tier.copy_of(path), 2)
    dist.barrier()
    if dist.get_rank() == 1:
        (own,) = Path(tier.copy_of(path)).glob("model/rank-00001-*")
        own.write_bytes(own.read_bytes()[:-1] + b"\x55")
    dist.barrier()
    with pytest.raises(CheckpointError, match="differ from their digest"):
        tier.carry(path, Ranks.of(), fsync=False)
    assert step_at(path) == 1
    passed_over = tier.source(path, Ranks.of(), fsync=False)
    assert (passed_over.path, passed_over.worse) == (path, True)

    # what isn't damage is raised by all, also where another rank finds damage
    finds = {"return_value": "differs"} if dist.get_rank() == 0 else {"side_effect": MemoryError("too large")}
    with mock.patch.object(tiers, "damage", **finds), pytest.raises((MemoryError, CheckpointError), match="too large"):
        tier.source(path, Ranks.of(), fsync=False)

    # what is on this disk alone is carried by all; and what one rank can't carry is read all the same
    save(tier.copy_of(path), 3)
    dist.barrier()
    fails = mock.patch.object(LocalStore, "write", side_effect=OSError(5, "gone")) if dist.get_rank() == 1 else None
    with fails or contextlib.nullcontext():
        found = tier.source(path, Ranks.of(), fsync=False)
    assert (found.local, found.worse) == (True, True)
    assert tier.source(path, Ranks(), fsync=False).local  # each for itself: then nothing is carried
    assert step_at(path) == 1
    found = tier.source(path, Ranks.of(), fsync=False)
    assert (found.local, found.worse) == (True, False)
    assert step_at(path) == 3


@ranks(2)
def test_on_disks_of_their_own_what_is_whole_together_is_carried_and_a_lost_one_costs_the_copy_alone(
    tmp_path: Path,
) -> None:
    folder, rank, both = str(tmp_path), dist.get_rank(), Ranks.of()
    tier, path = tier_of(folder, rank), f"{folder}/store/last.ckpt"
    copy = Path(tier.copy_of(path))

    def source() -> Source:
        dist.barrier()
        found = tier.source(path, both, fsync=False)
        assert (found.path, found.local) == (path, False)
        return found

    save(str(copy), 1)
    assert checkpoint.exists(copy) == (rank == 0)
    tier.carry(path, both, fsync=False)
    assert checkpoint.exists(copy)
    assert len(list(copy.glob("model/*"))) == 1
    assert step_at(path) == 1
    assert not source().worse

    # the run ends before it is carried: that is brought to its end, over what is there of it
    save(str(copy), 2)
    if rank == 1:
        newer = max(copy.glob("model/*"), key=lambda file: file.stat().st_mtime_ns)
        (Path(path) / "model" / newer.name).write_bytes(b"cut off")
    assert not source().worse
    assert step_at(path) == 2

    # the ranks are counted anew: manifest, table and trainer's state are on another machine than the first rank's
    save(str(copy), 3)
    dist.barrier()
    if rank == 1:
        first = Path(tier_of(folder, 0).copy_of(path))
        (copy / "trainer").mkdir(exist_ok=True)
        for file in (first / "manifest.json", *first.glob("table-*"), *first.glob("trainer/*")):
            file.replace(copy / file.relative_to(first))
    assert not source().worse
    assert step_at(path) == 3

    # a machine is gone
    save(str(copy), 4)
    dist.barrier()
    if rank == 1:
        shutil.rmtree(tier.root)
    assert source().worse
    assert step_at(path) == 3


def a_store_that_refuses(folder: str) -> tuple[str, str, list[float], list[float]]:
    """Carrying fails on one rank; the next run has the local copy alone. Then one that only one machine knows of."""
    store, local = f"{folder}/store", f"{folder}/disk"
    path = f"{store}/adapted.ckpt"
    io: dict[str, Any] = {"exclude_frozen": True, "asynchronous": True, "local": local}
    original = LocalStore.write

    def write(self: LocalStore, *args: Any, **kwargs: Any) -> None:
        if self.root.startswith(store) and dist.get_rank() == 1:
            raise PermissionError(13, "Permission denied")
        original(self, *args, **kwargs)

    with mock.patch.object(LocalStore, "write", write), pytest.raises(CheckpointError) as refused:
        test_exclude_frozen.fit("pp2", 2, test_exclude_frozen.Adapted(), save=path, **io)
    assert not checkpoint.exists(path)
    assert checkpoint.verify(LocalTier.at(local, {}).copy_of(path)).ok
    resumed = test_exclude_frozen.fit("dp2", 3, test_exclude_frozen.Adapted(), resume=path, **io)
    plain = test_exclude_frozen.fit("dp2", 3, test_exclude_frozen.Adapted())

    with pytest.raises(ConfigurationError) as missed:
        run(STAGES, f"{folder}/another", {}, own_disk(folder, dist.get_rank()), TRAINED, resume="last")
    return str(refused.value), str(missed.value), resumed, plain


def test_a_store_that_refuses_ends_the_run_and_the_next_goes_on_from_the_local_copy(tmp_path: Path) -> None:
    save(tier_of(str(tmp_path), 0).copy_of(f"{tmp_path}/another/last.ckpt"), 1)
    for refused, missed, resumed, plain in run_ranks(a_store_that_refuses, 2, str(tmp_path), elastic=True):
        assert "Permission denied" in refused
        assert "on the local disks of some machines only" in missed
        assert len(resumed) == 1
        assert resumed == pytest.approx(plain[2:], rel=2e-6)
