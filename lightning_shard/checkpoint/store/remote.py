"""``RemoteStore``: a store on any filesystem of fsspec.

Transient errors are retried in bounded time: see :mod:`~lightning_shard.checkpoint.store.calls`. A stream can't be
retried; if it breaks, the save fails, and the earlier checkpoint stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC
from typing import Any
from urllib.parse import quote

from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.store.calls import STALL_S, Calls
from lightning_shard.checkpoint.store.paths import places, redact
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
from lightning_shard.errors import CheckpointError
from lightning_shard.installed import how_to_install, lacks

# Few long ranges: each request costs money, and some servers hash the whole object for each.
RANGE_BYTES = 32 * 2**20
REQUESTS = 8
MAX_GAP_BYTES = 256 * 2**10
"""Ranges separated by no more than this are read as one, which costs less than another round trip."""
PUT_BYTES = 16 * 2**20
"""Files up to this size are put in one call."""
SMALL_BYTES = 8 * 2**20
"""The size assumed for the timeout of reading a whole file."""

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "obs", "cos", "memory"}
"""Protocols with atomic puts, and without folders or moves.

On others a put may be visible half written, so the file is put under a temporary name and then moved.
"""
_NOT_IN_STORES = re.compile("[\0-\x1f\ud800-\udfff]")  # clients and servers quote these differently
_LOCAL = {"file", "local"}
_WEBDAV = {"webdav", "dav"}
_NOT_IN_WEBDAV = re.compile(r"[%?#]|(?<=/)\.\.?(?=/|$)| (?=/|$)")
_HTTP = {"http", "https"}
_PLACES = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING", "STORAGE_EMULATOR_HOST")
"""Environment variables by which adlfs and gcsfs find their stores."""


class RemoteStore(Store):
    """A directory on any fsspec filesystem.

    Args:
        root: The directory's URL.
        storage_options: For fsspec; and ``stall_s``, the seconds after which an unanswered call counts as stalled.
    """

    is_remote = True
    folder = None
    step_bytes = RANGE_BYTES
    requests = REQUESTS
    _puts_streams_whole = False
    """Whether streams are atomic, too: visible only when complete, and never if they fail."""

    def __init__(self, root: str, storage_options: dict[str, Any]) -> None:
        import fsspec

        self.root = root
        if _NOT_IN_STORES.search(root):
            raise CheckpointError(
                f"path ({root!r}) holds a control character, or a byte that is no UTF-8, which names in stores can't:"
                " rename it."
            )
        if root.partition("://")[0] in _WEBDAV and (odd := _NOT_IN_WEBDAV.search(root.partition("://")[2])):
            raise CheckpointError(
                f"path ({root}) holds {odd[0]!r}, which WebDAV's clients and servers take for another place: choose"
                " another name."
            )
        options = dict(storage_options)
        stall_s = options.pop("stall_s", None)
        if stall_s is not None and not (isinstance(stall_s, int | float) and stall_s > 0):
            raise CheckpointError(f"stall_s ({stall_s!r}) in storage_options must be a number of seconds above 0.")
        if isinstance(options.get("auth"), list):  # HTTP libraries need a tuple, which YAML and JSON lack
            options["auth"] = tuple(options["auth"])
        if root.partition("://")[0] in _WEBDAV:
            # `Calls` alone retries; and a server may be slow with a large file
            options = {"retry": False, "timeout": stall_s or STALL_S, **options}
        if root.partition("://")[0] in _HTTP:
            import aiohttp

            # of a silent server, without a total limit
            silence_s = stall_s or STALL_S
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=silence_s, sock_read=silence_s)
            options["client_kwargs"] = {"timeout": timeout, **options.get("client_kwargs", {})}
        try:
            self.fs, self.base = fsspec.core.url_to_fs(root, **options)
        except (ImportError, ValueError, TypeError) as error:
            text = redact(f"{error}", storage_options)
            if isinstance(error, ImportError) and root.startswith("s3") and lacks("s3"):
                text += f": {how_to_install('s3')}"
            raise CheckpointError(f"{root} can't be opened: {text}.") from (error if text == f"{error}" else None)
        self._calls = Calls(self.fs, root, dict(storage_options), stall_s)
        protocol = self.fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        if "::" in root and protocols & _LOCAL:  # fsspec finds no path there, which is the working directory
            raise CheckpointError(f"path ({root}) joins the local disk to another place by '::': leave one out.")
        self._is_object_store = bool(protocols & _OBJECT_STORES)
        self._is_webdav = bool(protocols & _WEBDAV)
        self._is_http = bool(protocols & _HTTP)
        # memory:// shows a streamed file from its first byte, so it gets no streams; it isn't for large files anyway
        self._put_bytes = sys.maxsize if "memory" in protocols else PUT_BYTES

    def place(self) -> tuple[str, ...]:
        found = {name: os.environ.get(name) for name in _PLACES}
        return (self.root, *places({**found, **self.fs.storage_options}))  # including fsspec's own configuration

    def _path(self, name: str) -> str:
        """A file's path for the filesystem, quoted so that no server takes ``%2e%2e`` in a name for ``..``."""
        if self._is_http:
            name = quote(name)
        elif self._is_webdav:  # the client quotes the rest
            name = name.replace("%", "%25")
        return posixpath.join(self.base, name)

    def read(self, name: str) -> bytes:
        return self._calls("cat_file", self._path(name), moving_bytes=SMALL_BYTES)

    def size(self, name: str) -> int:
        return self._size(name, self._calls("info", self._path(name)))

    def _size(self, name: str, info: dict[str, Any]) -> int:
        if info["size"] is None:
            raise CheckpointError(f"{self.root}/{name}: the store doesn't tell its size.")
        return int(info["size"])

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        def read(segments: Sequence[Segment]) -> None:
            for start, stop, joined in adjacent(segments, MAX_GAP_BYTES, RANGE_BYTES):
                if stop == start:
                    continue
                data = self._range(name, start, stop)
                for offset, buffer in joined:
                    buffer[:] = data[offset - start : offset - start + buffer.nbytes]

        yield read

    def _range(self, name: str, start: int, stop: int) -> Buffer:
        path = self._path(name)

        def fetch(limit_s: float) -> Buffer:
            data = memoryview(self._calls.once("cat_file", path, start=start, end=stop, limit_s=limit_s))
            if data.nbytes > stop - start:  # a web server without range requests sends the whole file
                data = data[start:stop]
            if data.nbytes < stop - start:
                if self._size(name, self._calls.once("info", path, limit_s=limit_s)) < stop:
                    raise too_short(name, start + data.nbytes)
                raise OSError(errno.EIO, f"{name}: {data.nbytes} bytes came where {stop - start} were asked for")
            return data

        return self._calls.tried(fetch, stop - start)

    def write(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        path = self._path(name)
        try:
            if not self._is_object_store:
                self._calls("makedirs", posixpath.dirname(path), exist_ok=True)
            if size_bytes <= self._put_bytes:
                data = b"".join(bytes(buffer) for buffer in buffers)  # copied now: buffers are reused
                assert len(data) == size_bytes, f"{name}: planned {size_bytes} bytes, has {len(data)}"
                self._calls("pipe_file", path, data, moving_bytes=size_bytes)
            else:
                self._stream(name, buffers, size_bytes)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.root} can only be read: save to another place.") from error

    def _stream(self, name: str, buffers: Iterable[Buffer], size_bytes: int) -> None:
        calls = self._calls
        file = calls.part(self.fs.open, self._path(name), "wb", moving_bytes=0)
        # no with block: after an error its exit would publish a truncated file
        try:
            for part in in_parts(buffers, size_bytes, PUT_BYTES):
                calls.part(file.write, bytes(part), moving_bytes=len(part))
        except BaseException:
            with contextlib.suppress(Exception):
                calls.part(file.discard, moving_bytes=0)
            # some filesystems' discard does nothing, and garbage collection would complete the truncated file
            with contextlib.suppress(Exception):
                file.closed = True
            raise
        calls.part(file.close, moving_bytes=size_bytes)

    def stamp(self, name: str) -> Stamp | None:
        cached: Any = sys.modules.get("fsspec.implementations.cached")
        if cached is not None and isinstance(self.fs, cached.CachingFileSystem):  # simplecache:: and filecache::
            # a save that looks after its commit would see the old manifest, and remove the files of the new one
            raise CheckpointError(
                f"{self.root} goes through a cache, which shows files as they were when they were first read:"
                f" {self.root.partition('::')[2]} can be saved to, and be removed from."
            )
        return super().stamp(name)

    def publish(
        self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool, replaces: Stamp | None = ANYTHING
    ) -> None:
        if replaces == ANYTHING:
            self._put(name, buffers, size_bytes, durable=durable)
            return
        data = b"".join(bytes(buffer) for buffer in buffers)
        assert len(data) == size_bytes, f"{name}: planned {size_bytes} bytes, has {len(data)}"
        # Check before and after: many stores have no conditional puts, and some servers silently ignore the condition.
        if self.stamp(name) not in (None, replaces):
            raise conflict(self.root, name)
        self._look_after(name, data, self._put_over(name, data, replaces))

    def _put_over(self, name: str, data: bytes, replaces: Stamp | None) -> Stamp:
        """Put a file over ``replaces``, conditionally if the store supports that; returns the new stamp."""
        self._put(name, [memoryview(data)], len(data), durable=True)
        return digest(data)

    def _put(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        if self._is_object_store and (size_bytes <= self._put_bytes or self._puts_streams_whole):
            self.write(name, buffers, size_bytes, durable=durable)
            return

        def move(temporary: str) -> None:
            self._move(temporary, name, size_bytes)

        self._write_beside(name, buffers, size_bytes, move, durable=durable)

    def _move(self, name: str, to: str, size_bytes: int) -> None:
        """Move a file, perhaps over another one. A truncated file is never visible at the target."""
        source, target = self._path(name), self._path(to)
        calls = self._calls
        tried = False

        def move(limit_s: float) -> None:
            nonlocal tried
            if tried and not self.exists(name) and self.exists(to):
                return  # an earlier call succeeded, and its answer was lost
            tried = True
            if self._is_webdav:  # fsspec's layer would copy, and a copy may be visible half written
                calls.bounded(self.fs.client.move, source, target, overwrite=True, limit_s=limit_s)
            elif not self._is_object_store:
                calls.once("mv", source, target, limit_s=limit_s)
            else:
                calls.once("cp_file", source, target, limit_s=limit_s)
                # some stores answer before the copy is complete, and abandon it when the source is removed
                if self._size(to, calls.once("info", target, limit_s=limit_s)) != size_bytes:
                    raise OSError(errno.EIO, f"{to} is not copied yet")
                calls.once("cat_file", target, start=size_bytes - 1, end=size_bytes, limit_s=limit_s)

        calls.tried(move, size_bytes)
        if self._is_object_store:
            self.remove(name)

    def _look_after(self, name: str, data: bytes, put: Stamp) -> None:
        """Check that the file that was put is there.

        A missing file is no conflict, since the check itself may be wrong, and after a conflict the files that the
        manifest names are removed. A different stamp isn't one either, until the bytes have been compared: some servers
        report other ETags later than at the put.
        """
        if self.stamp(name) == put:
            return
        try:
            there = self.read(name)
        except FileNotFoundError as error:
            lost = f"{self.root}/{name} was put and isn't there: it may have been removed since"
            raise OSError(errno.EIO, lost) from error
        if there != data:
            raise conflict(self.root, name)

    def remove(self, name: str, *, only: Stamp = ANYTHING) -> None:
        if only != ANYTHING and self.stamp(name) not in (None, only):
            raise conflict(self.root, name)
        with contextlib.suppress(FileNotFoundError):
            self._calls("rm_file", self._path(name))

    def remove_empty_folders(self) -> None:
        if self._is_object_store:
            return
        for folder in (*FOLDERS, ""):
            with contextlib.suppress(Exception):
                self._calls("rmdir", self._path(folder).rstrip("/"))

    def modified(self, name: str) -> float | None:
        try:
            when = self._calls("modified", self._path(name))
        except NotImplementedError:
            return None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

    def exists(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._calls("info", self._path(name))["type"] == "file"
        return False

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            base = self.fs._strip_protocol(self.base).rstrip("/")
            paths = self._calls("find", self.base, maxdepth=2)
            return sorted(str(path)[len(base) :].lstrip("/") for path in paths)
        return []


def in_parts(buffers: Iterable[Buffer], size_bytes: int, part_bytes: int) -> Iterator[bytearray]:
    """Regroup buffers into parts of ``part_bytes`` (the last one shorter). Each part has its own memory."""
    left = size_bytes
    part = bytearray(min(part_bytes, left))
    filled = 0
    for buffer in buffers:
        rest = buffer
        while rest.nbytes:
            taken = min(rest.nbytes, len(part) - filled)
            assert taken, f"planned {size_bytes} bytes, and there are more"
            part[filled : filled + taken] = rest[:taken]
            filled += taken
            rest = rest[taken:]
            if filled == len(part):
                yield part
                left -= filled
                part, filled = bytearray(min(part_bytes, left)), 0
    assert left == 0, f"planned {size_bytes} bytes, and {left} are missing"
