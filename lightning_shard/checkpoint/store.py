"""The few verbs that a checkpoint needs of the place it lies in. Everything else is written on top of these.

A store is rooted at one checkpoint's directory; names in it are relative, with ``/``. Paths are ``str`` throughout:
``pathlib`` turns ``s3://a/b`` into ``s3:/a/b``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from lightning_shard.errors import CheckpointError, CorruptCheckpointError

Buffer = memoryview
Segment = tuple[int, Buffer]
"""Where in the file, in bytes, and the memory to fill from there."""

_IOV_MAX = 1024
_MAX_CALL_BYTES = 2**30  # Linux moves at most 2 GiB − 4 KiB per call


class Store(Protocol):
    """One directory of files. Errors of the underlying system pass through, except as said."""

    root: str

    def read(self, name: str) -> bytes:
        """A whole small file. Raises FileNotFoundError."""

    def size(self, name: str) -> int:
        """In bytes. Raises FileNotFoundError."""

    def read_into(self, name: str, segments: Sequence[Segment]) -> None:
        """Fill every segment, which are in ascending order. Raises CorruptCheckpointError if the file is too short."""

    def write(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        """Write a new file from buffers, each of which may be reused once the next one is asked for."""

    def publish(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        """The same, replacing a file at once: readers see the old bytes or all of the new ones, never a mixture."""

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""

    def remove_empty_folders(self) -> None:
        """Remove the folder and those in it, as far as they are empty; nothing on stores that have no folders."""

    def exists(self, name: str) -> bool: ...

    def names(self) -> list[str]:
        """All files in the directory and one level below, to find leftovers; never to find data."""

    def sync(self, names: Iterable[str]) -> None:
        """Make the folder entries of these files survive a crash of the machine."""


def open_store(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> Store:
    """The store for a directory: local disk, or whatever fsspec has for the path's protocol."""
    root = as_path(path)
    scheme = root.partition("://")[0] if "://" in root else ""
    if scheme in ("", "file", "local") and "::" not in root:
        return LocalStore(root.partition("://")[2] if scheme else root)
    return FsspecStore(root, storage_options or {})


