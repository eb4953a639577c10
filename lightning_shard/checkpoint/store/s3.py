"""``S3Store``: S3 and compatible servers, with conditional puts, and multipart uploads in bounded memory."""

from __future__ import annotations

import collections
import contextlib
import errno
import secrets
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_shard.checkpoint.store.calls import MIN_BYTES_PER_S, STALL_S, answer_of
from lightning_shard.checkpoint.store.protocol import ANYTHING, Buffer, Stamp, conflict
from lightning_shard.checkpoint.store.remote import SMALL_BYTES, RemoteStore, in_parts
from lightning_shard.errors import CheckpointError

PART_BYTES = 8 * 2**20
PARTS_IN_FLIGHT = 4
"""Times :data:`PART_BYTES`, the memory that an upload takes, plus one part that is being filled."""
_CONFIG: dict[str, Any] = {
    # our own digests cover every byte; and some servers send a whole object's checksum with a range, so botocore fails
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    # `Calls` alone retries: three layers of retries multiply to minutes when a server is gone
    "retries": {"total_max_attempts": 1, "mode": "standard"},
    "connect_timeout": 10,
}
_MAX_PARTS = 10_000  # S3's limit per object; all parts but the last must have at least 5 MiB
_MARK = "lightning-shard-upload"
"""Metadata key of a multipart file: identifies the upload that made it."""
_NO_CONDITIONS = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Error codes of servers that don't support conditional puts or deletes."""
_JOINED_BYTES_PER_S = 64 * 2**20
"""Slowest accepted rate at which a server joins the parts of a file."""
Upload = dict[str, str]
"""An upload's ``Bucket``, ``Key`` and ``UploadId``; of a found one also when it was ``Initiated``."""


