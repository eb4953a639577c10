"""A signal tells that the machine will be taken away: one whole checkpoint, and the next run goes on from it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard import HybridShardStrategy, ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, Model, loader
from tests.servers import Server, serve

GROUP = "Preemption"
Ledger = Callable[..., None]
STEPS = 8  # an epoch has six


class Account(L.Callback):
    """The loss of each step, and what is to be done at the start of a step, or of one of its saves."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        self.at = at or {}
        self.losses: dict[int, float] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (do := self.at.pop(trainer.global_step + 1, None)) is not None:
            do()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train_loss"])


def send(*signals: signal.Signals, rank: int) -> Callable[[], None]:
    """To the process of one rank alone."""

    def kill() -> None:
        if dist.get_rank() == rank:
            for number in signals:
                os.kill(os.getpid(), number)

    return kill


def fit(
    folder: str,
    account: Account,
    *,
    options: dict[str, Any] | None = None,
    asynchronous: bool = False,
    resume: str | None = "last",
    timeout: timedelta = timedelta(seconds=60),
    keep: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> int | None:
    """To the end, or to an agreed stop; the exit code then."""
    L.seed_everything(3)
    world = int(os.environ["WORLD_SIZE"])
    io = ShardedCheckpointIO(options, asynchronous, fsync=False)
    trainer = L.Trainer(
        strategy=HybridShardStrategy(checkpoint_io=io, timeout=timeout),
        devices=world,
        callbacks=[account, ModelCheckpoint(folder, **{"every_n_train_steps": 5, "save_last": True, **(keep or {})})],
        **{**QUIET, "enable_checkpointing": True, "max_steps": STEPS, **trainer_options},
    )
    batch = GLOBAL_BATCH // world // trainer.accumulate_grad_batches
    try:
        trainer.fit(Model(), loader(batch, shuffle=True), ckpt_path=resume)
    except SIGTERMException as stop:
        assert trainer.received_sigterm
        return stop.code  # type: ignore[return-value]
    return None


def train(folder: str, at: dict[int, Callable[[], None]] | None = None, **options: Any) -> tuple[Any, dict[int, float]]:
    account = Account(at)
    return fit(folder, account, **options), account.losses


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The undisturbed run's losses."""
    return run_ranks(train, 2, str(tmp_path_factory.mktemp("undisturbed")), elastic=True)[0][1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve("s3", tmp_path_factory.mktemp("server") / "served") as server:
        yield server


def check_one_whole(path: str, step: int, **options: Any) -> None:
    assert checkpoint.verify(path, **options).ok
    assert checkpoint.inspect(path, **options).global_step == step


# -- SIGTERM


def stop_in_step_3(folder: str) -> tuple[Any, dict[int, float]]:
    return train(folder, {3: send(signal.SIGTERM, rank=2)})


def test_sigterm_on_one_of_four_ranks_stops_all_after_that_step_with_a_checkpoint_of_it(
    tmp_path: Path, curve: dict[int, float], ledger: Ledger
) -> None:
    for code, losses in run_ranks(stop_in_step_3, 4, str(tmp_path), elastic=True):
        assert code == 128 + signal.SIGTERM
        assert list(losses) == [1, 2, 3]
    check_one_whole(str(tmp_path / "last.ckpt"), 3)
    for code, losses in run_ranks(train, 2, str(tmp_path), elastic=True):
        assert code is None
        assert losses == pytest.approx({step: curve[step] for step in range(4, STEPS + 1)}, rel=2e-6)
    ledger(GROUP, "SIGTERM to one of four ranks in a step; two go on", tried=1)


def stop_in_a_save(url: str, options: dict[str, Any]) -> tuple[Any, dict[int, float]]:
    """Both get the signal, rank 1 while it writes the sixth step's checkpoint, rank 0 a step before."""
    from lightning_shard.checkpoint.store.remote import RemoteStore

    def write(self: RemoteStore, *args: Any, original: Any = RemoteStore.write, **kwargs: Any) -> None:
        send(signal.SIGTERM, rank=1)()
        original(self, *args, **kwargs)

    with mock.patch.object(RemoteStore, "write", write):
        return train(url, options=options, keep={"every_n_train_steps": 6})


@pytest.mark.long
def test_sigterm_in_a_save_to_s3_ends_that_save_and_the_next_run_begins_the_next_epoch(
    server: Server, curve: dict[int, float], ledger: Ledger
) -> None:
    url = f"{server.url}/save"
    for code, losses in run_ranks(stop_in_a_save, 2, url, server.options, elastic=True):
        assert code == 128 + signal.SIGTERM
        assert list(losses) == [1, 2, 3, 4, 5, 6]
    check_one_whole(f"{url}/last.ckpt", 6, storage_options=server.options)
    for code, losses in run_ranks(train, 2, url, options=server.options, elastic=True):
        assert code is None
        assert losses == pytest.approx({7: curve[7], 8: curve[8]}, rel=2e-6)
    ledger(GROUP, "SIGTERM to both ranks, to one of them in a save to S3", tried=1)


def slow_write(self: LocalStore, *args: Any, original: Any = LocalStore.write, **kwargs: Any) -> None:
    time.sleep(0.2)
    original(self, *args, **kwargs)


def stop_in_many_ways(folder: str) -> dict[str, tuple[Any, list[int]]]:
    """Each way in a fit of its own, one after the other: what stopped it, and the steps that it made."""
    in_step_2 = {2: send(signal.SIGTERM, rank=1)}
    stopped = {}

    def stop(name: str, at: dict[int, Callable[[], None]], **options: Any) -> None:
        code, losses = train(f"{folder}/{name}", dict(at), **options)
        stopped[name] = code, sorted(losses)

    stop("no last", in_step_2, accumulate_grad_batches=2, keep={"save_last": None})
    stop("weights alone", in_step_2, keep={"save_weights_only": True})
    with mock.patch.object(LocalStore, "write", slow_write):
        # the second step's save is under way, and waits for the first's
        stop("asynchronous", in_step_2, asynchronous=True, keep={"every_n_train_steps": 1})
    return stopped


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whatever_the_callback_was_told_to_keep_last_is_the_step_of_the_signal(tmp_path: Path, ledger: Ledger) -> None:
    for stopped in run_ranks(stop_in_many_ways, 2, str(tmp_path), elastic=True):
        assert len(stopped) == 3
        for name, (code, steps) in stopped.items():
            assert (name, code, steps[-1]) == (name, 128 + signal.SIGTERM, 2)
    for name in stopped:
        if name == "weights alone":
            assert not list((tmp_path / name).glob("*"))
        else:
            check_one_whole(str(tmp_path / name / "last.ckpt"), 2)
    ledger(GROUP, "SIGTERM to one of two ranks, whatever the callback keeps as the last", tried=len(stopped))


# -- SLURM


def under_slurm(folder: str, **options: Any) -> tuple[Any, dict[int, float]]:
    slurm = {
        "SLURM_NTASKS": os.environ["WORLD_SIZE"],
        "SLURM_NTASKS_PER_NODE": os.environ["WORLD_SIZE"],
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "17",
        "SLURM_PROCID": os.environ["RANK"],
        "SLURM_LOCALID": os.environ["RANK"],
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": os.environ["MASTER_ADDR"],
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
    }
    with mock.patch.dict(os.environ, slurm):
        return train(f"{folder}/checkpoints", default_root_dir=f"{folder}/root", **options)


def requeued_in_step_2(folder: str, **options: Any) -> tuple[Any, dict[int, float]]:
    """The signal before a requeue comes to one rank, SIGTERM two steps later to another."""
    at = {2: send(signal.SIGUSR1, rank=1), 4: send(signal.SIGTERM, rank=0)}
    return under_slurm(folder, at=at, **options)


@pytest.mark.parametrize(("resume", "saved"), [(None, 2), pytest.param("last", 4, marks=pytest.mark.long)])
def test_a_job_that_slurm_requeues_goes_on_from_the_signal(
    resume: str | None, saved: int, tmp_path: Path, curve: dict[int, float], ledger: Ledger
) -> None:
    (tmp_path / "root" / ".hpc_saving").mkdir(parents=True)  # of a save that was cut off
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    for code, losses in run_ranks(requeued_in_step_2, 2, str(tmp_path), resume=resume, init=False):
        assert code == 128 + signal.SIGTERM
        assert list(losses) == [1, 2, 3, 4]
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    own = tmp_path / "root" / "hpc_ckpt_1.ckpt"
    check_one_whole(str(tmp_path / "checkpoints" / "last.ckpt"), 4)
    assert own.exists() == (resume is None)
    if own.exists():
        check_one_whole(str(own), 2)
    for code, losses in run_ranks(under_slurm, 2, str(tmp_path), resume=resume, init=False):
        assert code is None
        assert losses == pytest.approx({step: curve[step] for step in range(saved + 1, STEPS + 1)}, rel=2e-6)
    ledger(GROUP, "SLURM's signal to one of two ranks, later SIGTERM to the other; requeued", tried=1)


# -- Ranks that are gone without a signal


def freeze_rank_1(folder: str) -> None:
    """While a save is under way in the background, which waits for it too."""
    with mock.patch.object(LocalStore, "write", slow_write):
        at, timeout = {3: send(signal.SIGSTOP, rank=1)}, timedelta(seconds=5)
        train(folder, at, timeout=timeout, asynchronous=True, keep={"every_n_train_steps": 2})


def kill_rank_1(folder: str) -> None:
    train(folder, {3: send(signal.SIGKILL, rank=1)})


@pytest.mark.parametrize("how", [pytest.param(freeze_rank_1, marks=pytest.mark.long), kill_rank_1])
def test_a_rank_that_doesnt_answer_is_named_in_an_error_of_ours(
    how: Callable[[str], None], tmp_path: Path, ledger: Ledger
) -> None:
    # rank 0 looks for signs of life first
    patience = mock.patch("lightning_shard.testing.processes.FAILURE_GRACE_S", 10)
    with pytest.raises(RanksFailed) as failed, patience if how is kill_rank_1 else contextlib.nullcontext():
        run_ranks(how, 2, str(tmp_path), elastic=True)
    said = failed.value.accounts[0]
    assert "RankFailure: rank 0 lost the others. The first failure was on rank 1: no sign of life" in said, said
    ledger("Ranks that fail", "one of two ranks is killed or stopped in a fit", tried=1)
