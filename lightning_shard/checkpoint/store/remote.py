"""Any place that fsspec knows.

A transient fault is tried again: reads, and files that are put in one call. What is streamed can't be: then the save
fails, and the checkpoint that was there before is still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC
from typing import Any, TypeVar

import tenacity

from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.store.protocol import (
    ANYTHING,
    Buffer,
    Reader,
    Segment,
    Stamp,
    adjacent,
    conflict,
    too_short,
)
from lightning_shard.errors import CheckpointError

Result = TypeVar("Result")

# Few long ranges: each request has a price, and some servers hash the whole object for each.
RANGE_BYTES = 32 * 2**20
REQUESTS = 8
MAX_GAP_BYTES = 256 * 2**10
"""Ranges this near each other are read as one: it costs less than another round trip."""
PUT_BYTES = 16 * 2**20
"""Files up to this size are put in one call."""
ATTEMPTS = 6
MAX_WAIT_S = 10.0

_PUT_IS_ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "obs", "cos", "webdav", "memory"}
"""Elsewhere what is put may be seen half written: there it is put under another name, and moved."""
_FINAL = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
)
_HTTP_LIBRARIES = {"aiohttp", "botocore", "aiobotocore", "httpx", "httpcore", "requests", "urllib3", "fsspec"}
_NEVER_BETTER = {"NoCredentialsError", "ParamValidationError", "InvalidURL", "NoRegionError", "UnknownServiceError"}


def is_transient(error: BaseException) -> bool:
    """Whether a call that failed so may succeed when it is made again."""
    if isinstance(error, _FINAL) or type(error).__name__ in _NEVER_BETTER:
        return False
    return isinstance(error, OSError | asyncio.TimeoutError) or _is_of_http(error)


def retried(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call until it succeeds, a fault isn't transient, or the attempts are used up; waits longer each time.

    Raises:
        OSError: What it failed with at last, also where the library's own error is none.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=MAX_WAIT_S),
        reraise=True,
    )
    try:
        return retrying(call, *args, **kwargs)
    except Exception as error:
        if isinstance(error, OSError) or not _is_of_http(error):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error


def _is_of_http(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES


class RemoteStore:
    """A directory of any fsspec filesystem."""

    is_remote = True
    step_bytes = RANGE_BYTES
    requests = REQUESTS

    def __init__(self, root: str, storage_options: dict[str, Any]) -> None:
        import fsspec

        self.root = root
        options = dict(storage_options)
        if isinstance(options.get("auth"), list):  # YAML and JSON have no tuples, which libraries for HTTP insist on
            options["auth"] = tuple(options["auth"])
        try:
            self.fs, self.base = fsspec.core.url_to_fs(root, **options)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{root} can't be opened: {error}.") from error
        protocol = self.fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._put_is_atomic = bool(protocols & _PUT_IS_ATOMIC)
        self._has_folders = not protocols & (_PUT_IS_ATOMIC - {"webdav"})
        # memory:// shows a file from its first byte; it is no place for large ones anyway
        self._put_bytes = sys.maxsize if "memory" in protocols else PUT_BYTES

    def _path(self, name: str) -> str:
        return posixpath.join(self.base, name)

    def read(self, name: str) -> bytes:
        return retried(self.fs.cat_file, self._path(name))

    def size(self, name: str) -> int:
        size = retried(self.fs.info, self._path(name))["size"]
        if size is None:
            raise CheckpointError(f"{self.root}/{name}: the store doesn't tell its size.")
        return int(size)

    def mapped(self, name: str, begin: int, end: int) -> Buffer | None:
        return None

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Reader]:
        path = self._path(name)

        def read(segments: Sequence[Segment]) -> None:
            for start, stop, joined in adjacent(segments, MAX_GAP_BYTES, RANGE_BYTES):
                if stop == start:
                    continue
                data = memoryview(retried(self.fs.cat_file, path, start=start, end=stop))
                if data.nbytes > stop - start:  # a web server that doesn't know ranges sends the file
                    data = data[start:stop]
                if data.nbytes < stop - start:
                    raise too_short(name, start + data.nbytes)
                for offset, buffer in joined:
                    buffer[:] = data[offset - start : offset - start + buffer.nbytes]

        yield read

    def write(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        path = self._path(name)
        try:
            if self._has_folders:
                retried(self.fs.makedirs, posixpath.dirname(path), exist_ok=True)
            if size_bytes <= self._put_bytes:
                data = b"".join(bytes(buffer) for buffer in buffers)  # each at once: its memory may be used again
                assert len(data) == size_bytes, f"{name}: planned {size_bytes} bytes, has {len(data)}"
                retried(self.fs.pipe_file, path, data)
            else:
                self._stream(path, buffers, size_bytes)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.root} can only be read: save to another place.") from error

    def _stream(self, path: str, buffers: Iterable[Buffer], size_bytes: int) -> None:
        file = self.fs.open(path, "wb")
        # not a with block: its exit would publish what was written before an error as if it were whole
        try:
            written = 0
            for buffer in buffers:
                file.write(bytes(buffer))
                written += buffer.nbytes
            assert written == size_bytes, f"{path}: planned {size_bytes} bytes, wrote {written}"
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            raise
        file.close()

    def stamp(self, name: str) -> Stamp | None:
        try:
            return digest(self.read(name))
        except FileNotFoundError:
            return None

    def publish(
        self,
        name: str,
        buffers: Iterable[Buffer],
        size_bytes: int,
        *,
        durable: bool,
        replaces: Stamp | None = ANYTHING,
    ) -> None:
        if replaces == ANYTHING:
            self._put(name, buffers, size_bytes, durable=durable)
            return
        data = b"".join(bytes(buffer) for buffer in buffers)
        if self.stamp(name) not in (None, replaces):
            raise conflict(self.root, name)
        self._put(name, [memoryview(data)], size_bytes, durable=durable)
        if self.stamp(name) != digest(data):
            raise conflict(self.root, name)

    def _put(self, name: str, buffers: Iterable[Buffer], size_bytes: int, *, durable: bool) -> None:
        if self._put_is_atomic:
            self.write(name, buffers, size_bytes, durable=durable)
            return
        temporary = f"{name}.tmp"
        try:
            self.write(temporary, buffers, size_bytes, durable=durable)
            self.fs.mv(self._path(temporary), self._path(name))  # once: it can't be told whether it was done
        except BaseException:
            with contextlib.suppress(Exception):
                self.fs.rm_file(self._path(temporary))
            raise

    def remove(self, name: str, *, only: Stamp = ANYTHING) -> None:
        if only != ANYTHING and self.stamp(name) not in (None, only):
            raise conflict(self.root, name)
        with contextlib.suppress(FileNotFoundError):
            retried(self.fs.rm_file, self._path(name))

    def remove_empty_folders(self) -> None:
        if not self._has_folders:
            return
        for folder in ("model", "optimizer", "trainer", ""):
            with contextlib.suppress(Exception):
                self.fs.rmdir(self._path(folder).rstrip("/"))

    def modified(self, name: str) -> float | None:
        try:
            when = retried(self.fs.modified, self._path(name))
        except NotImplementedError:
            return None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

    def exists(self, name: str) -> bool:
        try:
            return retried(self.fs.info, self._path(name))["type"] == "file"
        except FileNotFoundError:
            return False

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            base = self.fs._strip_protocol(self.base).rstrip("/")
            paths = retried(self.fs.find, self.base, maxdepth=2)
            return sorted(str(path)[len(base) :].lstrip("/") for path in paths)
        return []

    def sync(self, names: Iterable[str]) -> None:
        """A remote store is as durable as it is when a write returns."""
