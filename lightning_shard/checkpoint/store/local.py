"""``LocalStore``: a store on local disk, or on any filesystem that is mounted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from lightning_shard import processors
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.store.protocol import (
    ANYTHING,
    FOLDERS,
    Buffer,
    Reader,
    Segment,
    Stamp,
    Store,
    adjacent,
    conflict,
    too_short,
)
from lightning_shard.errors import CorruptCheckpointError

READ_STEP_BYTES = 2**20
"""How much is read, and hashed while it is in a core's cache."""
WRITEBACK_BYTES = 32 * 2**20
"""After so many bytes of a file that will be synced, the disk begins to write them, so the sync waits for less."""
MAX_THREADS = 8
_IOV_MAX = 1024
_MAX_CALL_BYTES = 2**30  # Linux moves at most 2 GiB − 4 KiB per call
LOCK_WAIT_S = 10.0
"""Limit for a lock. It is held only to read and rename a file; a process that holds it longer was stopped, and may
continue later."""
_TRIES = 10
# Errors of mounts without locks, without hard links, or whose folders can't be opened or synced.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF, errno.EPERM}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV}
_NO_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_MADV_POPULATE_READ = 22  # of Linux 5.14; Python 3.11's mmap has no name for it


def thread_count() -> int:
    """The number of threads for this process."""
    return min(MAX_THREADS, processors.share())


