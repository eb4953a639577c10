"""Filesystem calls with timeouts, and with retries of transient errors.

Everything that goes through a network goes through :class:`Calls`. So no wait is unbounded, and an error is an OSError
with a clear text, without secrets from ``storage_options``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import tenacity

from lightning_shard.checkpoint.store.paths import as_text, redact
from lightning_shard.errors import CheckpointError

Result = TypeVar("Result")

STALL_S = 60.0
"""Timeout of one attempt without an answer; ``storage_options={"stall_s": …}`` overrides it."""
STALLS = 3
"""All attempts of a call together may take so many times the timeout."""
MIN_BYTES_PER_S = 128 * 2**10
"""Slowest accepted transfer: a call's timeout grows by its bytes at this rate."""
ATTEMPTS = 8
MAX_WAIT_S = 10.0
"""Longest wait between two attempts; waits are random, so that ranks don't retry all at once."""
LAST_S = 10.0
"""After a call was given up, later calls, which clean up, get one attempt each with this timeout."""

_LOOKS = {"ls", "find", "info", "modified"}
"""Calls that filesystems may answer from cached listings, which are invalidated first: other ranks and programs write,
too."""

_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, ValueError)
_FINAL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_FINAL_ERRNOS |= {errno.ENAMETOOLONG, errno.ENOSYS, errno.ELOOP}
_PASSING_STATUS = {408, 423, 425, 429}
_FINAL_STATUS = {501, 505, 507}
_PASSING_CODES = {
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "XAmzContentSHA256Mismatch",
}
"""S3's codes of transient errors, some of which come with status 400."""
_PASSING_KINDS = {
    "HTTPClientError",  # botocore: cut and timed out connections
    "ConnectionError",  # refused and reset ones
    "IncompleteReadError",
    "ResponseStreamingError",
    "ResponseParserError",
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "TransportError",  # httpx
    "ProtocolError",  # urllib3
    "ServiceRequestError",  # azure
    "ServiceResponseError",
    "BadGatewayError",  # webdav4
    "ResourceLocked",
    "SSHException",  # paramiko
}
"""Class names of transient errors (base classes suffice) in libraries that aren't imported here."""


def is_transient(error: BaseException) -> bool:
    """Whether a call that failed with ``error`` may succeed when retried."""
    if not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return False
    status, code = answer_of(error)
    if code in _PASSING_CODES:
        return True
    if status is not None:
        return status in _PASSING_STATUS or (status >= 500 and status not in _FINAL_STATUS)
    if isinstance(error, _FINAL):
        return False
    if isinstance(error, OSError):
        return error.errno not in _FINAL_ERRNOS
    return any(kind.__name__ in _PASSING_KINDS for kind in type(error).__mro__)


