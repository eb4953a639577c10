"""Lazy reading of a large manifest's bytes on each rank; the first rank has read and checked the whole file."""

from __future__ import annotations

from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, digest
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME
from lightning_shard.checkpoint.format.outline import Outline
from lightning_shard.checkpoint.store import Store
from lightning_shard.errors import CheckpointError, CheckpointReplacedError, CorruptCheckpointError


class Brought:
    """Callable that returns bytes of the manifest.

    It reads the file by blocks, compares each block's digest with the one that the first rank computed, and caches it.
    """

    def __init__(self, store: Store, outline: Outline) -> None:
        self._store = store
        self._outline = outline
        self._blocks: dict[int, bytes] = {}

    def __call__(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to ``end``.

        Raises:
            CheckpointReplacedError: The manifest has been replaced or removed since.
            CorruptCheckpointError: The bytes differ from those that the first rank read.
            CheckpointError: The file can't be read.
        """
        numbers = range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        parts = [(self._block(number), number * BLOCK_BYTES) for number in numbers]
        return b"".join(block[max(begin - at, 0) : end - at] for block, at in parts)

    def is_there(self) -> bool:
        """Whether this rank sees the same manifest as the first rank, judged by its size and its end."""
        outline = self._outline
        try:
            at_the_end = self._read(outline.size - len(outline.end), outline.size)
            return at_the_end == outline.end and self._store.size(MANIFEST_NAME) == outline.size
        except Exception:
            return False

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            begin = number * BLOCK_BYTES
            self._blocks[number] = self._checked(number, begin, min(begin + BLOCK_BYTES, self._outline.size))
        return self._blocks[number]

    def _checked(self, number: int, begin: int, end: int) -> bytes:
        source = f"{self._store.root}/{MANIFEST_NAME}"
        try:
            block = self._read(begin, end)
            if digest(block) != self._outline.digests[number]:
                raise CorruptCheckpointError(
                    f"{source}: bytes {begin:,} to {end:,} aren't those that the first rank has read: use another"
                    " checkpoint."
                )
            return block
        except (CorruptCheckpointError, OSError) as error:
            changed = isinstance(error, CorruptCheckpointError | FileNotFoundError | NotADirectoryError)
            if changed and not self.is_there():
                raise CheckpointReplacedError(
                    f"{self._store.root} was replaced or removed while it was read: open it anew. ({error})"
                ) from error
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CheckpointError(f"{source} can't be read: {type(error).__name__}: {error}") from error

    def _read(self, begin: int, end: int) -> bytes:
        memory = bytearray(end - begin)
        with self._store.reading(MANIFEST_NAME) as read:
            read([(begin, memoryview(memory))])
        return bytes(memory)
