"""Whatever ends a run ends it on all ranks within seconds: all save the same step, or none does and one says why."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import GLOBAL_BATCH, LAYOUTS, PLANS, QUIET, Model, Tokens, layout, loader, world
from tests.paths import ROOT

LIMIT_S = 20
SIZES = {"dp2": layout(data=2)} | {name: LAYOUTS[name] for name in ("pp2", "tp2")}
STEPS = 8
AT = 3
"""The steps that have ended when something happens; a checkpoint of the second one was saved before."""


class Way(L.Callback):
    """What happens at a point of the run."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == AT:
            self.happens(trainer)

    def happens(self, trainer: L.Trainer) -> None:
        pass


def interrupt(*ranks: int) -> None:
    if not ranks or dist.get_rank() in ranks:
        os.kill(os.getpid(), signal.SIGINT)


class Interrupted(Way):
    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def happens(self, trainer: L.Trainer) -> None:
        interrupt(*self.ranks)


class InterruptedInValidation(Way):
    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        time.sleep(0.5)  # so that there are batches left when all have heard of it
        if batch_idx == 0:
            interrupt(1)


class Raised(Way):
    def __init__(self, error: BaseException, *ranks: int) -> None:
        self.error, self.ranks = error, ranks

    def happens(self, trainer: L.Trainer) -> None:
        if not self.ranks or trainer.global_rank in self.ranks:
            raise self.error


class InUpdate(Way):
    """The optimizer has changed the weights when it fails, on all ranks."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        def fail(*_: Any) -> None:
            if trainer.global_step == AT:
                raise ValueError("in the update")

        trainer.optimizers[0].register_step_post_hook(fail)


class Saves(L.Callback):
    """A user's own."""

    def __init__(self, folder: str) -> None:
        self.path = f"{folder}/own.ckpt"

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen[trainer.global_step] = float(trainer.callback_metrics["train_loss"])


def fit(
    folder: str,
    sizes: dict[str, int],
    *callbacks: L.Callback,
    saves: bool = True,
    asynchronous: bool = False,
    module: L.LightningModule | None = None,
    data: Any = None,
    resume: str | None = None,
    **options: Any,
) -> None:
    """Train, and save every second step, and on an exception if it ``saves``."""
    L.seed_everything(3)
    strategy = HybridShardStrategy(
        **sizes,
        tensor_parallel_plan=PLANS["gpt"] if sizes["tensor_parallel_size"] > 1 else None,
        checkpoint_io=ShardedCheckpointIO(asynchronous=asynchronous, fsync=False),
    )
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_on_exception=saves)
    trainer = L.Trainer(
        strategy=strategy,
        devices=world(sizes),
        callbacks=[keep, *callbacks],
        **{**QUIET, "enable_checkpointing": True, "max_steps": STEPS, **options},
    )
    batch = GLOBAL_BATCH // sizes["data_parallel_size"]
    trainer.fit(module or Model(), data or loader(batch), loader(batch), ckpt_path=resume)


def slow_write(self: LocalStore, *args: Any, original: Any = LocalStore.write, **kwargs: Any) -> None:
    if "step=2" in self.root:
        interrupt(1)
    time.sleep(0.2)
    original(self, *args, **kwargs)


WAYS: dict[str, tuple[Callable[[], Way], dict[str, Any], str]] = {
    "Ctrl+C on all ranks": (Interrupted, {}, "SystemExit"),
    "Ctrl+C on one rank": (lambda: Interrupted(1), {}, "SystemExit"),
    "Ctrl+C in a validation": (InterruptedInValidation, {"val_check_interval": 3}, "SystemExit"),
    "Ctrl+C in a save": (Way, {"write": slow_write}, "SystemExit"),
    "Ctrl+C while a save is in flight": (Way, {"write": slow_write, "asynchronous": True}, "SystemExit"),
    "an error in a hook": (lambda: Raised(ValueError("bad")), {}, "ValueError"),
    "SystemExit in a hook": (lambda: Raised(SystemExit(3)), {}, "SystemExit"),
    "OnExceptionCheckpoint": (lambda: Raised(ValueError("bad")), {"saves": OnExceptionCheckpoint}, "ValueError"),
    "an error in the optimizer's update": (InUpdate, {}, "ValueError"),
    "max_time": (Way, {"max_time": timedelta(seconds=2), "max_steps": 100_000}, ""),
}
"""What all ranks meet: what happens, options of the fit, and what it raises."""
SHORT = (
    "Ctrl+C on one rank",
    "Ctrl+C while a save is in flight",
    "OnExceptionCheckpoint",
    "an error in the optimizer's update",
)
"""Those that are tried outside of long runs."""
RESUMED = ("Ctrl+C on one rank", "Ctrl+C in a validation", "an error in a hook")


@dataclass
class End:
    raised: str
    seconds: float
    steps: int
    resumed: dict[int, float] = field(default_factory=dict)


