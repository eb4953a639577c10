"""What a disk may hold after a power cut: everything that was synced, and of the rest anything.

A :class:`Recorder` takes down the calls of a save, of one process or of several. :class:`Disk` plays them back up to
any call and gives images of what may be found when the power comes back. The rules are the weakest that POSIX allows a
file system, weaker than ext4 and xfs are in practice:

- The bytes of a file are there once the file was synced, its name once its folder was. One doesn't imply the other.
- What wasn't synced may be there or not, each write and each name for itself and in any order; a write may be there by
  half, or as zeros, as where a file has got its length and not its blocks.
- A rename is seen whole or not at all, at the new name; the old name may stay. It says nothing of the file's bytes.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checkpoint.faults.calls import Call

_SECTOR_BYTES = 512
_BY_DESCRIPTOR = ("write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "ftruncate")
Node = int
"""A file or a folder of the disk, whatever its name is."""


@dataclass(frozen=True)
class Bytes:
    """``data`` of a file from ``start``; or without data, the file cut or extended to ``start``."""

    node: Node
    start: int
    data: bytes | None


@dataclass(frozen=True)
class Name:
    """A folder's entry is set, or where there is no target, removed."""

    folder: Node
    name: str
    target: Node | None
    after: int | None = None
    """The change without which this one doesn't happen: a rename's old name goes when the new one is there."""


Change = Bytes | Name


@dataclass
class Log:
    """A tree as it was, all of it on the disk, and what was done to it: per call its changes, or what it synced."""

    root: Node
    files: dict[Node, bytes] = field(default_factory=dict)
    folders: dict[Node, dict[str, Node]] = field(default_factory=dict)
    calls: list[list[Change] | Node] = field(default_factory=list)


class Recorder:
    """Takes down every call of the processes that share its file, one at a time, and makes it, but for syncs."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder, self._file = folder, file
        file.write_bytes(b"")
        self._at_first = Log(_number(folder))
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                self._at_first.folders[_number(path)] = {entry.name: _number(entry) for entry in path.iterdir()}
            else:
                self._at_first.files[_number(path)] = path.read_bytes()

    def __call__(self, call: Call) -> Any:
        with self._file.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            was_there = os.path.lexists(call.path)
            number = os.lstat(call.path).st_ino if was_there else 0
            offset = os.lseek(call.args[0], 0, os.SEEK_CUR) if call.name in ("write", "writev") else 0
            result = None if call.name in ("fsync", "fdatasync") else call.perform()
            done = _taken_down(call, number, offset, result)
            if done is not None:
                file.write(pickle.dumps(done))
        return result

    def log(self) -> Log:
        """All that was taken down.

        Raises:
            AssertionError: The tree isn't what it would be by the log: some calls were not seen.
        """
        log = _numbered_anew(self._at_first, self._taken_down())
        assert Disk(log, len(log.calls)).image(EVERYTHING) == tree_of(self._folder), "some calls were not seen"
        return log

    def _taken_down(self) -> Iterator[tuple[str, ...]]:
        with self._file.open("rb") as file:
            while file.tell() < self._file.stat().st_size:
                yield pickle.load(file)


def _number(path: str | Path) -> int:
    return os.lstat(path).st_ino


def _taken_down(call: Call, number: int, offset: int, result: Any) -> tuple[Any, ...] | None:
    """One call as text and the system's numbers of files; None where nothing has changed."""
    if call.path and call.name not in _BY_DESCRIPTOR:
        folder, name = os.path.split(call.path)
        place = (_number(folder), name)
    match call.name:
        case "open" if not number:
            return ("create", *place, _number(call.path), False)
        case "open" if call.args[1] & os.O_TRUNC:
            return ("bytes", number, 0, None)
        case "open":
            return None
        case "mkdir":
            return ("create", *place, _number(call.path), True)
        case "unlink" | "remove" | "rmdir":
            return ("remove", *place)
        case "rename" | "replace" | "link":
            folder, name = os.path.split(call.other)
            return ("name", _number(folder), name, number, None if call.name == "link" else place)
        case "write" | "pwrite":
            data = bytes(memoryview(call.args[1]).cast("B")[:result])
            return ("bytes", os.fstat(call.args[0]).st_ino, call.args[2] if call.name == "pwrite" else offset, data)
        case "ftruncate":
            return ("bytes", os.fstat(call.args[0]).st_ino, call.args[1], None)
        case "fsync" | "fdatasync":
            return ("sync", os.fstat(call.args[0]).st_ino)
    raise NotImplementedError(f"{call.name} is a call that no save made when this was written")


def _numbered_anew(at_first: Log, taken_down: Iterator[tuple[Any, ...]]) -> Log:
    """A log whose numbers are each of one file: the system gives those of removed ones to new ones."""
    log = Log(at_first.root, dict(at_first.files), dict(at_first.folders))
    node = {number: number for number in (*log.files, *log.folders)}
    new = max(node) + 1
    changes = 0
    for kind, *what in taken_down:
        if kind == "sync":
            log.calls.append(node[what[0]])
            continue
        done: list[Change]
        match kind, what:
            case "create", [folder, name, number, is_folder]:
                node[number], new = new, new + 1
                (log.folders if is_folder else log.files)[node[number]] = {} if is_folder else b""  # type: ignore[index]
                done = [Name(node[folder], name, node[number])]
            case "remove", [folder, name]:
                done = [Name(node[folder], name, None)]
            case "name", [folder, name, number, old]:
                done = [Name(node[folder], name, node[number])]
                if old:
                    done.append(Name(node[old[0]], old[1], None, after=changes))
            case "bytes", [number, start, data]:
                done = [Bytes(node[number], start, data)]
        changes += len(done)
        log.calls.append(done)
    return log