class S3Store(RemoteStore):
    """A prefix in a bucket, accessed through s3fs."""

    _puts_streams_whole = True

    def __init__(self, root: str, storage_options: dict[str, Any]) -> None:
        import fsspec

        if "?versionId=" in root:  # s3fs cuts it off, with all names behind it
            raise CheckpointError(
                f"path ({root}) names a version of an object, and a checkpoint is many: leave it out."
            )
        given = {**fsspec.config.conf.get("s3", {}), **storage_options}
        # Limits only silence, and not while botocore waits for permission to send a body (Expect: 100-continue) or
        # sends one; `Calls` limits the whole call.
        stall_s = storage_options.get("stall_s", STALL_S)
        config = {**_CONFIG, "read_timeout": stall_s, **(given.get("config_kwargs") or {})}
        # no listing cache, since other ranks write, too
        super().__init__(root, {"use_listings_cache": False, **storage_options, "config_kwargs": config})
        self.fs.retries = 1
        self._unfinished: dict[str, list[Upload]] = {}
        """Unfinished uploads that :meth:`names` has found, by file name."""

    def place(self) -> tuple[str, ...]:
        # the client itself finds its endpoint, in options, the environment, and AWS's files
        return self.root, str(self._calls("connect").meta.endpoint_url)

    def read(self, name: str) -> bytes:
        # one request: otherwise s3fs asks for the size first
        return self._calls("cat_file", self._path(name), max_concurrency=1, moving_bytes=SMALL_BYTES)

    # -- conditional puts -----------------------------------------------------------------------------------------

    def stamp(self, name: str) -> Stamp | None:
        with contextlib.suppress(FileNotFoundError):
            return str(self._call("head_object", **self._where(name))["ETag"])
        return None

    def _put_over(self, name: str, data: bytes, replaces: Stamp | None) -> Stamp:
        stamp = self._calls.tried(lambda limit_s: self._put_if(name, data, replaces, limit_s), len(data))
        if stamp is None:
            raise OSError(errno.EIO, f"{self.root}/{name} was put, and then couldn't be looked at")
        return stamp

    def _put_if(self, name: str, data: bytes, replaces: Stamp | None, limit_s: float) -> Stamp | None:
        """One attempt of a conditional put; returns the new stamp."""
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        put = {**self._where(name), "Body": data}
        try:
            return str(self._once_if("put_object", condition, limit_s, **put)["ETag"])
        except OSError as error:
            status, code = answer_of(error)
            if status not in (404, 412) or code == "NoSuchBucket":
                raise
            try:
                # an earlier attempt, whose answer was lost, may have succeeded
                if self._calls.once("cat_file", self._path(name), max_concurrency=1, limit_s=limit_s) == data:
                    return self.stamp(name)
            except FileNotFoundError:
                if replaces is not None:  # removed since, which is allowed
                    return self._put_if(name, data, None, limit_s)
            raise conflict(self.root, name) from error

    def _once_if(self, method: str, condition: dict[str, str], limit_s: float, **arguments: Any) -> Any:
        """One call, conditional if the server supports that."""
        try:
            return self._once(method, limit_s, **arguments, **condition)
        except OSError as error:
            status, code = answer_of(error)
            if code not in _NO_CONDITIONS and status != 501:
                raise
        return self._once(method, limit_s, **arguments)

    def _where(self, name: str) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(self._path(name))
        return {"Bucket": bucket, "Key": key}

    # -- multipart uploads --------------------------------------------------------------------------------------------

    def _stream(self, name: str, buffers: Iterable[Buffer], size_bytes: int) -> None:
        """Put a file in parts. It is invisible until the upload is completed. An upload whose id was lost with the
        answer stays unfinished; those of saves are removed as leftovers."""
        part_bytes = max(PART_BYTES, -(-size_bytes // _MAX_PARTS))  # equal ones, since some stores insist on that
        where, mark = self._where(name), secrets.token_hex(8)
        metadata = {**self.fs.s3_additional_kwargs.get("Metadata", {}), _MARK: mark}
        upload = {**where, "UploadId": self._call("create_multipart_upload", **where, Metadata=metadata)["UploadId"]}
        try:
            tags = self._put_parts(upload, in_parts(buffers, size_bytes, part_bytes))
            self._complete(upload, mark, tags, size_bytes)
        except BaseException:
            self._abort(upload)
            raise

    def _put_parts(self, upload: Upload, parts: Iterable[bytearray]) -> list[str]:
        """Put the parts; returns their ETags."""
        tags: list[str] = []
        running: collections.deque[Future[Any]] = collections.deque()
        pool = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="checkpoint-upload")
        try:
            for number, part in enumerate(parts, start=1):
                if len(running) == PARTS_IN_FLIGHT:
                    tags.append(running.popleft().result()["ETag"])
                running.append(pool.submit(self._call, "upload_part", **upload, PartNumber=number, Body=part))
            return tags + [future.result()["ETag"] for future in running]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # bounded, since each call has a timeout

    def _complete(self, upload: Upload, mark: str, tags: list[str], size_bytes: int) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        answer_lost = False

        def complete(limit_s: float) -> None:
            nonlocal answer_lost
            try:
                self._once("complete_multipart_upload", limit_s, **upload, MultipartUpload={"Parts": parts})
            except FileNotFoundError as error:
                # the upload is gone if an earlier call succeeded and only its answer was lost
                if not answer_lost:
                    raise
                if self._mark_of(upload, limit_s) != mark:
                    raise OSError(errno.EIO, f"{upload['Key']}: the answer to its completion was lost") from error
            except Exception:
                answer_lost = True
                raise

        self._calls.tried(complete, size_bytes * MIN_BYTES_PER_S // _JOINED_BYTES_PER_S)

    def _mark_of(self, upload: Upload, limit_s: float) -> str | None:
        """The mark of the upload that made the current file."""
        with contextlib.suppress(FileNotFoundError):
            found = self._once("head_object", limit_s, Bucket=upload["Bucket"], Key=upload["Key"])
            return found.get("Metadata", {}).get(_MARK)
        return None

    def _abort(self, upload: Upload) -> None:
        """Free the parts of an unfinished upload, which cost money and are invisible."""
        with contextlib.suppress(Exception):
            self._call("abort_multipart_upload", **{name: upload[name] for name in ("Bucket", "Key", "UploadId")})

    def _uploads(self, bucket: str, prefix: str) -> list[Upload]:
        """Unfinished uploads (neither completed nor aborted) of files whose keys begin with ``prefix``."""
        found: list[Upload] = []
        more: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
            for each in page.get("Uploads", ()):
                upload = {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
                found.append({**upload, "Initiated": str(each["Initiated"].timestamp())})
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    # -- leftovers ----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """See the protocol. Includes the files of unfinished uploads, whose parts :meth:`remove` frees."""
        names = super().names()
        bucket, key, _ = self.fs.split_path(self.base)
        prefix = f"{key.rstrip('/')}/" if key else ""
        self._unfinished = {}
        with contextlib.suppress(Exception):  # listing them needs a permission of its own
            for upload in self._uploads(bucket, prefix):
                self._unfinished.setdefault(upload["Key"][len(prefix) :], []).append(upload)
        return sorted({*names, *(name for name in self._unfinished if name.count("/") <= 1)})

    def modified(self, name: str) -> float | None:
        try:
            return super().modified(name)
        except FileNotFoundError:
            if name not in self._unfinished:
                raise
            return max(float(upload["Initiated"]) for upload in self._unfinished[name])

    def remove(self, name: str, *, only: Stamp = ANYTHING) -> None:
        if only == ANYTHING:
            super().remove(name)
        elif self.stamp(name) not in (None, only):
            raise conflict(self.root, name)
        else:
            self._calls.tried(lambda limit_s: self._remove_if(name, only, limit_s))
        for upload in self._unfinished.pop(name, ()):
            self._abort(upload)

    def _remove_if(self, name: str, stamp: Stamp, limit_s: float) -> None:
        try:
            self._once_if("delete_object", {"IfMatch": stamp}, limit_s, **self._where(name))
        except FileNotFoundError:
            return
        except OSError as error:
            if answer_of(error)[0] == 412:
                raise conflict(self.root, name) from error
            raise

    def _call(self, method: str, **arguments: Any) -> Any:
        moving_bytes = len(arguments.get("Body", b""))
        return self._calls("call_s3", method, moving_bytes=moving_bytes, **arguments)

    def _once(self, method: str, limit_s: float, **arguments: Any) -> Any:
        return self._calls.once("call_s3", method, limit_s=limit_s, **arguments)
