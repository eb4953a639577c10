"""Copies a committed checkpoint from one store to another, file by file, the manifest last.

The copy is the same checkpoint, with the same attempt id. Each block is verified against its digest on the way.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_shard.checkpoint.folder import Earlier
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, check_digest, digest_bytes
from lightning_shard.checkpoint.format.chunks import Chunk
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.ranks import Failure, Ranks, exchange, together
from lightning_shard.checkpoint.saving.commit import (
    check_files,
    check_own_files,
    commit,
    failed_commit,
    look_before_saving,
)
from lightning_shard.checkpoint.saving.save import raise_cause
from lightning_shard.checkpoint.store import Buffer, Store, open_store
from lightning_shard.errors import CheckpointConflictError, CheckpointError, CorruptCheckpointError


def carry(
    checkpoint: Checkpoint,
    path: str,
    own_files: list[FileEntry],
    ranks: Ranks,
    *,
    storage_options: dict[str, Any],
    fsync: bool,
) -> None:
    """Copy a checkpoint to a path. A collective call. Does nothing if the checkpoint is there already.

    If any rank fails, every rank raises, and nothing is committed. No file is ever removed, since another process may
    be copying the same attempt and rely on the files that are there. So files of a failed copy remain: the next copy
    keeps those that are whole, or they are removed later as leftovers of a crashed save.

    Args:
        checkpoint: The source; a rank needs to see only ``own_files``.
        path: The destination.
        own_files: The files that this rank copies. Every file must be copied by some rank.
        ranks: The ranks that copy.
        storage_options: For fsspec, of the destination.
        fsync: Sync the files and their folders.

    Raises:
        CheckpointConflictError: Another save has committed to the path meanwhile. Its checkpoint stays.
        CorruptCheckpointError: A file of the source is damaged.
        CheckpointError: A rank couldn't write.
    """
    manifest, began_s = checkpoint.manifest, time.monotonic()
    store = open_store(path, storage_options)

    def look() -> Earlier | None:
        return None if attempt_at(store) == manifest.attempt else look_before_saving(store)

    earlier = together(ranks, lambda: None, lambda _: look())
    if earlier is None:
        return
    fault: list[BaseException] = []

    def carry_own() -> None:
        there = {file: size for file in own_files if (size := _size_of(store, file)) is not None}
        whole = _whole(Checkpoint(path, store, manifest, True), [file for file in there if there[file] == file.bytes])
        for file, blocks in _with_blocks(checkpoint, [file for file in own_files if file not in whole]):
            # an incomplete file is replaced, not removed first: another process may complete and commit it meanwhile
            put = store.publish if file in there else store.write
            put(file.path, blocks, file.bytes, durable=fsync)
        if fsync:
            store.sync(file.path for file in own_files)
        check_own_files(store, own_files)

    def conclude(_: list[None]) -> Failure | None:
        check_files(store, {"": manifest.files}, "", began_s)
        try:
            commit(store, manifest, earlier, durable=fsync)
        except BaseException as error:
            if isinstance(error, CheckpointConflictError) and attempt_at(store) == manifest.attempt:
                return None  # another process has copied and committed the same attempt
            fault.append(error)
            return failed_commit(store, manifest.attempt, ranks.rank, error)
        return None

    own, outcome = exchange(ranks, carry_own, conclude)
    if isinstance(outcome, Failure):
        raise_cause(own or next(iter(fault), None), outcome, ranks.rank, path)


def damage(checkpoint: Checkpoint, files: Iterable[FileEntry]) -> str:
    """Read files and verify all digests. Returns why a file is damaged or can't be read, or an empty text."""
    try:
        for _, blocks in _with_blocks(checkpoint, files):
            deque(blocks, maxlen=0)
    except CorruptCheckpointError as error:
        return str(error)
    return ""


def _whole(carried: Checkpoint, files: Iterable[FileEntry]) -> set[FileEntry]:
    """The undamaged ones of files that may have been copied before."""
    whole: set[FileEntry] = set()
    # one pass over the manifest's chunks for all files: a large run has millions of chunks
    for file, blocks in _with_blocks(carried, files):
        with contextlib.suppress(CorruptCheckpointError):
            deque(blocks, maxlen=0)
            whole.add(file)
    return whole


def _size_of(store: Store, file: FileEntry) -> int | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return store.size(file.path)
    return None


def attempt_at(store: Store) -> str:
    """The attempt id of the checkpoint in a store; empty if there is none, or it can't be read."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, CheckpointError):
        return Manifest.from_bytes(store.read(MANIFEST_NAME)).attempt
    return ""


def _with_blocks(checkpoint: Checkpoint, files: Iterable[FileEntry]) -> Iterator[tuple[FileEntry, Iterator[Buffer]]]:
    """Yield each file with an iterator over its bytes in order, which verifies digests as it goes."""
    own = set(files)
    table = checkpoint.manifest.chunks
    indices = [index for index, file in enumerate(checkpoint.manifest.files) if file in own]
    if indices:
        table.check(table.entries)
    for index in indices:
        file = checkpoint.manifest.files[index]
        chunks = [(table.names[number][1], chunk) for number, chunk in table.in_file(index)]
        yield file, _checked(checkpoint, file, chunks)


def _checked(checkpoint: Checkpoint, file: FileEntry, chunks: list[tuple[str, Chunk]]) -> Iterator[Buffer]:
    """Yield a file's bytes, verified block by block; each block reuses the memory of the one before."""
    source = f"{checkpoint.path}/{file.path}"
    memory = memoryview(bytearray())
    try:
        with checkpoint.store.reading(file.path) as read_into:
            for name, begin, end, expected in _blocks(checkpoint, file, chunks):
                if memory.nbytes < end - begin:
                    memory = memoryview(bytearray(end - begin))
                block = memory[: end - begin]
                read_into([(begin, block)])
                if expected:
                    check_digest(digest_bytes(block), expected, name, begin, end, source)
                yield block
    except OSError as error:
        raise CorruptCheckpointError(f"{source} can't be read: {error}. Use another checkpoint.") from error


def _blocks(
    checkpoint: Checkpoint, file: FileEntry, chunks: list[tuple[str, Chunk]]
) -> Iterator[tuple[str, int, int, bytes | None]]:
    """Yield consecutive ranges that cover a file: (what they are a part of, begin, end, expected digest or None)."""
    at = file.header_bytes or file.bytes
    expected = bytes.fromhex(file.digest) if file.digest is not None else None
    yield "header" if file.header_bytes else "state", 0, at, expected
    block_bytes = checkpoint.manifest.block_bytes or BLOCK_BYTES
    for name, chunk in chunks:
        if chunk.begin != at:
            raise CorruptCheckpointError(
                f"{checkpoint.path}/{file.path}: the chunk of {name!r} begins at byte {chunk.begin:,}, and the one"
                f" before it ends at {at:,}: use another checkpoint."
            )
        for number, begin in enumerate(range(chunk.begin, chunk.end, block_bytes)):
            yield name, begin, min(begin + block_bytes, chunk.end), chunk.block_digest(number)
        at = chunk.end
    if at != file.bytes:
        raise CorruptCheckpointError(
            f"{checkpoint.path}/{file.path}: its tensors end at byte {at:,} of {file.bytes:,}: use another checkpoint."
        )