def end_in_many_ways(
    folder: str, sizes: dict[str, int], ways: Collection[str]
) -> tuple[dict[str, End], dict[int, float]]:
    """Each way in a fit of its own, one after the other, resumed from what was saved; and the undisturbed losses."""
    ends = {}
    for name in ways:
        make, options, _ = WAYS[name]
        given = {"saves": True, "write": LocalStore.write, **options}
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it after a KeyboardInterrupt
        raised, losses, began = "", Losses(), time.monotonic()
        write, saves = given.pop("write"), given.pop("saves")
        more = [] if saves is True else [saves(f"{folder}/{name}")]
        with mock.patch.object(LocalStore, "write", write):
            try:
                fit(f"{folder}/{name}", sizes, make(), losses, *more, saves=saves is True, **given)
            except BaseException as error:
                raised = type(error).__name__
        ends[name] = End(raised, time.monotonic() - began, max(losses.seen))
    for name in (name for name in RESUMED if name in ways):
        path = f"{folder}/{name}/step={ends[name].steps}.ckpt"
        fit(f"{folder}/on", sizes, losses := Losses(), resume=path)
        ends[name].resumed = losses.seen
    fit(f"{folder}/undisturbed", sizes, losses := Losses())
    return ends, losses.seen


def steps_saved(folder: Path) -> list[int]:
    """Of all committed checkpoints, each verified."""
    found = sorted(path for path in folder.glob("*.ckpt") if checkpoint.exists(path))
    assert all(checkpoint.verify(path).ok for path in found)
    return sorted(step for path in found if (step := checkpoint.inspect(path).global_step) is not None)