def as_path(path: str | os.PathLike[str]) -> str:
    """A path as text, without a trailing slash, and without the manifest's name if it is the manifest's own path."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise CheckpointError(f"path ({path!r}) must be a str or a path that gives one.")
    if not text:
        raise CheckpointError("path is empty: name the checkpoint's directory.")
    head, _, tail = text.rpartition("/")
    if tail == "manifest.json":
        text = head or ("/" if text.startswith("/") else ".")
    return text.rstrip("/") or "/"


class LocalStore:
    """A directory of the local disk, or of anything that is mounted like one."""

    def __init__(self, root: str) -> None:
        self.root = root

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def read(self, name: str) -> bytes:
        with open(self._path(name), "rb") as file:
            return file.read()

    def size(self, name: str) -> int:
        return os.stat(self._path(name)).st_size

    def read_into(self, name: str, segments: Sequence[Segment]) -> None:
        fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, buffers in _adjacent(segments):
                _preadv_all(fd, buffers, offset, name)
        finally:
            os.close(fd)

    def write(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        path = self._path(name)
        # the name carries the attempt, so nothing is there; and a link that someone put there isn't followed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            fd = os.open(path, flags, 0o666)
        try:
            written = 0
            for buffer in buffers:
                written += _pwrite_all(fd, buffer, written)
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
        with contextlib.suppress(FileNotFoundError):
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
        for folder in folders | {self.root}:
            _fsync_folder(folder)
        if folders:
            _fsync_folder(os.path.dirname(os.path.abspath(self.root)))


class FsspecStore:
    """A directory of any fsspec filesystem."""

    def __init__(self, root: str, storage_options: dict[str, Any]) -> None:
        import fsspec

        self.root = root
        self.fs, self._base = fsspec.core.url_to_fs(root, **_with_defaults(root, storage_options))

    def _path(self, name: str) -> str:
        return posixpath.join(self._base, name)

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(self._path(name))

    def size(self, name: str) -> int:
        size = self.fs.info(self._path(name))["size"]
        if size is None:
            raise CheckpointError(f"{self.root}/{name}: the store doesn't tell its size.")
        return int(size)

    def read_into(self, name: str, segments: Sequence[Segment]) -> None:
        spans = list(_adjacent(segments))
        starts = [offset for offset, _ in spans]
        stops = [offset + sum(len(buffer) for buffer in buffers) for offset, buffers in spans]
        path = self._path(name)
        parts = self.fs.cat_ranges([path] * len(spans), starts, stops, on_error="raise")
        for (offset, buffers), part in zip(spans, parts, strict=True):
            rest = memoryview(part)
            for buffer in buffers:
                if len(rest) < len(buffer):
                    raise _too_short(name, offset + len(part))
                buffer[:] = rest[: len(buffer)]
                rest = rest[len(buffer) :]

    def write(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        path = self._path(name)
        self.fs.makedirs(posixpath.dirname(path), exist_ok=True)
        file = self.fs.open(path, "wb")
        # not a with block: its exit would publish what was written before an error as if it were whole
        try:
            written = 0
            for buffer in buffers:
                file.write(bytes(buffer) if buffer.nbytes < 2**16 else buffer)
                written += buffer.nbytes
            assert written == size_bytes, f"{name}: planned {size_bytes} bytes, wrote {written}"
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            raise
        file.close()

    def publish(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        # an object appears when its upload is complete
        self.write(name, buffers, size_bytes, durable=durable)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def remove_empty_folders(self) -> None:
        for folder in [*{name.rpartition("/")[0] for name in ("model/", "optimizer/", "trainer/")}, ""]:
            with contextlib.suppress(Exception):
                self.fs.rmdir(self._path(folder).rstrip("/"))

    def exists(self, name: str) -> bool:
        return bool(self.fs.exists(self._path(name)))

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            base = self.fs._strip_protocol(self._base).rstrip("/")
            paths = self.fs.find(self._base, maxdepth=2)
            return sorted(str(path)[len(base) :].lstrip("/") for path in paths)
        return []

    def sync(self, names: Iterable[str]) -> None:
        """Object stores are durable when a write returns."""


def _with_defaults(root: str, options: dict[str, Any]) -> dict[str, Any]:
    """Listings are never cached, since other ranks write too; what came from YAML or JSON gets the types asked for."""
    options = dict(options)
    if isinstance(options.get("auth"), list):
        options["auth"] = tuple(options["auth"])
    if root.startswith(("s3://", "s3a://")):
        # Our own digests cover every byte. Servers that are not AWS send an object's checksum with a range of it, at
        # which botocore fails.
        options.setdefault("use_listings_cache", False)
        config = dict(options.get("config_kwargs") or {})
        config.setdefault("request_checksum_calculation", "when_required")
        config.setdefault("response_checksum_validation", "when_required")
        options["config_kwargs"] = config
    return options


def _adjacent(segments: Sequence[Segment]) -> Iterable[tuple[int, list[Buffer]]]:
    """Segments that follow on one another, joined: (offset, buffers)."""
    start, end, joined = 0, -1, list[Buffer]()
    for offset, buffer in segments:
        if offset != end or len(joined) >= _IOV_MAX:
            if joined:
                yield start, joined
            start, end, joined = offset, offset, []
        joined.append(buffer)
        end += buffer.nbytes
    if joined:
        yield start, joined


def _preadv_all(fd: int, buffers: list[Buffer], offset: int, name: str) -> None:
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        got = os.preadv(fd, pending, offset)
        if got == 0:
            raise _too_short(name, offset)
        offset += got
        while pending and got >= pending[0].nbytes:
            got -= pending.pop(0).nbytes
        if got:
            pending[0] = pending[0][got:]


def _pwrite_all(fd: int, buffer: Buffer, offset: int) -> int:
    total = buffer.nbytes
    while buffer.nbytes:
        done = os.pwrite(fd, buffer[:_MAX_CALL_BYTES], offset)
        offset += done
        buffer = buffer[done:]
    return total


def _too_short(name: str, at: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{name} is truncated: the manifest refers to bytes beyond its end at {at:,}. Use another checkpoint."
    )


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
