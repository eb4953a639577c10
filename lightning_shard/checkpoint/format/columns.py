"""All chunks of a tensor at once, as columns: for whoever looks at every chunk of a large run, which has millions.

The text is cut at its quotes, which takes a fraction of what a regular expression over all of it does, and each column
is checked as a whole. Nothing is taken for chunks that the expression wouldn't take for them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_shard.checkpoint.format.text import NUMBER, NUMBERS

CUTS_KEPT = 32
"""Models have few shapes, and cut most of them alike."""
MAX_DIGITS = 18
"""Numbers of more may not fit into 64 bits."""
Integers = NDArray[np.int64]
_PARTS = 12
"""Into so many a chunk with digests is cut at its quotes, the last of them what stands between two chunks."""
_FILE, _SPAN, _OFFSETS, _SIZES, _DIGESTS = 2, 4, 6, 8, 11
_CONSTANT = ((1, b"file"), (3, b"bytes"), (5, b"offsets"), (7, b"sizes"), (9, b"digests"), (10, b":"))
_HEX = b"0123456789abcdef"


def _column(part: bytes) -> re.Pattern[bytes]:
    """Parts joined by quotes, which no part has in it."""
    return re.compile(b'(?:%b")*+%b' % (part, part))


_SHORT = NUMBER.replace(b"*+", b"{0,%d}+" % (MAX_DIGITS - 1))
_ALL_FILES = _column(b":%b," % _SHORT)
_ALL_SPANS = _column(rb":\[%b,%b\]," % (_SHORT, _SHORT))
_ALL_LISTS = _column(b":%b," % NUMBERS)


class Parsed(NamedTuple):
    """The columns of a tensor's ``n`` chunks, as far as text tells."""

    files: Integers
    """Their numbers, of shape ``(n,)``."""
    spans: Integers
    """Where their bytes begin and end, of shape ``(n, 2)``."""
    places: tuple[bytes, ...]
    """Their boxes, as text."""
    digests: bytes
    """Of all chunks, one after another."""
    digits: Integers
    """How many digits of that are each chunk's, of shape ``(n,)``."""


def parse_columns(chunks: bytes) -> Parsed | None:
    """Of chunks joined by commas. None where some have no digests, or aren't laid out as the format says."""
    parts = chunks.split(b'"')
    count = len(parts) // _PARTS
    between = [b"{", *[b"},{"] * (count - 1), b"}"]
    if parts[::_PARTS] != between or len(parts) != count * _PARTS + 1:
        return None
    if any(parts[place::_PARTS] != [name] * count for place, name in _CONSTANT):
        return None
    files, spans = b'"'.join(parts[_FILE::_PARTS]), b'"'.join(parts[_SPAN::_PARTS])
    digests = b"".join(parts[_DIGESTS::_PARTS])
    if not _ALL_FILES.fullmatch(files) or not _ALL_SPANS.fullmatch(spans) or digests.translate(None, _HEX):
        return None
    places = _places(b'"'.join(parts[_OFFSETS::_PARTS]), b'"'.join(parts[_SIZES::_PARTS]))
    if places is None:
        return None
    digits = np.fromiter(map(len, parts[_DIGESTS::_PARTS]), np.int64, count)
    return Parsed(_integers(files), _integers(spans).reshape(count, 2), places, digests, digits)


def _integers(column: bytes) -> Integers:
    return np.fromstring(column.translate(None, b':[]"').rstrip(b","), np.int64, sep=",")


@lru_cache(maxsize=CUTS_KEPT)
def _places(offsets: bytes, sizes: bytes) -> tuple[bytes, ...] | None:
    """One object for all tensors that are cut alike."""
    if not (_ALL_LISTS.fullmatch(offsets) and _ALL_LISTS.fullmatch(sizes)):
        return None
    pairs = zip(offsets.split(b'"'), sizes.split(b'"'), strict=True)
    return tuple(b'"offsets"%b"sizes"%b' % (offset, size[:-1]) for offset, size in pairs)
