"""S3 and what speaks like it: large files go up in several parts at once, in bounded memory."""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_shard.checkpoint.store.calls import MIN_BYTES_PER_S, STALL_S, answer_of
from lightning_shard.checkpoint.store.protocol import ANYTHING, Buffer, Stamp, conflict
from lightning_shard.checkpoint.store.remote import SMALL_BYTES, RemoteStore, in_parts

PART_BYTES = 8 * 2**20
PARTS_IN_FLIGHT = 4
"""With :data:`PART_BYTES`, the memory that an upload takes, plus one part that is being filled."""
_CONFIG: dict[str, Any] = {
    # our own digests cover every byte; and some servers send an object's checksum with a range of it, at which botocore
    # fails
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    # faults are met in one place, `Calls`: three of them multiply to minutes where a server is gone
    "retries": {"total_max_attempts": 1, "mode": "standard"},
    "connect_timeout": 10,
}
_MAX_PARTS = 10_000  # of one object, by S3's rules; and all but the last must have 5 MiB
_MARK = "lightning-shard-upload"
"""Metadata of a file that was uploaded in parts: which upload made it."""
_NO_CONDITIONS = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""What servers answer that don't know conditions of a put or removal."""
_JOINED_BYTES_PER_S = 64 * 2**20
"""Servers put the parts of a file together no more slowly."""

Upload = dict[str, str]
"""Names a file that is being uploaded, on any process."""


