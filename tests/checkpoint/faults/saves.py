"""What tests of faults save, and how they tell whether it is whole; processes that may be killed."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_shard import ModelCheckpoint, checkpoint
from lightning_shard.checkpoint import catalog as folders
from lightning_shard.errors import CheckpointError, CorruptCheckpointError
from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO

ENDED_IN_S = 60.0
"""How long processes may take to end after one of them was killed, on a machine that has much else to do."""
_LONG_AGO_S = 2 * 3600

# -- what is saved ----------------------------------------------------------------------------------------------------


W_ROWS = 1000
"""So many that the tensor takes more than one write."""


def model(step: int) -> dict[str, torch.Tensor]:
    """Tensors that tell the step."""
    return {"w": torch.arange(80.0 * W_ROWS).view(W_ROWS, 80) + step, "b": torch.full((7,), step, dtype=torch.bfloat16)}


def optimizer(step: int) -> dict[str, torch.Tensor]:
    return {"w.momentum": torch.full((50, 3), -float(step))}


def trainer_state(step: int) -> dict[str, Any]:
    return {"global_step": step, "history": torch.arange(step)}


def whole_state(step: int | None) -> dict[str, dict[str, Any]]:
    """All of it but what is each rank's own."""
    if step is None or step not in (1, 2, 3):
        raise WrongValues(f"wrong values were loaded: step {step}")
    return {"model": model(step), "optimizer": optimizer(step), "trainer": trainer_state(step)}


FIRST, BESIDE, IN_NEW_FOLDERS = "last.ckpt", "last-v1.ckpt", "runs/1/last.ckpt"


@dataclass(frozen=True)
class Save:
    """A save of step 2 where step 1 is at ``FIRST``, on which a fault is tried."""

    name: str = FIRST
    asynchronous: bool = False
    world_size: int = 1
    victim: int | None = None
    """Of several ranks, the one whose calls are counted, and who is killed at one of them."""
    everyone: bool = False
    """Whether the other ranks are killed at the same moment."""
    fsync: bool = True

    def __str__(self) -> str:
        where = {FIRST: "over one", BESIDE: "to a new path", IN_NEW_FOLDERS: "to a new path in new folders"}[self.name]
        what = f"{'asynchronous ' if self.asynchronous else ''}save {where}"
        killed = "" if self.victim is None else f", {'all' if self.everyone else f'rank {self.victim}'} killed"
        return f"{what}, {f'{self.world_size} ranks{killed}' if self.world_size > 1 else 'one process'}"


@dataclass
class Tried:
    """How many points, of a save of how many calls, and what did not hold after which."""

    points: int = 0
    calls: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """A folder of checkpoints: ``FIRST`` is there (step 1), and another (step 2) is saved over it or beside it."""

    folder: str
    name: str
    on_disk: Path
    """The same folder, as the local disk has it: for a store, what its server serves."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> str:
        return f"{self.folder}/{FIRST}"

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"


def save(place: Place, step: int, *, asynchronous: bool = False, fsync: bool = True) -> None:
    """Save a step's state; on several ranks, each its part. Collective."""
    state: dict[str, Any] = dict(model(step))
    moments: dict[str, Any] = dict(optimizer(step))
    ranks_own = {"generator": torch.tensor([dist.get_rank() if dist.is_initialized() else 0, step])}
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state["w"], moments["w.momentum"] = sharded(state["w"], mesh), sharded(moments["w.momentum"], mesh)
    arguments: dict[str, Any] = {
        "optimizer": moments,
        "trainer_state": trainer_state(step),
        "rank_state": ranks_own,
        "storage_options": place.options or None,
        "fsync": fsync,
    }
    if not asynchronous:
        checkpoint.save(state, place.path, **arguments)
        return
    saver = checkpoint.AsyncSaver()
    saver.save(state, place.path, **arguments)
    saver.wait()
    saver.close()


def sharded(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    local = tensor.chunk(mesh.size())[mesh.get_local_rank()]
    return DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)


# -- what is there ----------------------------------------------------------------------------------------------------


class WrongValues(AssertionError):
    """Something was loaded without an error, and it isn't what was saved."""


def same(what: str, found: Any, wanted: Any) -> None:
    """Raises WrongValues where two tensors, or two numbers, differ."""
    if not (torch.equal(found, wanted) if torch.is_tensor(wanted) else found == wanted):
        raise WrongValues(f"wrong values were loaded: {what}")


