"""The few verbs that a checkpoint needs of the place it lies in. Everything else is written on top of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from lightning_shard.errors import CheckpointConflictError, CorruptCheckpointError

Buffer = memoryview
Segment = tuple[int, Buffer]
"""Where in the file, in bytes, and the memory to fill from there."""
Reader = Callable[[Sequence[Segment]], None]
"""Fills segments, which are in ascending order. Raises CorruptCheckpointError if the file is too short."""
Stamp = str
"""Tells a file's content from any other that has been or will be under its name: a hash of it, or an ETag."""
ANYTHING: Stamp = "anything"
"""In a stamp's place: whatever is there, or nothing."""


class Store(Protocol):
    """One directory of files. Errors of the underlying system pass through, except as said.

    A store is rooted at one checkpoint's directory; names in it are relative, with ``/``. Its methods may be called
    from several threads at once.
    """

    @property
    def root(self) -> str:
        """The path as the user gave it; never with credentials."""

    @property
    def is_remote(self) -> bool:
        """Whether it is reached through a network, which all ranks share."""

    @property
    def requests(self) -> int:
        """How many calls are worth having under way at once, each from a thread of its own."""

    @property
    def step_bytes(self) -> int:
        """How much is best asked for at a time: what stays in a core's cache, or what makes up for a round trip."""

    def place(self) -> tuple[str, ...]:
        """What tells this directory from any other, also of the same path in another store: the path, and what else."""

    def read(self, name: str) -> bytes:
        """A whole small file. Raises FileNotFoundError."""

    def size(self, name: str) -> int:
        """In bytes. Raises FileNotFoundError."""

    def reading(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading parts of it. Raises FileNotFoundError, then or at the first read."""

    def mapped(self, name: str, begin: int, end: int) -> Buffer | None:
        """The bytes of a file from ``begin`` to ``end`` where the system has them in memory, for as long as it is held.

        It must not be written to. None where that isn't possible, or not worth it: then they are to be read.

        Raises:
            FileNotFoundError: There is no such file.
            CorruptCheckpointError: The file is too short.
        """

    def write(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        """Write a new file from buffers, each of which may be reused once the next one is asked for."""

    def stamp(self, name: str) -> Stamp | None:
        """What is under a name now; None where nothing is."""

    def publish(
        self,
        name: str,
        buffers: Iterable[Buffer],
        size_bytes: int,
        *,
        durable: bool,
        replaces: Stamp | None = ANYTHING,
    ) -> None:
        """The same, replacing a file at once: readers see the old bytes or all of the new ones, never a mixture.

        Args:
            replaces: What may be replaced: a stamp, or None for nothing. A file that has been removed since its stamp
                was taken is no hindrance. Of several that replace one stamp at the same time, one succeeds; stores that
                can't put conditionally look before and after, and so may let the later one win.

        Raises:
            CheckpointConflictError: Something else is there; it stays, and nothing has been changed.
        """

    def remove(self, name: str, *, only: Stamp = ANYTHING) -> None:
        """Remove a file if it is there.

        Raises:
            CheckpointConflictError: Something else than ``only`` is there; it stays.
        """

    def remove_empty_folders(self) -> None:
        """Remove the folder and those in it that this format makes, as far as they are empty.

        Nothing on stores that have no folders.
        """

    def modified(self, name: str) -> float | None:
        """When a file was written, in seconds since 1970 by the store's own clock; None where the store doesn't tell.

        Raises:
            FileNotFoundError: There is no such file.
        """

    def exists(self, name: str) -> bool: ...

    def names(self) -> list[str]:
        """All files in the directory and one level below, to find leftovers; never to find data."""

    def sync(self, names: Iterable[str]) -> None:
        """Make the folder entries of these files survive a crash of the machine."""


def adjacent(
    segments: Sequence[Segment], max_gap: int = 0, max_span: int = 0
) -> Iterable[tuple[int, int, list[Segment]]]:
    """Segments that follow on one another, as (start, stop, segments).

    Between two there may be up to ``max_gap`` bytes, as long as the whole isn't longer than ``max_span``.
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


def conflict(root: str, name: str) -> CheckpointConflictError:
    return CheckpointConflictError(f"{root}/{name} has been replaced by another program meanwhile.")


def too_short(name: str, at: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name} is truncated: the manifest refers to bytes beyond its end at {at:,}. Use another checkpoint."
    )