class S3Store(RemoteStore):
    """A prefix of a bucket, by s3fs."""

    _puts_streams_whole = True

    def __init__(self, root: str, storage_options: dict[str, Any]) -> None:
        import fsspec

        given = {**fsspec.config.conf.get("s3", {}), **storage_options}
        # The limit of a silence, which isn't counted while botocore waits to be told to send a body (Expect:
        # 100-continue), nor while it sends one: `Calls` has a limit for the whole of a call.
        stall_s = storage_options.get("stall_s", STALL_S)
        config = {**_CONFIG, "read_timeout": stall_s, **(given.get("config_kwargs") or {})}
        # listings are never cached, since other ranks write too
        super().__init__(root, {"use_listings_cache": False, **storage_options, "config_kwargs": config})
        self.fs.retries = 1
        self._unfinished: dict[str, list[Upload]] = {}
        """Uploads without an end, by the name of their file, as :meth:`names` found them."""

    def place(self) -> tuple[str, ...]:
        # by the client itself, which finds its endpoint in options, the environment, and files of AWS
        return self.root, str(self._calls("connect").meta.endpoint_url)

    def _stream(self, name: str, buffers: Iterable[Buffer], size_bytes: int) -> None:
        upload = self.begin_upload(name)
        try:
            tags = self.upload_parts(upload, buffers, size_bytes, part_bytes(size_bytes), first=1)
            self.complete_upload(upload, tags, size_bytes)
        except BaseException:
            self.abort_upload(upload)
            raise

    def read(self, name: str) -> bytes:
        # by one request: else s3fs asks for the size first
        return self._calls("cat_file", self._path(name), max_concurrency=1, moving_bytes=SMALL_BYTES)

    # -- one winner -----------------------------------------------------------------------------------------------

    def stamp(self, name: str) -> Stamp | None:
        try:
            return str(self._call("head_object", **self._where(name))["ETag"])
        except FileNotFoundError:
            return None

    def _put_over(self, name: str, data: bytes, replaces: Stamp | None) -> Stamp:
        stamp = self._calls.tried(lambda limit_s: self._put_if(name, data, replaces, limit_s), len(data))
        if stamp is None:
            raise OSError(errno.EIO, f"{self.root}/{name} was put, and then couldn't be looked at")
        return stamp

    def _put_if(self, name: str, data: bytes, replaces: Stamp | None, limit_s: float) -> Stamp | None:
        """Returns the stamp of what was put."""
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        put = {**self._where(name), "Body": data}
        try:
            return str(self._once("put_object", limit_s, **put, **condition)["ETag"])
        except OSError as error:
            status, code = answer_of(error)
            if code in _NO_CONDITIONS or status == 501:
                return str(self._once("put_object", limit_s, **put)["ETag"])
            if status not in (404, 412) or code == "NoSuchBucket":
                raise
            try:
                # an attempt whose answer was lost may have been carried out
                if self._calls.once("cat_file", self._path(name), max_concurrency=1, limit_s=limit_s) == data:
                    return self.stamp(name)
            except FileNotFoundError:
                if replaces is not None:  # removed since: no hindrance
                    return self._put_if(name, data, None, limit_s)
            raise conflict(self.root, name) from error

    def _where(self, name: str) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(self._path(name))
        return {"Bucket": bucket, "Key": key}

    # -- files in parts -----------------------------------------------------------------------------------------------

    def begin_upload(self, name: str) -> Upload:
        """Begin a file of which several processes put parts. Nobody sees it before it is completed."""
        where, mark = self._where(name), secrets.token_hex(8)
        metadata = {**self.fs.s3_additional_kwargs.get("Metadata", {}), _MARK: mark}
        answers_lost = 0

        def create(limit_s: float) -> str:
            nonlocal answers_lost
            answers_lost += 1
            answer = self._once("create_multipart_upload", limit_s, **where, Metadata=metadata)
            answers_lost -= 1
            return answer["UploadId"]

        try:
            number = self._calls.tried(create)
        except BaseException:
            self._abort_others(where)
            raise
        if answers_lost:  # each may have begun an upload all the same
            self._abort_others(where, but=number)
        return {**where, "UploadId": number, "Mark": mark}

    def upload_parts(
        self, upload: Upload, buffers: Iterable[Buffer], size_bytes: int, part_bytes: int, *, first: int
    ) -> list[str]:
        """Put consecutive parts, the first of them the ``first``-th of the file, and return their tags."""
        tags: list[str] = []
        running: collections.deque[Future[Any]] = collections.deque()
        pool = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="checkpoint-upload")

        def put(number: int, part: bytearray) -> str:
            where = _named(upload)
            answer = self._call("upload_part", **where, PartNumber=number, Body=part)
            return answer["ETag"]

        try:
            for number, part in enumerate(in_parts(buffers, size_bytes, part_bytes), start=first):
                if len(running) == PARTS_IN_FLIGHT:
                    tags.append(running.popleft().result())
                running.append(pool.submit(put, number, part))
            return tags + [future.result() for future in running]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # each call ends in its time

    def complete_upload(self, upload: Upload, tags: Sequence[str], size_bytes: int) -> None:
        """Make the file of all its parts, whose tags are in its order."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        answer_lost = False

        def complete(limit_s: float) -> None:
            nonlocal answer_lost
            try:
                self._once("complete_multipart_upload", limit_s, **_named(upload), MultipartUpload={"Parts": parts})
            except FileNotFoundError as error:
                # the upload is gone where an earlier call was carried out and only its answer was lost
                if not answer_lost:
                    raise
                if not self._made_by(upload, tags, limit_s):
                    raise OSError(errno.EIO, f"{upload['Key']}: the answer to its completion was lost") from error
            except Exception:
                answer_lost = True
                raise

        self._calls.tried(complete, size_bytes * MIN_BYTES_PER_S // _JOINED_BYTES_PER_S)

    def _made_by(self, upload: Upload, tags: Sequence[str], limit_s: float) -> bool:
        """Whether the file that is there now is this upload's: by its metadata, or else by S3's sum over the parts."""
        try:
            found = self._once("head_object", limit_s, Bucket=upload["Bucket"], Key=upload["Key"])
        except FileNotFoundError:
            return False
        return found.get("Metadata", {}).get(_MARK) == upload["Mark"] or found.get("ETag", "") == _tag_of_parts(tags)

    def abort_upload(self, upload: Upload) -> None:
        """Free what was put of a file; parts without an end cost money, and can't be seen."""
        with contextlib.suppress(Exception):
            self._call("abort_multipart_upload", **_named(upload))

    def _abort_others(self, where: dict[str, str], but: str = "") -> None:
        """Abort what was begun of one file. Its name is this save's alone; of what is gathered, its latest writer's."""
        with contextlib.suppress(Exception):
            for found in self._uploads(where["Bucket"], where["Key"]):
                if found["Key"] == where["Key"] and found["UploadId"] != but:
                    self.abort_upload(found)

    def _uploads(self, bucket: str, prefix: str) -> list[Upload]:
        """Uploads of files whose keys begin with ``prefix`` that were neither completed nor aborted."""
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
        """See the protocol. Files of which only some parts were put are among them: :meth:`remove` frees these."""
        names = super().names()
        bucket, key, _ = self.fs.split_path(self.base)
        prefix = f"{key.rstrip('/')}/" if key else ""
        self._unfinished = {}
        with contextlib.suppress(Exception):  # not everyone may list them
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
            self.abort_upload(upload)

    def _remove_if(self, name: str, stamp: Stamp, limit_s: float) -> None:
        try:
            self._once("delete_object", limit_s, **self._where(name), IfMatch=stamp)
        except FileNotFoundError:
            return
        except OSError as error:
            status, code = answer_of(error)
            if code in _NO_CONDITIONS or status == 501:
                self._once("delete_object", limit_s, **self._where(name))
            elif status == 412:
                raise conflict(self.root, name) from error
            else:
                raise

    def _call(self, method: str, **arguments: Any) -> Any:
        moving_bytes = len(arguments.get("Body", b""))
        return self._calls("call_s3", method, moving_bytes=moving_bytes, **arguments)

    def _once(self, method: str, limit_s: float, **arguments: Any) -> Any:
        return self._calls.once("call_s3", method, limit_s=limit_s, **arguments)


def part_bytes(size_bytes: int) -> int:
    """How long all parts of a file are, but for the last, which is shorter or as long: some stores insist on it."""
    return max(PART_BYTES, -(-size_bytes // _MAX_PARTS))


def _named(upload: Upload) -> Upload:
    return {name: upload[name] for name in ("Bucket", "Key", "UploadId")}


def _tag_of_parts(tags: Sequence[str]) -> str | None:
    """The ETag that S3 gives a file of parts of these: the MD5 of theirs; None where they are none."""
    try:
        sums = b"".join(bytes.fromhex(tag.strip('"')) for tag in tags)
    except ValueError:
        return None
    return f'"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(tags)}"'