# ---------------------------------------------------------------------------------------------------------------------
# After the cut

Tree = dict[str, bytes | None]
"""A folder's files by their paths in it; None is a folder."""
Fate = str
"""Of a change that wasn't synced: ``whole`` there or ``absent``; of bytes also ``half`` or ``zeros``."""
Choice = Callable[[Sequence[Change]], Sequence[Fate]]
"""The fates of all changes that weren't synced, which are given in the order in which they were made."""


class Disk:
    """A disk whose power is cut after so many calls."""

    def __init__(self, log: Log, calls: int) -> None:
        self._log = log
        self._changes: list[Change] = []
        synced: set[int] = set()
        for call in log.calls[:calls]:
            if isinstance(call, list):
                self._changes += call
            else:
                synced |= {index for index, change in enumerate(self._changes) if _node(change) == call}
        self.pending = [index for index in range(len(self._changes)) if index not in synced]

    def image(self, choice: Choice) -> Tree:
        """What is found, for one choice of what became of that which wasn't synced."""
        fates = dict(zip(self.pending, choice([self._changes[index] for index in self.pending]), strict=True))
        files = dict(self._log.files)
        folders = {node: dict(entries) for node, entries in self._log.folders.items()}
        for index, change in enumerate(self._changes):
            fate = fates.get(index, "whole")
            if isinstance(change, Bytes):
                files[change.node] = _changed(files[change.node], change, fate)
            elif fate == "whole" and (change.after is None or fates.get(change.after, "whole") == "whole"):
                folders[change.folder].pop(change.name, None)
                if change.target is not None:
                    folders[change.folder][change.name] = change.target
        return dict(_below(self._log.root, "", files, folders))


def _node(change: Change) -> Node:
    return change.node if isinstance(change, Bytes) else change.folder


def _changed(data: bytes, change: Bytes, fate: Fate) -> bytes:
    if fate == "absent":
        return data
    if change.data is None:
        return data[: change.start].ljust(change.start, b"\0")
    new = change.data
    if fate == "half":
        new = new[: len(new) // 2 // _SECTOR_BYTES * _SECTOR_BYTES]
    elif fate == "zeros":
        new = bytes(len(new))
    return data[: change.start].ljust(change.start, b"\0") + new + data[change.start + len(new) :]


def _below(
    folder: Node, path: str, files: dict[Node, bytes], folders: dict[Node, dict[str, Node]]
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in folders[folder].items():
        if node in folders:
            yield path + name, None
            yield from _below(node, f"{path}{name}/", files, folders)
        else:
            yield path + name, files[node]


def tree_of(folder: Path) -> Tree:
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def put(tree: Tree, folder: Path) -> None:
    """Write a tree out."""
    folder.mkdir()
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)


# -- what may become of what wasn't synced ----------------------------------------------------------------------------


def _alike(names: Fate, data: Fate) -> Choice:
    return lambda changes: [names if isinstance(change, Name) else data for change in changes]


def _from(start: float, stop: float = 1.0) -> Choice:
    """Only those from one part of the whole to another."""

    def choose(changes: Sequence[Change]) -> list[Fate]:
        count = len(changes)
        return ["whole" if start * count <= index < stop * count else "absent" for index in range(count)]

    return choose


def _only_last(changes: Sequence[Change]) -> list[Fate]:
    return ["absent"] * (len(changes) - 1) + ["whole"] * bool(changes)


def _at_random(seed: int) -> Choice:
    def choose(changes: Sequence[Change]) -> list[Fate]:
        chooser = random.Random(seed)
        chance = chooser.random()
        fates = ("whole", "absent", "half", "zeros")
        return [
            chooser.choice(fates) if isinstance(change, Bytes) else fates[chooser.random() < chance]
            for change in changes
        ]

    return choose


def but_one(index: int, of_it: Fate, of_others: Fate) -> Choice:
    """One change has another fate than all the others."""
    return lambda changes: [of_it if at == index else of_others for at in range(len(changes))]


EVERYTHING = _alike("whole", "whole")
CHOICES: tuple[Choice, ...] = (
    EVERYTHING,
    _alike("absent", "absent"),
    _alike("absent", "whole"),
    _alike("whole", "absent"),
    _alike("whole", "zeros"),
    _alike("whole", "half"),
    _from(0.5),
    _from(0, 0.5),
    _only_last,
    *(_at_random(seed) for seed in range(4)),
)


def images(log: Log, calls: int, *, thorough: bool = False) -> Iterator[Tree]:
    """What may be found after a cut: some choices; or also each change alone, all but each, and more at random."""
    disk = Disk(log, calls)
    choices = list(CHOICES)
    if thorough:
        choices += [_at_random(seed) for seed in range(4, 40)]
        for index in range(len(disk.pending)):
            choices += [but_one(index, "whole", "absent"), but_one(index, "absent", "whole")]
            choices += [but_one(index, "half", "whole")]
    for choice in choices:
        yield disk.image(choice)
