"""The calls by which this process changes the files of a folder, or an S3 bucket: counted, recorded, or its last.

Calls are met where Python makes them, as functions of ``os``. What ``open`` or a library writes from C isn't seen; a
test that records must compare what it has seen with what is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

_real = {name: getattr(os, name) for name in ("write", "pwrite", "readlink", "kill")}
WRITES = ("write", "pwrite", "writev", "pwritev")
_ON_DESCRIPTORS = (*WRITES, "fsync", "fdatasync", "ftruncate", "posix_fallocate", "copy_file_range", "sendfile")
_ON_ONE_NAME = ("open", "mkdir", "rmdir", "unlink", "remove", "truncate", "symlink")
_ON_TWO_NAMES = ("rename", "replace", "link")
_CHANGING = os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Call:
    """One call: ``path`` is what it changes, ``other`` the second path of a rename or a link."""

    name: str
    args: tuple[Any, ...]
    path: str
    other: str
    perform: Callable[[], Any]

    @property
    def is_write(self) -> bool:
        return self.name in WRITES


Handler = Callable[[Call], Any]
"""Makes the call, or doesn't; returns what the caller is to get."""


@contextlib.contextmanager
def met(folder: str | os.PathLike[str], handler: Handler) -> Iterator[None]:
    """Hand every call that changes something below a folder to a handler, with any thread."""
    root = os.path.realpath(folder)
    with contextlib.ExitStack() as stack:
        for name in (*_ON_DESCRIPTORS, *_ON_ONE_NAME, *_ON_TWO_NAMES):
            if hasattr(os, name):
                stack.enter_context(mock.patch.object(os, name, _handed_on(name, root, handler)))
        yield


def _handed_on(name: str, root: str, handler: Handler) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        path = other = ""
        if name in _ON_DESCRIPTORS:
            # copy_file_range's target comes second, sendfile's first
            path = _path_of(args[1] if name == "copy_file_range" else args[0])
        elif name in _ON_TWO_NAMES:
            path = _absolute(args[0], kwargs.get("src_dir_fd"))
            other = _absolute(args[1], kwargs.get("dst_dir_fd"))
        elif name != "open" or (args[1] if len(args) > 1 else kwargs["flags"]) & _CHANGING:
            path = _absolute(args[1 if name == "symlink" else 0], kwargs.get("dir_fd"))
        if path == root or path.startswith(root + os.sep):
            return handler(Call(name, args, path, other, lambda: real(*args, **kwargs)))
        return real(*args, **kwargs)

    return call


def _absolute(path: Any, dir_fd: int | None) -> str:
    folder = _real["readlink"](f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()
    whole = os.path.normpath(os.path.join(folder, os.fsdecode(path)))
    return os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))


def _path_of(descriptor: Any) -> str:
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    try:
        return _real["readlink"](f"/proc/self/fd/{number}")
    except OSError:
        return ""


@contextlib.contextmanager
def requests_met(handler: Callable[[str], None]) -> Iterator[None]:
    """Tell a handler of every request to S3 before it is made, by its operation's name."""
    from aiobotocore.client import AioBaseClient

    real = AioBaseClient._make_api_call

    async def call(self: Any, operation: str, parameters: Any) -> Any:
        handler(operation)
        return await real(self, operation, parameters)

    with mock.patch.object(AioBaseClient, "_make_api_call", call):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Handlers


def unsynced(call: Call) -> Any:
    """Make the call, but for syncs: a killed process loses nothing that the kernel has."""
    return None if call.name in ("fsync", "fdatasync") else call.perform()


class Counting:
    """Makes every call, and keeps their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, call: Call) -> Any:
        self.names.append(call.name)
        return unsynced(call)

    def request(self, operation: str) -> None:
        self.names.append(operation)


@dataclass(frozen=True)
class Moment:
    """Before the ``index``-th call; or if it is a write, in the middle of it."""

    index: int
    halfway: bool = False


def moments(names: list[str]) -> list[Moment]:
    """Before every call, and in the middle of every write."""
    return [
        Moment(index, halfway)
        for index, name in enumerate(names)
        for halfway in ((False, True) if name in WRITES else (False,))
    ]


class _At:
    """Does something at one moment."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._calls = 0
        self._lock = threading.Lock()

    def _now(self) -> bool:
        with self._lock:
            self._calls += 1
            return self._calls == self._moment.index + 1


class KillAt(_At):
    """Ends this process at one moment, and others with it, as a machine's loss does: nothing is cleaned up."""

    def __init__(self, moment: Moment, others: tuple[int, ...] = ()) -> None:
        super().__init__(moment)
        self._victims = (*others, os.getpid())

    def __call__(self, call: Call) -> Any:
        if self._now():
            if self._moment.halfway and call.is_write:
                write_half(call)
            self._kill()
        return unsynced(call)

    def request(self, operation: str) -> None:
        if self._now():
            self._kill()

    def _kill(self) -> None:
        for pid in self._victims:
            _real["kill"](pid, signal.SIGKILL)
        signal.pause()


class FailAt(_At):
    """Fails one call, as a full disk does."""

    def __call__(self, call: Call) -> Any:
        if self._now():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)
        return unsynced(call)


def write_half(call: Call) -> None:
    """Half of what a write was to write."""
    assert call.name in ("write", "pwrite"), call.name
    data = memoryview(call.args[1]).cast("B")
    _real[call.name](call.args[0], data[: len(data) // 2], *call.args[2:])