def step_at(path: str, options: dict[str, Any] | None = None) -> int | None:
    """Which step's checkpoint is whole at a path, to the last byte; None where there is no checkpoint.

    Raises:
        CheckpointError: There is one, and it isn't whole.
        WrongValues: It was loaded, and is no step's.
    """
    if not checkpoint.exists(path, storage_options=options):
        return None
    if not (report := checkpoint.verify(path, storage_options=options)).ok:
        raise CorruptCheckpointError(f"{path}: {report.faults}")
    stored = checkpoint.read(path, storage_options=options)
    trainer = stored.trainer_state()
    step = trainer.get("global_step") if isinstance(trainer, dict) else None
    found = {"model": stored.full(), "optimizer": stored.optimizer.full(), "trainer": trainer}
    for section, wanted in whole_state(step).items():
        same(f"names of {section}", sorted(found[section]), sorted(wanted))
        for name, value in wanted.items():
            same(name, found[section][name], value)
    return step


def last(place: Place) -> str | None:
    """What ``ckpt_path="last"`` resumes from."""
    io = ShardedCheckpointIO(storage_options=place.options or None)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(checkpoint_io=io))
    found = ModelCheckpoint(place.folder)._find_last_checkpoints(trainer)
    return next((f"{place.folder}/{path.rpartition('/')[2]}" for path in found), None)


REFUSALS = (WrongValues, CheckpointError, OSError)
"""What is raised where a checkpoint isn't whole."""


def fault_of(place: Place) -> str:
    """What doesn't hold after a save of step 2 that was killed, or nothing: one of the two checkpoints is whole, it is
    found as the last one, the next save succeeds and removes what is left over and old.
    To be called in a process of its own.
    """
    try:
        first, second = step_at(place.first, place.options), step_at(place.path, place.options)
        if first not in ({1, 2} if place.name == FIRST else {1}):
            return f"step 1 is gone: {first}"
        if second not in ({1, 2} if place.name == FIRST else {None, 2}):
            return f"neither the old nor the new one: {second}"
        if (found := last(place)) != (place.path if second else place.first):
            return f"last is {found}"
        target = place.on_disk / place.name
        if place.options:  # an upload that wasn't completed can't be given another time: all leftovers are old here
            folders.LEFTOVER_AGE_S = -60.0
        elif target.exists():
            age(target)
        save(place, 3)
        if step_at(place.path, place.options) != 3:
            return "the next save isn't there"
        if left := leftovers(target):
            return f"left over: {left}"
    except REFUSALS as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def leftovers(folder: Path) -> list[str]:
    """Files below a checkpoint's folder on the local disk that its manifest doesn't name."""
    named = {"manifest.json"} if (folder / "manifest.json").exists() else set()
    if named:
        manifest = checkpoint.read(folder).manifest
        named |= {manifest.table.path, *(file.path for file in manifest.files)}
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}
    return sorted(files - named)


def age(folder: Path) -> None:
    """As if what lies in a folder had been there for hours."""
    then = time.time() - _LONG_AGO_S
    for file in folder.rglob("*"):
        os.utime(file, (then, then), follow_symlinks=False)


# -- processes --------------------------------------------------------------------------------------------------------


def forked(work: Callable[[], Any]) -> int:
    """Do something in a copy of this process, and return its id. It ends without any cleaning up."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        if os.environ.get("SHOW_SURVIVORS"):
            traceback.print_exc()
    finally:
        os._exit(status)


def ended(pids: Sequence[int], within_s: float = ENDED_IN_S) -> list[int | None]:
    """How each process ended (as ``subprocess`` tells it), once all have; None for one that waited on."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + within_s
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def in_fork(scratch: Path, work: Callable[[], Any]) -> Any:
    """What a function returns, called in a copy of this process: the next copy is made of one that did nothing yet."""
    target = scratch / "result.pickle"

    def keep() -> None:
        try:
            result: Any = work()
        except BaseException as error:
            error.add_note(traceback.format_exc())
            result = error
        target.write_bytes(pickle.dumps(result))

    (code,) = ended([forked(keep)])
    assert code == 0, code
    result = pickle.loads(target.read_bytes())
    if isinstance(result, BaseException):
        raise result
    return result


def join(rank: int, world_size: int, meeting: Path) -> None:
    """Make this process one of several, which meet in a file."""
    store = dist.FileStore(str(meeting), world_size)
    timeout = timedelta(seconds=ENDED_IN_S / 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