MORE = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        pytest.param("pp2", SHORT, id="pp2, in short"),
        *(pytest.param(name, tuple(WAYS), marks=MORE, id=name) for name in SIZES),
    ],
)
def test_what_all_ranks_meet_ends_them_at_one_step_whose_checkpoint_continues_the_loss_curve(
    name: str, ways: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = SIZES[name]
    results = run_ranks(end_in_many_ways, world(sizes), str(tmp_path), sizes, ways, elastic=True, timeout_s=180)
    first, curve = results[0]
    assert len(curve) == STEPS
    for ends, _ in results:
        assert {way: end.raised for way, end in ends.items()} == {way: WAYS[way][2] for way in ways}
        assert {way: end.steps for way, end in ends.items()} == {way: end.steps for way, end in first.items()}
        assert max(end.seconds for end in ends.values()) < LIMIT_S
        for end in filter(lambda end: end.resumed, ends.values()):
            assert end.resumed == pytest.approx({at: curve[at] for at in range(end.steps + 1, STEPS + 1)}, rel=2e-6)
    assert [way for way, end in first.items() if end.resumed]
    for way, end in first.items():
        if way != "max_time":
            regular = set(range(2, end.steps + 1, 2))
            at_the_end = {end.steps} if "update" not in way else set()
            assert steps_saved(tmp_path / way) == sorted(regular | at_the_end), way


# -- What one rank meets alone: the others wait for it, and nothing is saved


class FailsInStep(Model):
    def __init__(self, error: BaseException, rank: int) -> None:
        super().__init__()
        self.error, self.rank = error, rank

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == AT and self.global_rank == self.rank:
            raise self.error
        return super().training_step(batch, batch_idx)


class HangsAndIsInterruptedTwice(Way):
    """Rank 0 hangs in Python, the others in a collective that it never joins; Ctrl+C reaches one of these."""

    def happens(self, trainer: L.Trainer) -> None:
        if trainer.global_rank == 0:
            time.sleep(100)
        elif trainer.global_rank == 1:
            for after_s in (0.5, 2.5):
                threading.Timer(after_s, interrupt).start()


class FailingTokens(Tokens):
    def __init__(self, error: BaseException, rank: int) -> None:
        super().__init__()
        self.error = error if int(os.environ["RANK"]) == rank else None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.error is not None and torch.utils.data.get_worker_info() is not None and index >= 80:
            raise self.error
        return super().__getitem__(index)


def worker(error: BaseException, sizes: dict[str, int]) -> dict[str, Any]:
    """The worker fails while it reads the sixth batch ahead."""
    return {"data": DataLoader(FailingTokens(error, 1), GLOBAL_BATCH // sizes["data_parallel_size"], num_workers=1)}


ALONE: dict[str, tuple[Callable[[], Way], Callable[[dict[str, int]], dict[str, Any]], str]] = {
    "an error in a step": (Way, lambda _: {"module": FailsInStep(ValueError("rank 1's own"), 1)}, "ValueError"),
    "an error in a hook": (lambda: Raised(ValueError("rank 1's own"), 1), lambda _: {}, "ValueError"),
    "SystemExit in a loader's worker": (
        Way,
        lambda sizes: worker(SystemExit(3), sizes),
        "RuntimeError FileNotFoundError",
    ),
    "Ctrl+C twice": (HangsAndIsInterruptedTwice, lambda _: {}, "SystemExit"),
}


KEEPS = ("ModelCheckpoint", "OnExceptionCheckpoint", "hook")


def end_alone(folder: str, sizes: dict[str, int], way: str, keep: str) -> None:
    """Ends this process as a script would end, and leaves an account of it."""
    make, options, _ = ALONE[way]
    saves = dict(zip(KEEPS, ([], [OnExceptionCheckpoint(folder)], [Saves(folder)])))
    raised, printed = None, io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            fit(folder, sizes, make(), *saves[keep], saves=keep == "ModelCheckpoint", **options(sizes))
        except BaseException as error:
            raised = error
    account = {"raised": type(raised).__name__, "text": str(raised), "printed": printed.getvalue()}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(account))
    os._exit(1)


@pytest.mark.parametrize(
    ("name", "way", "keep"),
    [
        ("pp2", "an error in a hook", "OnExceptionCheckpoint"),
        ("pp2", "Ctrl+C twice", "ModelCheckpoint"),
        *(
            pytest.param(name, way, KEEPS[(row + column) % len(KEEPS)], marks=MORE)
            for row, name in enumerate(SIZES)
            for column, way in enumerate(ALONE)
        ),
    ],
)
def test_what_one_rank_meets_ends_all_without_a_save_and_the_reason_is_told_once(
    name: str, way: str, keep: str, tmp_path: Path
) -> None:
    sizes = SIZES[name]
    patience = mock.patch("lightning_shard.testing.processes.FAILURE_GRACE_S", LIMIT_S)
    with patience, pytest.raises(RanksFailed) as failed:
        run_ranks(end_alone, world(sizes), str(tmp_path), sizes, way, keep, elastic=True, timeout_s=60)
    seconds = time.time() - (tmp_path / "step=2.ckpt" / "manifest.json").stat().st_mtime
    assert seconds < LIMIT_S
    assert all("died (exit code 1)" in account for account in failed.value.accounts.values()), failed.value
    last = steps_saved(tmp_path)[-1]
    assert last in ((2, 4) if "worker" in way else (2,))  # of those that are saved regularly
    accounts = {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    own = accounts[1]
    # torch finds the worker gone, or where it was to hand over a batch's memory
    assert own["raised"] in ALONE[way][2].split(), own
    said = [line for each in accounts.values() for line in each["printed"].splitlines() if "Nothing was saved" in line]
    assert len(said) == 1 or (last == 4 and not said), accounts  # none if it fails at the step that was saved
    assert all(f"step={last}.ckpt" in line for line in said)
    for account in (accounts[rank] for rank in accounts if rank != 1 and way != "Ctrl+C twice"):
        assert account["raised"] == "RankFailure", account
        assert "The first failure was on rank 1: " in account["text"]


# -- Under Lightning's own launcher: what is printed, and exit codes

SCRIPT = """
import os, signal, sys
import lightning as L
from lightning_shard import HybridShardStrategy, ModelCheckpoint
from torch.utils.data import DataLoader
from tests.parity import QUIET, Model, Tokens

folder, way, pipeline = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Way(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step != 3:
            return
        if way == "error" and trainer.global_rank > 0:
            raise ValueError("a bad sample of one rank")
        if way == "interrupt" and trainer.global_rank == 0:
            os.killpg(os.getpgrp(), signal.SIGINT)

if __name__ == "__main__":
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_on_exception=True)
    strategy = HybridShardStrategy(pipeline_parallel_size=pipeline)
    options = {**QUIET, "enable_checkpointing": True}
    trainer = L.Trainer(strategy=strategy, devices=2, max_steps=50, callbacks=[keep, Way()], **options)
    trainer.fit(Model(), DataLoader(Tokens(), 8, num_workers=1))  # Ctrl+C reaches workers, too
"""


def run_script(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit code and all lines, once every process has ended, in a plain shell's environment."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    root = str(ROOT)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder), *arguments],
        env={**environment, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=150)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said.splitlines()


def test_ctrl_c_in_a_shell_saves_the_step_on_two_stages_and_exits_as_lightning_does(tmp_path: Path) -> None:
    code, lines = run_script(tmp_path, "interrupt", "2")
    assert code == 1
    assert sum("Ctrl+C: all ranks end after this step" in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines), lines
    assert max(steps_saved(tmp_path)) in (4, 5)


@pytest.mark.long
def test_rank_0_names_the_first_cause_of_another_rank(tmp_path: Path) -> None:
    code, lines = run_script(tmp_path, "error", "1")
    assert code == 1
    assert not any("Child process" in line for line in lines), lines
    told = "rank 0 lost the others. The first failure was on rank 1: ValueError: a bad sample of one rank"
    assert any(told in line for line in lines), lines
    assert any('started again with ckpt_path="last"' in line for line in lines)
