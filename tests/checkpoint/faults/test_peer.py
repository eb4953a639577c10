"""The same faults tried on torch.distributed.checkpoint, by its defaults, and on ours, to be read side by side.

What it loses isn't asserted: its rows are facts about one version. That it saves and loads without a fault is.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.testing import run_ranks
from tests.checkpoint.faults import cuts, saves
from tests.checkpoint.faults.calls import Counting, FailAt, Moment, met
from tests.checkpoint.faults.kills import Ground, kill_at_every_point
from tests.checkpoint.faults.peer import NAME, PEER
from tests.checkpoint.faults.saves import (
    BESIDE,
    FIRST,
    IN_NEW_FOLDERS,
    OURS,
    Place,
    Save,
    System,
    Tried,
    WrongValues,
    ended,
    forked,
    in_fork,
    step_at,
)

LIMIT_S = 3600.0
# what ours promises is asserted in shorter tests beside this file
pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT_S)]
SYSTEMS = {"": OURS, NAME: PEER}
LOADED_IN_S = 30
"""How long one load may take, of milliseconds."""


def enter(ledger: Any, group: str, fault: str, system: str, tried: Tried) -> None:
    kinds = Counter(map(_kind, tried.faults))
    note = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
    ledger(group, fault, tried=tried.points, lost=tried.faults, note=note, system=system)


def _kind(fault: str) -> str:
    return next((kind for kind in (WRONG, DIED, SAID) if kind in fault), "neither loads")


WRONG = "wrong values were loaded"
DIED = "the process died"
SAID = "the save said that it had succeeded"

# -- crashes and power cuts -------------------------------------------------------------------------------------------


def kill_peer(scratch: Path, case: Save) -> Tried:
    return kill_at_every_point(Ground(scratch, PEER), case)


def cut_peer(scratch: Path, case: Save) -> Tried:
    log = cuts.recorded(scratch, case, PEER)
    return cuts.cut_after_every_call(scratch, case, log, system=PEER, thorough=True)


@pytest.mark.parametrize("case", [Save(BESIDE), Save(FIRST), Save(FIRST, world_size=2, victim=0)], ids=str)
def test_kills(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(kill_peer, 1, tmp_path, case, init=False, timeout_s=LIMIT_S)
    enter(ledger, "Crash", f"local disk: {case}", NAME, tried)


@pytest.mark.parametrize("case", [Save(FIRST), Save(BESIDE), Save(IN_NEW_FOLDERS)], ids=str)
def test_power_cuts(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(cut_peer, 1, tmp_path, case, init=False, timeout_s=LIMIT_S)
    enter(ledger, "Power loss", str(case), NAME, tried)


# -- damage -----------------------------------------------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def cut_off(data: bytes, at: int) -> bytes:
    return data[:at]


DAMAGES: dict[str, Callable[[bytes, int], bytes]] = {
    "every byte of every file of a small checkpoint flipped in turn": flipped,
    "every file of a small checkpoint cut off at every byte": cut_off,
}


def damage(scratch: Path, name: str, system_name: str) -> Tried:
    """Change one file at a time, and load: what was saved, or an error, is well."""
    saves.W_ROWS = 1  # in this process, and those that are forked from it
    system = SYSTEMS[system_name]
    if system.is_ours:  # as loads find damage, without verify
        system = replace(system, step_at=partial(step_at, verified=False))
    folder = scratch / "small"
    place = Place(str(folder), FIRST, folder)
    in_fork(scratch, lambda: system.save(place, 1))
    assert in_fork(scratch, lambda: system.step_at(place.first)) == 1
    tried = Tried()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = file.read_bytes()
        points = list(range(len(data)))
        lines: list[str] = []
        while len(lines) < len(points):  # a process that dies of one change is followed by one that goes on after it
            report = scratch / "report.txt"
            report.write_bytes(b"")
            changes = [DAMAGES[name](data, at) for at in points[len(lines) :]]
            # each load has its own limit
            (code,) = ended([forked(partial(_load_each, file, changes, system, place.first, report))], LIMIT_S)
            lines += report.read_text().splitlines()
            if code != 0:
                lines.append(f"{DIED}: {code}")
        tried.points += len(points)
        tried.faults += [f"{file.name} at byte {at}: {line}" for at, line in zip(points, lines, strict=True) if line]
        file.write_bytes(data)
    return tried


def _load_each(file: Path, changes: list[bytes], system: System, path: str, report: Path) -> None:
    """Report a line for each change: empty where it was refused, or did no harm."""
    with report.open("w", buffering=1) as lines:
        for new in changes:
            file.write_bytes(new)
            signal.alarm(LOADED_IN_S)
            fault = ""
            try:
                step = system.step_at(path)
                if step != 1:
                    fault = f"{WRONG}: step {step}"
            except WrongValues as error:
                fault = str(error).replace("\n", " ")
            except system.refusals:
                pass
            lines.write(f"{fault}\n")


@pytest.mark.parametrize("system", ["", NAME], ids=["ours", "peer"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damage(name: str, system: str, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(damage, 1, tmp_path, name, system, init=False, timeout_s=LIMIT_S)
    enter(ledger, "Damage", name, system, tried)


# -- a disk that fails ------------------------------------------------------------------------------------------------


def fail(scratch: Path, system_name: str, threads: int) -> Tried:
    """Fail each call of a save over a checkpoint in turn: it raises and either is whole, or the new one is."""
    system = SYSTEMS[system_name]
    arguments = {} if system.is_ours else {"threads": threads}
    ground = Ground(scratch, system)

    def work(place: Place, handler: Counting | FailAt) -> tuple[list[str], bool]:
        try:
            with met(place.folder, handler):
                system.save(place, 2, **arguments)
        except system.refusals:
            return [], False
        return handler.names if isinstance(handler, Counting) else [], True

    tried = Tried()
    place = ground.fresh(FIRST)
    names, said = in_fork(scratch, lambda: work(place, Counting()))
    assert said
    for index in range(len(names)):
        place = ground.fresh(FIRST)
        _, said = in_fork(scratch, lambda place=place, index=index: work(place, FailAt(Moment(index))))
        fault = in_fork(scratch, lambda place=place, said=said: _after(system, place, 2 if said else 1))
        tried.points += 1
        tried.faults += [f"{names[index]}, call {index}: {fault}"] if fault else []
    return tried


def _after(system: System, place: Place, step: int) -> str:
    try:
        found = system.step_at(place.path)
    except WrongValues as error:
        return str(error)
    except system.refusals as error:
        return SAID if step == 2 else f"{type(error).__name__}: {str(error)[:300]}"
    # the new one may be whole in spite of an error
    return "" if found in {2, step} else SAID if step == 2 else f"there is step {found}"


@pytest.mark.parametrize(("system", "threads"), [("", 1), (NAME, 1), (NAME, 2)], ids=["ours", "peer", "peer-2-threads"])
def test_an_error_of_the_disk(system: str, threads: int, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(fail, 1, tmp_path, system, threads, init=False, timeout_s=LIMIT_S)
    name = f"{NAME}, thread_count={threads}" if threads > 1 else system
    fault = "local disk: an input/output error of any one call, save over one, one process"
    enter(ledger, "Stores that fail", fault, name, tried)
