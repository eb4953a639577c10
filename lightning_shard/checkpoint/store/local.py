"""Local disk, or anything that is mounted like one."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence

from lightning_shard.checkpoint.store.protocol import Buffer, Reader, Segment, adjacent, too_short
from lightning_shard.errors import CorruptCheckpointError

READ_STEP_BYTES = 2**20
MAX_THREADS = 8
_IOV_MAX = 1024
_MAX_CALL_BYTES = 2**30  # Linux moves at most 2 GiB − 4 KiB per call
_MADV_POPULATE_READ = 22  # of Linux 5.14; Python 3.11's mmap has no name for it


def thread_count() -> int:
    """Threads for this process, of the processors that it shares with the other ranks of the machine."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    neighbours = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(MAX_THREADS, processors // (int(neighbours) if neighbours.isdigit() else 1) or 1))


class LocalStore:
    """A directory of the local disk."""

    is_remote = False
    step_bytes = READ_STEP_BYTES

    def __init__(self, root: str) -> None:
        self.root = root
        self.links_lead_anywhere = True
        """Whether a file, or a folder of the directory, may be a link to elsewhere."""
        self._made: set[str] = set()
        """Folders in which one was made."""
        self._inside: set[str] = set()
        """Folders of which it is known that no link leads out of the directory."""

    @property
    def requests(self) -> int:
        return thread_count()

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _open(self, name: str) -> int:
        """A descriptor to read a file by.

        Raises:
            CorruptCheckpointError: It is no regular file (a pipe would be waited for, a device has no end), or a link
                leads out of the directory.
        """
        path = self._path(name)
        if not self.links_lead_anywhere:
            self._check_inside(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(fd)
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise CorruptCheckpointError(f"{path} is no regular file but a pipe, socket or device: it isn't read.")
        return fd

    def _check_inside(self, path: str) -> None:
        folder = os.path.dirname(path)
        if folder in self._inside and not os.path.islink(path):
            return
        root = os.path.realpath(self.root)
        if os.path.commonpath([root, os.path.realpath(path)]) != root:
            raise CorruptCheckpointError(
                f"{path} is reached by a link that leads out of the checkpoint, which isn't followed: put the file"
                " itself in its place."
            )
        if not os.path.islink(path):
            self._inside.add(folder)

    def read(self, name: str) -> bytes:
        with open(self._open(name), "rb") as file:
            return file.read()

    def size(self, name: str) -> int:
        return os.stat(self._path(name)).st_size

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        fd = self._open(name)

        def read(segments: Sequence[Segment]) -> None:
            for start, _, joined in adjacent(segments):
                for first in range(0, len(joined), _IOV_MAX):
                    part = joined[first : first + _IOV_MAX]
                    _preadv_all(fd, [buffer for _, buffer in part], part[0][0] if first else start, name)

        try:
            yield read
        finally:
            os.close(fd)

    def mapped(self, name: str, begin: int, end: int) -> Buffer | None:
        """See the protocol. The pages are brought in by a call that can fail, not by touching them, which would kill
        the process where the disk fails or the file has been cut off.
        """
        if sys.platform != "linux" or end == begin:
            return None
        fd = self._open(name)
        try:
            if os.fstat(fd).st_size < end:
                raise too_short(name, end)
            start = begin - begin % mmap.ALLOCATIONGRANULARITY
            # private and "writable": torch and numpy complain of memory that isn't
            pages = mmap.mmap(fd, end - start, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
            pages.madvise(_MADV_POPULATE_READ)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENODEV, errno.ENOMEM, errno.EACCES):
                return None  # an older kernel, or a mount that can't map
            raise
        finally:
            os.close(fd)
        return memoryview(pages)[begin - start :]

    def write(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        path = self._path(name)
        # the name carries the attempt, so nothing is there; and a link that someone put there isn't followed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            folder = missing = os.path.dirname(os.path.abspath(path))
            while not os.path.exists(missing):
                missing = os.path.dirname(missing)
                self._made.add(missing)
            os.makedirs(folder, exist_ok=True)
            fd = os.open(path, flags, 0o666)
        try:
            written = 0
            for buffer in buffers:
                pending = buffer
                while pending.nbytes:
                    done = os.pwrite(fd, pending[:_MAX_CALL_BYTES], written)
                    written += done
                    pending = pending[done:]
            assert written == size_bytes, f"{name}: planned {size_bytes} bytes, wrote {written}"
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def publish(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        temporary = f"{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            self.write(temporary, buffers, size_bytes, durable=durable)
            os.replace(self._path(temporary), self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._path(temporary))
            raise
        if durable:
            _fsync_folder(os.path.dirname(self._path(name)))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._path(name))

    def remove_empty_folders(self) -> None:
        with contextlib.suppress(OSError):
            folders = [entry.path for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)]
            for folder in [*folders, self.root]:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def exists(self, name: str) -> bool:
        return os.path.isfile(self._path(name))

    def names(self) -> list[str]:
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self.root):
                if entry.is_dir(follow_symlinks=False):
                    found += [f"{entry.name}/{inner.name}" for inner in os.scandir(entry.path)]
                else:
                    found.append(entry.name)
        return sorted(found)

    def sync(self, names: Iterable[str]) -> None:
        folders = {os.path.dirname(self._path(name)) for name in names}
        for folder in folders | self._made | {self.root}:
            _fsync_folder(folder)
        if folders:
            _fsync_folder(os.path.dirname(os.path.abspath(self.root)))


def _preadv_all(fd: int, buffers: list[Buffer], offset: int, name: str) -> None:
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        got = os.preadv(fd, pending, offset)
        if got == 0:
            raise too_short(name, offset)
        offset += got
        while pending and got >= pending[0].nbytes:
            got -= pending.pop(0).nbytes
        if got:
            pending[0] = pending[0][got:]


def _fsync_folder(path: str) -> None:
    try:
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # not everywhere can a folder be opened
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # nor synced, on some mounts; the files have been
            raise
    finally:
        os.close(fd)
