"""Carry a committed checkpoint from one store to another, file by file, the manifest last.

What arrives is the same checkpoint, of one attempt. Each block is compared with its digest on the way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_shard.checkpoint.folder import Earlier
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, check_digest, digest
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, Chunk, FileEntry, Manifest
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
    """Bring a checkpoint to a path; a collective call.

    If any rank fails, every rank raises, and nothing is committed. Nothing is done where it is there already. Whatever
    happens, no file is removed: another process may be carrying the same attempt, and count on what is there. So what
    was brought by a carrying that failed is there for the next one, which leaves what is whole as it is; or it goes as
    what any crashed save leaves.

    Args:
        own_files: What this rank carries; it needs no others. Every file must be some rank's.

    Raises:
        CheckpointConflictError: Another save has put its checkpoint there meanwhile. That one stays.
        CorruptCheckpointError: A file is damaged where it is read.
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
            # what was cut off is replaced, and not removed first: its carrier may complete and commit it meanwhile
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
                return None  # who has carried it at the same time came first
            fault.append(error)
            return failed_commit(store, manifest.attempt, ranks.rank, error)
        return None

    own, outcome = exchange(ranks, carry_own, conclude)
    if isinstance(outcome, Failure):
        raise_cause(own or next(iter(fault), None), outcome, ranks.rank, path)


def damage(checkpoint: Checkpoint, files: Iterable[FileEntry]) -> str:
    """Read files, and compare each block with its digest: why one is damaged, or can't be read; else nothing."""
    try:
        for _, blocks in _with_blocks(checkpoint, files):
            _read(blocks)
    except CorruptCheckpointError as error:
        return str(error)
    return ""


def _read(blocks: Iterable[Buffer]) -> None:
    for _ in blocks:
        pass


def _whole(carried: Checkpoint, files: Iterable[FileEntry]) -> set[FileEntry]:
    """Of files that may have been carried before, those that are undamaged."""
    whole: set[FileEntry] = set()
    # all in one look at the manifest's chunks, of which a large run has millions
    for file, blocks in _with_blocks(carried, files):
        with contextlib.suppress(CorruptCheckpointError):
            _read(blocks)
            whole.add(file)
    return whole


def _size_of(store: Store, file: FileEntry) -> int | None:
    try:
        return store.size(file.path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def attempt_at(store: Store) -> str:
    """The attempt of the checkpoint that is in a store; empty where there is none, or one that can't be read."""
    try:
        return Manifest.from_bytes(store.read(MANIFEST_NAME)).attempt
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return ""


def _with_blocks(checkpoint: Checkpoint, files: Iterable[FileEntry]) -> Iterator[tuple[FileEntry, Iterator[Buffer]]]:
    """Files, each with its bytes in order, which are checked as they are taken."""
    own = set(files)
    chunks: dict[int, list[tuple[str, Chunk]]] = {
        index: [] for index, file in enumerate(checkpoint.manifest.files) if file in own
    }
    for section in checkpoint.manifest.sections().values() if chunks else ():
        for name, entry in section.items():
            if section.alias_of(name) is None:
                for chunk in entry.in_files(chunks):
                    chunks[chunk.file].append((name, chunk))
    for index, of_file in chunks.items():
        file = checkpoint.manifest.files[index]
        yield file, _checked(checkpoint, file, sorted(of_file, key=lambda one: (one[1].begin, one[1].end)))


def _checked(checkpoint: Checkpoint, file: FileEntry, chunks: list[tuple[str, Chunk]]) -> Iterator[Buffer]:
    """A file's bytes, block by block; the memory of one is used again for the next."""
    source = f"{checkpoint.path}/{file.path}"
    memory = memoryview(bytearray())
    with _saying_that_it_is_damaged(source), checkpoint.store.reading(file.path) as read_into:
        for name, begin, end, expected in _blocks(checkpoint, file, chunks):
            if memory.nbytes < end - begin:
                memory = memoryview(bytearray(end - begin))
            block = memory[: end - begin]
            read_into([(begin, block)])
            if expected:
                check_digest(digest(block), expected, name, begin, end, source)
            yield block


@contextlib.contextmanager
def _saying_that_it_is_damaged(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptCheckpointError(f"{source} can't be read: {error}. Use another checkpoint.") from error


def _blocks(
    checkpoint: Checkpoint, file: FileEntry, chunks: list[tuple[str, Chunk]]
) -> Iterator[tuple[str, int, int, str | None]]:
    """All of a file's bytes: what they are a part of, begin, end, and their digest where they have one."""
    at = file.header_bytes or file.bytes
    yield "header" if file.header_bytes else "state", 0, at, file.digest
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
