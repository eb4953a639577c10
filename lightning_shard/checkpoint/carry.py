"""Copies a committed checkpoint from one store to another, file by file, the manifest last.

The copy is the same checkpoint, with the same attempt id. Each block is verified against its digest on the way.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_shard.checkpoint.catalog import Earlier
from lightning_shard.checkpoint.engine import each, files_at_once, read_blocks
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, check_digest, digest_at
from lightning_shard.checkpoint.format.chunks import Chunk
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.ranks import Failure, Ranks, exchange, together
from lightning_shard.checkpoint.saving.commit import check_files, commit, look_before_saving
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
    replaces them, or they are removed later as leftovers of a crashed save.

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

    def carry_own() -> None:
        def put(item: tuple[FileEntry, Iterator[Buffer]]) -> None:
            file, blocks = item
            # what is there is replaced, not removed first: another process may complete and commit it meanwhile
            write = store.publish if store.exists(file.path) else store.write
            write(file.path, blocks, file.bytes, durable=fsync)

        for _ in each(put, _with_blocks(checkpoint, own_files), files_at_once()):
            pass
        if fsync:
            store.sync(file.path for file in own_files)
        check_files(store, own_files)

    def conclude(_: list[None]) -> None:
        check_files(store, manifest.files, began_s)
        try:
            commit(store, manifest, earlier, durable=fsync)
        except CheckpointConflictError:
            if attempt_at(store) != manifest.attempt:  # else another process has copied and committed the same attempt
                raise

    own, outcome = exchange(ranks, carry_own, conclude)
    if isinstance(outcome, Failure):
        raise_cause(own, outcome, ranks.rank, path)


def damage(checkpoint: Checkpoint, files: Iterable[FileEntry]) -> str:
    """Read files and verify all digests. Returns why a file is damaged or can't be read, or an empty text."""
    try:
        for _ in each(_read_through, _with_blocks(checkpoint, files), files_at_once()):
            pass
    except CorruptCheckpointError as error:
        return str(error)
    return ""


def _read_through(item: tuple[FileEntry, Iterator[Buffer]]) -> None:
    deque(item[1], maxlen=0)


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
                step_bytes = checkpoint.store.step_bytes
                for _, _, found in read_blocks(read_into, begin, block, max(block.nbytes, 1), step_bytes):
                    if expected:
                        check_digest(found, expected, name, begin, end, source)
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
            yield name, begin, min(begin + block_bytes, chunk.end), digest_at(chunk.digests, number)
        at = chunk.end
    if at != file.bytes:
        raise CorruptCheckpointError(
            f"{checkpoint.path}/{file.path}: its tensors end at byte {at:,} of {file.bytes:,}: use another checkpoint."
        )
