"""The ``Store`` protocol: the few operations that checkpoints need from local disk or remote storage."""

from __future__ import annotations

import contextlib
import os
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.errors import CheckpointConflictError, CorruptCheckpointError

Buffer = memoryview
Segment = tuple[int, Buffer]
"""A byte offset in the file, and the memory to read into from there."""
Reader = Callable[[Sequence[Segment]], None]
"""Reads segments, which are in ascending order. Raises CorruptCheckpointError if the file is too short."""
Stamp = str
"""Identifies a version of a file's content, among all that its name has had or will have: a hash, or an ETag."""
FOLDERS = ("model", "optimizer", "trainer")
"""The folders in a checkpoint's directory."""
ANYTHING: Stamp = "anything"
"""Passed in place of a stamp: matches any content, and a missing file."""


class Store(Protocol):
    """One directory of files. Errors of the underlying system pass through, except where stated.

    A store is rooted at one checkpoint's directory; names are relative to it, with ``/``. Its methods are thread-safe.
    """

    root: str
    """The path as the user passed it; never contains credentials."""
    folder: str | None
    """The directory's absolute path on the local disk; None for any other store."""
    links_lead_anywhere: bool = True
    """Whether files, and folders of the directory, may be symbolic links that lead out of it."""
    is_remote: bool
    """Whether it is reached through a network, which all ranks share."""
    step_bytes: int
    """The best size of one read: what fits into a core's cache, or what amortizes a network round trip."""

    @property
    @abstractmethod
    def requests(self) -> int:
        """The best number of concurrent calls, each from its own thread."""

    @abstractmethod
    def place(self) -> tuple[str, ...]:
        """Identifies this directory among all stores: the path, and what else locates it, such as an endpoint."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a whole small file. Raises FileNotFoundError."""

    @abstractmethod
    def size(self, name: str) -> int:
        """A file's size in bytes. Raises FileNotFoundError."""

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading parts of it. Raises FileNotFoundError, on opening or at the first read."""

    def mapped(self, name: str, begin: int, end: int) -> Buffer | None:
        """Memory-map a file from ``begin`` to ``end``; valid while the buffer is referenced.

        The buffer must not be written to. None where mapping isn't possible, or not worth it: then read instead.

        Raises:
            FileNotFoundError: There is no such file.
            CorruptCheckpointError: The file is too short.
        """
        return None

    @abstractmethod
    def write(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        """Write a new file from buffers. The iterator may reuse a buffer's memory once the next one is requested."""

    def stamp(self, name: str) -> Stamp | None:
        """The stamp of a file's current content; None if there is no such file."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return digest(self.read(name))
        return None

    @abstractmethod
    def publish(
        self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool, replaces: Stamp | None = ANYTHING
    ) -> None:
        """Write a file, replacing an old one atomically: readers see all of the old bytes or all of the new ones.

        Args:
            replaces: The stamp of the content that may be replaced, or None if there must be no file. If the file was
                removed since its stamp was taken, the write succeeds. Of several concurrent calls that replace one
                stamp, one succeeds; stores without conditional puts check before and after, so the later call may win.

        Raises:
            CheckpointConflictError: The file has other content; it stays, and nothing has been changed.
        """

    @abstractmethod
    def remove(self, name: str, *, only: Stamp = ANYTHING) -> None:
        """Remove a file if it exists.

        Raises:
            CheckpointConflictError: The file's content isn't the one of stamp ``only``; it stays.
        """

    @abstractmethod
    def remove_empty_folders(self) -> None:
        """Remove this directory, and the folders in it that the format makes, where they are empty.

        Does nothing on stores that have no folders.
        """

    @abstractmethod
    def modified(self, name: str) -> float | None:
        """When a file was written, in seconds since 1970 by the store's own clock; None if the store has no times.

        Raises:
            FileNotFoundError: There is no such file.
        """

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def names(self) -> list[str]:
        """All files in the directory and one level below. Used to find leftovers, never to find data."""

    def sync(self, names: Iterable[str]) -> None:
        """Sync the folder entries of these files, so that they survive a crash of the machine. Does nothing on remote
        stores, which are as durable as they get when a write returns."""
        return

    def _write_beside(
        self, name: str, buffers: Iterable[Buffer], size_bytes: int, move: Callable[[str], None], *, durable: bool
    ) -> None:
        """Write a file under a temporary name, which ``move`` is called with to give it its own."""
        temporary = temporary_name(name)
        try:
            self.write(temporary, buffers, size_bytes, durable=durable)
            move(temporary)
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove(temporary)
            raise


def temporary_name(name: str) -> str:
    return f"{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


def adjacent(
    segments: Sequence[Segment], max_gap: int = 0, max_span: int = 0
) -> Iterable[tuple[int, int, list[Segment]]]:
    """Group adjacent segments; yields (start, stop, segments).

    Gaps of up to ``max_gap`` bytes are allowed between two segments, as long as the group isn't longer than
    ``max_span``.
    """
    start = stop = 0
    joined: list[Segment] = []
    for offset, buffer in segments:
        near = offset == stop or (0 < offset - stop <= max_gap and offset + buffer.nbytes - start <= max_span)
        if joined and not near:
            yield start, stop, joined
            joined = []
        if not joined:
            start = offset
        joined.append((offset, buffer))
        stop = offset + buffer.nbytes
    if joined:
        yield start, stop, joined


def read_range(store: Store, name: str, begin: int, end: int) -> Buffer:
    """Read bytes ``begin`` to ``end`` of a file into new memory."""
    buffer = memoryview(bytearray(end - begin))
    with store.reading(name) as read:
        read([(begin, buffer)])
    return buffer


def conflict(root: str, name: str) -> CheckpointConflictError:
    return CheckpointConflictError(f"{root}/{name} has been replaced by another program meanwhile.")


def too_short(name: str, at: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name} is truncated: the manifest refers to bytes around {at:,}, beyond its end. Use another checkpoint."
    )
