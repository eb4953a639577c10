"""S3 and what speaks like it: large files go up in several parts at once, in bounded memory."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_shard.checkpoint.store.protocol import Buffer
from lightning_shard.checkpoint.store.remote import RemoteStore, retried

PART_BYTES = 8 * 2**20
PARTS_IN_FLIGHT = 4
"""With :data:`PART_BYTES`, the memory that an upload takes, plus one part that is being filled."""
_CONFIG: dict[str, Any] = {
    # our own digests cover every byte; and some servers send an object's checksum with a range of it, at which botocore
    # fails
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    # faults are met in one place, `retried`: three of them multiply to minutes where a server is gone
    "retries": {"total_max_attempts": 1, "mode": "standard"},
    "connect_timeout": 10,
}
_MAX_PARTS = 10_000  # of one object, by S3's rules


class S3Store(RemoteStore):
    """A prefix of a bucket, by s3fs."""

    def __init__(self, root: str, storage_options: dict[str, Any]) -> None:
        import fsspec

        given = {**fsspec.config.conf.get("s3", {}), **storage_options}
        config = {**_CONFIG, **(given.get("config_kwargs") or {})}
        # listings are never cached, since other ranks write too
        super().__init__(root, {"use_listings_cache": False, **storage_options, "config_kwargs": config})
        self.fs.retries = 1

    def _stream(self, path: str, buffers: Iterable[Buffer], size_bytes: int) -> None:
        bucket, key, _ = self.fs.split_path(path)
        where = {"Bucket": bucket, "Key": key}
        upload = {**where, "UploadId": self._call("create_multipart_upload", **where)["UploadId"]}
        tags: list[str] = []
        running: collections.deque[Future[Any]] = collections.deque()
        pool = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="checkpoint-upload")
        try:
            part_bytes = max(PART_BYTES, -(-size_bytes // _MAX_PARTS))
            for number, part in enumerate(_parts(buffers, size_bytes, part_bytes), start=1):
                if len(running) == PARTS_IN_FLIGHT:
                    tags.append(running.popleft().result()["ETag"])
                running.append(pool.submit(self._call, "upload_part", **upload, PartNumber=number, Body=part))
            tags += [future.result()["ETag"] for future in running]
            parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
            self._complete(path, size_bytes, **upload, MultipartUpload={"Parts": parts})
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            with contextlib.suppress(Exception):  # parts without an end cost money, and can't be seen
                self._call("abort_multipart_upload", **upload)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _complete(self, path: str, size_bytes: int, **arguments: Any) -> None:
        try:
            self._call("complete_multipart_upload", **arguments)
        except FileNotFoundError:
            # The upload is gone where a first call succeeded and only its answer was lost.
            if self.fs.info(path)["size"] != size_bytes:
                raise

    def _call(self, method: str, **arguments: Any) -> Any:
        return retried(self.fs.call_s3, method, **arguments)


def _parts(buffers: Iterable[Buffer], size_bytes: int, part_bytes: int) -> Iterator[bytearray]:
    """The same bytes in parts of one length, but for the last. Each part has memory of its own."""
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
