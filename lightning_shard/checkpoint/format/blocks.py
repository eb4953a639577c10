"""Block digests: a 128-bit hash (xxh3_128) for each block of a chunk's bytes, and its verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash

from lightning_shard.errors import CorruptCheckpointError

DIGEST_ALGORITHM = "xxh3_128"
DIGEST_BYTES = 16
BLOCK_BYTES = 4 * 2**20
Digest = str
"""32 lowercase hexadecimal digits: the canonical (big-endian) bytes of an xxh3_128 hash."""


def digest_at(digests: bytes, block: int) -> bytes:
    """The digest of block number ``block``, from the concatenated digests of all blocks."""
    return digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]


digest: Callable[[Any], Digest] = xxhash.xxh3_128_hexdigest
digest_bytes: Callable[[Any], bytes] = xxhash.xxh3_128_digest
"""The canonical bytes of a hash, as the table of chunks has them."""


def check_digest(found: bytes | str, expected: bytes | str, name: str, begin: int, end: int, file: str) -> None:
    """Raise CorruptCheckpointError if bytes ``begin`` to ``end`` of a file, a part of tensor ``name``, have changed."""
    if found != expected:
        raise CorruptCheckpointError(
            f"{file}: bytes {begin:,} to {end:,}, a part of {name!r}, differ from their digest: the file is damaged,"
            " use another checkpoint."
        )