class LocalStore(Store):
    """A directory of the local disk."""

    is_remote = False
    step_bytes = READ_STEP_BYTES

    def __init__(self, root: str) -> None:
        self.root = root
        self.folder: str = root if os.path.isabs(root) else os.path.join(os.getcwd(), root)  # whatever chdir follows
        self._made: set[str] = set()
        """Parents in which a folder was created; they need a sync."""
        self._inside: set[str] = set()
        """Folders that are known to be inside the directory, after resolving links."""

    @property
    def requests(self) -> int:
        return thread_count()

    def place(self) -> tuple[str, ...]:
        return (os.path.realpath(self.folder),)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _open(self, name: str) -> int:
        """Open a file for reading; returns its descriptor."""
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
        root = os.path.realpath(self.folder)
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
        """See the protocol. ``madvise`` populates the pages, which can fail with an error; a page fault on touching
        them would kill the process (SIGBUS) if the disk failed or the file was truncated.
        """
        if sys.platform != "linux" or end == begin:
            return None
        fd = self._open(name)
        try:
            if os.fstat(fd).st_size < end:
                raise too_short(name, end)
            start = begin - begin % mmap.ALLOCATIONGRANULARITY
            # private and writable, since torch and numpy warn about read-only memory
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
        self._check_inside(path)  # a file written through such a link couldn't be read
        # O_EXCL: the name contains the attempt, so no file has it; and a link that someone put there isn't followed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = self._create(path, flags)
        try:
            written = begun = 0
            for buffer in buffers:
                pwrite(fd, buffer, written)
                written += buffer.nbytes
                if durable and written - begun >= WRITEBACK_BYTES:
                    _begin_writeback(fd, begun, written)
                    begun = written
            assert written == size_bytes, f"{name}: planned {size_bytes} bytes, wrote {written}"
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _create(self, path: str, flags: int) -> int:
        """Create a file and its folders. Retries, since other processes may remove empty folders at any moment.

        A dangling link at the directory's path is replaced by a folder.
        """
        for _ in range(_TRIES):
            try:
                return os.open(path, flags, 0o666)
            except FileNotFoundError:
                if os.path.islink(self.folder) and not os.path.exists(self.folder):
                    with contextlib.suppress(OSError):
                        os.unlink(self.folder)
                # as written: "new/.." needs a folder "new", and after a link leads elsewhere
                folder = missing = os.path.dirname(path)
                while not os.path.exists(missing):
                    missing = os.path.dirname(missing)
                    self._made.add(missing)
                with contextlib.suppress(FileNotFoundError):
                    os.makedirs(folder, exist_ok=True)
        return os.open(path, flags, 0o666)

    def publish(
        self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool, replaces: Stamp | None = ANYTHING
    ) -> None:
        def move(temporary: str) -> None:
            self._put_in_place(temporary, name, replaces)

        self._write_beside(name, buffers, size_bytes, move, durable=durable)
        if durable:
            _fsync_folder(os.path.dirname(self._path(name)))

    def _put_in_place(self, temporary: str, name: str, replaces: Stamp | None) -> None:
        source, target = self._path(temporary), self._path(name)
        if replaces == ANYTHING:
            os.replace(source, target)
            return
        if replaces is not None:
            with self._held(name, replaces) as there:
                if there:
                    os.replace(source, target)
                    return
        try:
            os.link(source, target)
        except FileExistsError:
            if not _is_one_file(source, target):  # else NFS has asked twice, as the first answer was lost
                raise conflict(self.root, name) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(target):
                raise conflict(self.root, name) from None
            os.replace(source, target)
        with contextlib.suppress(OSError):
            os.unlink(source)

    @contextlib.contextmanager
    def _held(self, name: str, stamp: Stamp) -> Iterator[bool]:
        """Lock a file and check that it still has this stamp; yields False if there is no file.

        The lock is on the file (inode) to be replaced, not on its name: a process that waited for it then finds another
        file under the name, or none. On mounts without locks, only the check is made.
        """
        path = self._path(name)
        try:
            fd = _open_to_lock(path)
        except (FileNotFoundError, NotADirectoryError):
            yield False
            return
        try:
            if not _lock(fd):
                raise conflict(self.root, name)
            try:
                with open(fd, "rb", closefd=False) as file:
                    same = digest(file.read()) == stamp
                there = os.path.samestat(os.stat(path), os.fstat(fd))
            except FileNotFoundError:
                same = there = False
            else:
                if not (same and there):
                    raise conflict(self.root, name)
            yield there
        finally:
            os.close(fd)

    def remove(self, name: str, *, only: Stamp = ANYTHING) -> None:
        if only != ANYTHING:
            with self._held(name, only) as there:
                if there:
                    os.unlink(self._path(name))
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._path(name))

    def remove_empty_folders(self) -> None:
        for folder in (*FOLDERS, ""):
            with contextlib.suppress(OSError):
                os.rmdir(self._path(folder).rstrip("/"))

    def modified(self, name: str) -> float | None:
        return os.stat(self._path(name)).st_mtime

    def exists(self, name: str) -> bool:
        return os.path.isfile(self._path(name))

    def names(self) -> list[str]:
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self.folder):
                if entry.is_dir(follow_symlinks=False):
                    found += [f"{entry.name}/{inner.name}" for inner in os.scandir(entry.path)]
                else:
                    found.append(entry.name)
        return sorted(found)

    def sync(self, names: Iterable[str]) -> None:
        folders = {os.path.dirname(self._path(name)) for name in names}
        if not folders:
            return  # a rank that writes nothing: there may be no folder yet
        for folder in folders | self._made | {self.folder, os.path.dirname(self.folder)}:
            _fsync_folder(folder)


def _is_one_file(path: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.lstat(path), os.lstat(other))
    return False


def pwrite(fd: int, data: Buffer, at: int) -> None:
    """Write all of ``data`` at position ``at``."""
    while data.nbytes:
        done = os.pwrite(fd, data[:_MAX_CALL_BYTES], at)
        at, data = at + done, data[done:]


def _begin_writeback(fd: int, begin: int, end: int) -> None:
    """Let the kernel begin to write a part of a file to the disk, without waiting. On Linux this advice does so, and
    drops only what is on the disk already; elsewhere, and where it fails, it is the sync that writes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)


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


def _open_to_lock(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only files that are open for writing
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _lock(fd: int) -> bool:
    """Lock a file, until it is closed. False if another process holds the lock; True also on mounts without locks."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True
            raise


def _fsync_folder(path: str) -> None:
    """Sync a folder's entries, where that is possible; the files themselves have been synced.

    Raises:
        OSError: The sync failed. Not raised for mounts that can't sync folders, or a folder without read permission.
    """
    try:
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (*_NO_FOLDERS, errno.EACCES, errno.EPERM):
            return
        raise
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDERS:
            raise
    finally:
        os.close(fd)