def answer_of(error: BaseException | None) -> tuple[int | None, str]:
    """The HTTP status and S3's error code in the server's answer that caused an error, if there was one."""
    # s3fs raises an OSError from botocore's error
    for part in (error, error.__cause__) if isinstance(error, OSError) else (error,):
        response = getattr(part, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(response.get("Error", {}).get("Code", ""))
        # aiohttp; webdav4 and azure; httpx; gcsfs
        for source, name in ((part, "status"), (part, "status_code"), (response, "status_code"), (part, "code")):
            status = getattr(source, name, None)
            if isinstance(status, int):
                return int(status), ""
    return None, ""


class Calls:
    """Makes the calls of one fsspec filesystem, for one store.

    Args:
        fs: The filesystem.
        place: Its name in errors.
        options: Its storage options, whose secrets are redacted in errors.
        stall_s: The timeout of one attempt in seconds; see :data:`STALL_S`.
    """

    def __init__(
        self, fs: Any, place: str, options: Mapping[str, Any] | None = None, stall_s: float | None = None
    ) -> None:
        self.fs = fs
        self._place = place
        self._options = options or {}
        self._stall_s = STALL_S if stall_s is None else stall_s
        self._given_up = threading.Event()

    def __call__(self, method: str, *args: Any, moving_bytes: float = 0, **kwargs: Any) -> Any:
        """Call a method of the filesystem; retry until it succeeds, fails permanently, or runs out of time.

        Raises:
            OSError: The last error; converted to an OSError if the library's own error is none.
        """
        return self.tried(lambda limit_s: self.once(method, *args, limit_s=limit_s, **kwargs), moving_bytes)

    def tried(self, attempt: Callable[[float], Result], moving_bytes: float = 0) -> Result:
        """Retry an operation of several calls; ``attempt(limit_s)`` gets the timeout of each call in seconds."""
        slack_s = moving_bytes / MIN_BYTES_PER_S
        limit_s = (min(LAST_S, self._stall_s) if self._given_up.is_set() else self._stall_s) + slack_s
        deadline_s = STALLS * self._stall_s + slack_s
        begun = time.monotonic()

        def attempt_in_time() -> Result:
            left_s = begun + deadline_s - time.monotonic()
            return attempt(max(min(limit_s, left_s), 0.1))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_transient),
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(ATTEMPTS),
                tenacity.stop_before_delay(deadline_s),
                tenacity.stop_when_event_set(self._given_up),
            ),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=MAX_WAIT_S),
            reraise=True,
        )
        with self._clearly():
            try:
                result = retrying(attempt_in_time)
            except Exception as error:
                if is_transient(error):
                    self._given_up.set()
                raise
        self._given_up.clear()
        return result

    def once(self, method: str, *args: Any, limit_s: float, **kwargs: Any) -> Any:
        """Call a method of the filesystem once, with a timeout."""
        if method in _LOOKS:
            self.fs.invalidate_cache()
        native = getattr(self.fs, f"_{method}", None)
        try:
            if self.fs.async_impl and asyncio.iscoroutinefunction(native):
                return self._on_loop(native, *args, limit_s=limit_s, **kwargs)
            return self.bounded(getattr(self.fs, method), *args, limit_s=limit_s, **kwargs)
        except FileNotFoundError as error:
            # fsspec's HTTP filesystem raises FileNotFoundError for any answer of the server
            status = answer_of(error.__cause__)[0]
            if status not in (None, 404, 410) and isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise

    def _on_loop(self, call: Callable[..., Any], *args: Any, limit_s: float, **kwargs: Any) -> Any:
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        cause: BaseException | None
        try:
            return sync(self.fs.loop, call, *args, timeout=limit_s, **kwargs)
        except FSTimeoutError as error:
            cause = error.__cause__
        if cause is not None and cause.args:  # an error of the library itself, or of the server
            raise cause from None  # not in the handler, where its context would be the error that it caused
        raise self._stalled(call.__name__.lstrip("_"), limit_s)

    def bounded(self, call: Callable[..., Result], *args: Any, limit_s: float, **kwargs: Any) -> Result:
        """Call a function on its own thread, and wait for it with a timeout."""
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(call(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)

        # not from a pool: at exit the interpreter waits for pools' threads
        threading.Thread(target=run, name="checkpoint-store", daemon=True).start()
        try:
            return done.result(limit_s)
        except TimeoutError:
            if done.done():
                raise
            raise self._stalled(getattr(call, "__name__", "a call"), limit_s) from None

    def part(self, call: Callable[..., Result], *args: Any, moving_bytes: float) -> Result:
        """Call a function that can't be retried, such as a write to an open file."""
        with self._clearly():
            return self.bounded(call, *args, limit_s=self._stall_s + moving_bytes / MIN_BYTES_PER_S)

    def _stalled(self, what: str, limit_s: float) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, f"{self._place} doesn't answer: {what} took more than {limit_s:.3g} s")

    @contextlib.contextmanager
    def _clearly(self) -> Iterator[None]:
        """Convert errors to OSError and redact secrets; Python's own errors, such as TypeError, keep their type."""
        try:
            yield
        except Exception as error:
            chain = "".join(_texts(error))
            tells = redact(chain, self._options) != chain
            ours = isinstance(error, OSError | CheckpointError)
            of_python = type(error).__module__.partition(".")[0] in ("builtins", "lightning_shard")
            if not tells and (ours or of_python):
                raise
            kind = next((kind for kind in _FINAL if isinstance(error, kind) and issubclass(kind, OSError)), OSError)
            text = redact(f"{error}" if ours else f"{type(error).__name__}: {error}", self._options)
            raise kind(text) from (None if tells else error)


@contextlib.contextmanager
def told_as(what: str) -> Iterator[None]:
    """Raise a CheckpointError whose text begins with ``what`` in place of an OSError that isn't our own."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}.") from error


def naming(path: str | os.PathLike[str], what: str = "looked up") -> AbstractContextManager[None]:
    """:func:`told_as`, for a look at a path."""
    return told_as(f"{as_text(path):.200} can't be {what}")


def _texts(error: BaseException | None) -> Iterator[str]:
    seen: set[int] = set()  # a library may raise an error from its own consequence, in a cycle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield f"{error}"
        error = error.__cause__ or error.__context__
