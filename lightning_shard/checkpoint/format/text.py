"""The manifest as text: one JSON object with one file or tensor per line, which is split by lines and parsed lazily.

Why: a large run's manifest has millions of chunks, which take seconds and gigabytes to parse, and a rank needs few.
Regular expressions check that a line has exactly the layout that we write; any other layout is parsed as plain JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from lightning_shard.checkpoint.format.blocks import digest, digest_of_parts
from lightning_shard.checkpoint.format.strict_json import loads

OWN_DIGEST = "manifest_digest"
HEAD_FIELDS = ("format", "format_version", "writer", "attempt", "world_size", "layout", "digest")
TENSOR_SECTIONS = ("model", "optimizer", "trainer")
FEW_FILES = 8
"""Chunks of up to so many files are found by one regular expression, without splitting all chunks."""
OWN_WRITER = "lightning_shard "
"""Prefix of ``writer`` in manifests that this program wrote, which have their own digest and one tensor per line."""
_END = f',\n"{OWN_DIGEST}":'.encode()


def signed(*body: bytes) -> bytes:
    """Append the manifest's own digest to a JSON object without its closing brace, given in parts."""
    return b"".join([*body, _end(digest_of_parts(body))])


def own_digest_fits(data: bytes) -> bool:
    end = data.rfind(_END)
    return end >= 0 and data[end:] == _end(digest(memoryview(data)[:end]))


def _end(own_digest: str) -> bytes:
    return b'%b"%b"}\n' % (_END, own_digest.encode())


Span = tuple[int, int]
"""[begin, end) in the manifest's bytes; of a line, without its separator from the next."""
Bring = Callable[[int, int], bytes]
"""Returns the manifest's bytes from ``begin`` to ``end``."""


class TensorText(NamedTuple):
    """A tensor's text, split but not parsed.

    Attributes:
        head: ``{"dtype":…,"shape":…`` without the closing brace.
        chunks: Returns the chunks' text, joined by commas; raises ValueError if it hasn't the format's layout.
        unchecked: Returns the same text without checking it.
    """

    head: bytes
    chunks: Callable[[], bytes]
    unchecked: Callable[[], bytes]


class Placed(NamedTuple):
    """A tensor's head, and the byte range of its chunks' text in the manifest."""

    head: bytes
    begin: int
    end: int


ChunkText = tuple[bytes, bytes, bytes, bytes, bytes]
"""A chunk's file index, begin, end, place (``"offsets":…,"sizes":…``) and digests, each as text."""


class _ByLine(Mapping[str, Any]):
    """A mapping whose values are lines of text until they are accessed."""

    lines: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self.lines

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)


class Lines(_ByLine):
    """A section whose tensors are lines of text, parsed on access.

    Args:
        lines: By tensor name: the line, or its head and the byte range of its chunks.
        bring: Returns the bytes of such a range.
        checked: Whether all chunks are known to have the format's layout; else they are checked on access.
    """

    def __init__(
        self, lines: Mapping[str, bytes | Placed], bring: Bring | None = None, *, checked: bool = True
    ) -> None:
        self.lines = lines
        self._bring = bring
        self._checked = checked
        self._sound: set[int] = set()
        """The ``begin`` of chunks that have been checked."""

    def __getitem__(self, name: str) -> TensorText | dict[str, Any]:
        found = self.lines[name]
        if not isinstance(found, Placed):
            return json.loads(found)
        assert self._bring is not None
        return TensorText(found.head, partial(self._chunks, found), partial(self._bring, found.begin, found.end))

    def line(self, name: str) -> bytes:
        found = self.lines[name]
        return _line(found.head, self._chunks(found)) if isinstance(found, Placed) else found

    def _chunks(self, of: Placed) -> bytes:
        assert self._bring is not None
        text = self._bring(of.begin, of.end)
        if not self._checked and of.begin not in self._sound:
            if not _ALL_CHUNKS.fullmatch(text):
                raise ValueError("its chunks aren't laid out as their writer does it")
            self._sound.add(of.begin)
        return text


class Objects(_ByLine):
    """JSON objects as lines of text, parsed on access, which raises ValueError for invalid JSON.

    Args:
        lines: By name, the text or its byte range in the manifest.
        bring: Returns the bytes of such a range.
    """

    def __init__(self, lines: Mapping[str, bytes | Span], bring: Bring | None = None) -> None:
        self.lines = lines
        self._bring = bring

    def __getitem__(self, name: str) -> Any:
        return loads(self.line(name))

    def line(self, name: str) -> bytes:
        found = self.lines[name]
        if isinstance(found, bytes):
            return found
        assert self._bring is not None
        return self._bring(*found)


def tensor_text(raw: Mapping[str, Any]) -> TensorText:
    """Convert a tensor's JSON value, of any layout, to our text; fields that this version doesn't know are left out.

    Raises:
        KeyError, TypeError, ValueError: A field is missing or has another type than the format's.
    """
    if not isinstance(raw["chunks"], list):
        raise TypeError("its chunks are no list")
    chunks = []
    for chunk in raw["chunks"]:
        text = dump({field: chunk[field] for field in _CHUNK_FIELDS if field in chunk}).encode()
        if not _CHUNK_TEXT.fullmatch(text):
            raise ValueError(f"its chunk {text.decode():.200} isn't as the format says")
        chunks.append(text)
    head = dump({"dtype": raw["dtype"], "shape": raw["shape"]}).encode()[:-1]
    joined = partial(b",".join, chunks)
    return TensorText(head, joined, joined)


def chunk_texts(chunks: bytes) -> list[ChunkText]:
    """Split a tensor's chunks' text into the fields of each chunk."""
    return _CHUNK_TEXT.findall(chunks)


def chunk_texts_in(chunks: bytes, files: frozenset[int]) -> list[ChunkText]:
    """As :func:`chunk_texts`, but only the chunks that lie in ``files``."""
    if len(files) > FEW_FILES:
        numbers = {b"%d" % number for number in files}
        return [text for text in chunk_texts(chunks) if text[0] in numbers]
    return _chunk_text_in(files).findall(chunks)


@lru_cache(maxsize=4)
def _chunk_text_in(files: frozenset[int]) -> re.Pattern[bytes]:
    numbers = b"|".join(b"%d" % number for number in sorted(files))
    return re.compile(_CHUNK_TEXT.pattern.replace(NUMBER, numbers, 1))


def parse(data: bytes, *, at_once: bool = True) -> Any:
    """Parse the manifest's JSON.

    If all lines have exactly the layout of :meth:`Manifest.to_bytes`, tensors stay text until they are accessed. If any
    line has another layout, the whole text is parsed as plain JSON; both ways give equal values.

    Args:
        at_once: Check all of the lines of tensors and ranks. If False, and this program is the writer, check only their
            beginnings and ends: for manifests whose own digest shows that they are what was written.

    Raises:
        ValueError: As :func:`loads`.
    """
    try:
        return _parse_lines(data, at_once)
    except (_OtherwiseLaidOut, ValueError):
        return loads(data)


class _OtherwiseLaidOut(Exception):
    pass


_CHUNKS = b',"chunks":['
_CHUNK_FIELDS = ("file", "bytes", "offsets", "sizes", "digests")
_STRING = rb'"(?:[^"\\\x00-\x1f]|\\.)*+"'
NUMBER = rb"(?:0|[1-9]\d*+)"
NUMBERS = rb"\[(?:%(n)b(?:,%(n)b)*+)?\]" % {b"n": NUMBER}
_CHUNK_TEXT = re.compile(
    rb'\{"file":(%(n)b),"bytes":\[(%(n)b),(%(n)b)\],("offsets":%(ns)b,"sizes":%(ns)b)(?:,"digests":"([0-9a-f]*+)")?\}'
    % {b"n": NUMBER, b"ns": NUMBERS}
)
_ALL_CHUNKS = re.compile(rb"(?:%b(?:,(?=\{)|\Z))*+" % _CHUNK_TEXT.pattern)
# Strings are matched as a whole, so a bracket inside a string isn't taken for structure.
_TENSOR_START = re.compile(
    rb'(%(s)b):(?:(\{"dtype":"\w++","shape":%(ns)b)%(c)b|(\{"same_as":%(s)b\}))'
    % {b"s": _STRING, b"ns": NUMBERS, b"c": re.escape(_CHUNKS)}
)
_TENSOR_END = b"]}"
_RANK_START = re.compile(rb'"(%b)":(?=\{)' % NUMBER)


def _parse_lines(data: bytes, at_once: bool) -> dict[str, Any]:
    if not (data.startswith(b"{") and data.endswith(b'"}\n')):
        raise _OtherwiseLaidOut
    reader = _Reader(data)
    raw: dict[str, Any] = {name: reader.field(name) for name in HEAD_FIELDS}
    at_once = at_once or not str(raw["writer"]).startswith(OWN_WRITER)
    raw["files"] = loads(b"[%b]" % reader.text(reader.block("files", b"[]")))
    raw["state_file"] = reader.field("state_file")
    for name in TENSOR_SECTIONS:
        tensors = _named(data, reader.block(name, b"{}"), at_once)
        raw[name] = Lines(tensors, partial(_cut, data), checked=at_once)
    ranks, bring = reader.block("ranks", b"{}"), partial(_cut, data)
    raw["ranks"] = loads(b"{%b}" % reader.text(ranks)) if at_once else Objects(_objects(data, ranks), bring)
    raw[OWN_DIGEST] = reader.field(OWN_DIGEST, end=b"}")
    if reader.at != len(data):
        raise _OtherwiseLaidOut
    return raw


class _Reader:
    """Reads the lines of a manifest in order; copies only those that are returned as values or text."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 1  # after the opening brace

    def field(self, name: str, end: bytes = b",") -> Any:
        """Parse the next line, ``"name":value,``, and return the value."""
        line, opening = _cut(self._data, *self._next()), f'"{name}":'.encode()
        if not (line.startswith(opening) and line.endswith(end)):
            raise _OtherwiseLaidOut
        return loads(line[len(opening) : -len(end)])

    def block(self, name: str, brackets: bytes) -> list[Span]:
        """The spans of the lines between ``"name":{`` and ``},``, without the commas at their ends."""
        opening, closing = f'"{name}":'.encode() + brackets[:1], brackets[1:] + b","
        line = _cut(self._data, *self._next())
        if line == opening + closing:
            return []
        if line != opening:
            raise _OtherwiseLaidOut
        inner: list[Span] = []
        begin, end = self._next()
        while end - begin != len(closing) or not self._data.startswith(closing, begin):
            inner.append((begin, end))
            begin, end = self._next()
        commas = [end > begin and self._data[end - 1] == ord(",") for begin, end in inner]
        if commas != [True] * (len(inner) - 1) + [False]:
            raise _OtherwiseLaidOut
        return [*((begin, end - 1) for begin, end in inner[:-1]), inner[-1]]

    def text(self, lines: list[Span]) -> bytes:
        """Consecutive lines, with their separators."""
        return _cut(self._data, lines[0][0], lines[-1][1]) if lines else b""

    def _next(self) -> Span:
        begin, end = self.at, self._data.find(b"\n", self.at)
        if end < 0:
            raise _OtherwiseLaidOut
        self.at = end + 1
        return begin, end


def _cut(data: bytes, begin: int, end: int) -> bytes:
    return data[begin:end]


def _named(data: bytes, lines: list[Span], at_once: bool) -> dict[str, bytes | Placed]:
    """Split lines ``"name":{…}``, each of exactly one tensor, into heads and chunk spans (or aliases), by name."""
    found: dict[str, bytes | Placed] = {}
    for begin, end in lines:
        start = _TENSOR_START.match(data, begin, end)
        if start is None:
            raise _OtherwiseLaidOut
        quoted, head, alias = start.groups()
        name = loads(quoted) if b"\\" in quoted else quoted[1:-1].decode()
        if alias is not None:
            whole = start.end() == end
            found[name] = alias
        else:
            chunks = start.end(), end - len(_TENSOR_END)
            whole = chunks[0] <= chunks[1] and data.endswith(_TENSOR_END, begin, end)
            whole = whole and (not at_once or _ALL_CHUNKS.fullmatch(data, *chunks) is not None)
            found[name] = Placed(head, *chunks)
        if not whole:
            raise _OtherwiseLaidOut
    if len(found) != len(lines):
        raise _OtherwiseLaidOut
    return found


def _objects(data: bytes, lines: list[Span]) -> dict[str, Span]:
    """Split lines ``"number":{…}``: the spans of the objects, by number."""
    found: dict[str, Span] = {}
    for begin, end in lines:
        start = _RANK_START.match(data, begin, end)
        if start is None or not data.endswith(b"}", begin, end):
            raise _OtherwiseLaidOut
        found[start[1].decode()] = start.end(), end
    if len(found) != len(lines):
        raise _OtherwiseLaidOut
    return found


def tensor_head(dtype: str, shape: Sequence[int]) -> str:
    return f'{{"dtype":"{dtype}","shape":{dump(shape)}'


def tensor_line(head: str, chunks: Iterable[bytes]) -> bytes:
    """A tensor's line, from its head and the texts of its chunks (or of several, joined by commas)."""
    return _line(head.encode(), b",".join(chunks))


def _line(head: bytes, chunks: bytes) -> bytes:
    return b"%b%b%b%b" % (head, _CHUNKS, chunks, _TENSOR_END)


def chunk_text(file: int, begin: int, end: int, place: str, digests: str) -> str:
    more = f',"digests":"{digests}"' if digests else ""
    return f'{{"file":{file},"bytes":[{begin},{end}],{place}{more}}}'


def place_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    return f'"offsets":{dump(offsets)},"sizes":{dump(sizes)}'


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def dump(value: Any) -> str:
    return _ENCODER.encode(value)


def array_of_lines(name: str, items: Iterable[bytes]) -> Iterator[bytes]:
    """``"name":[…]`` with one item per line, yielded in parts, so that a large manifest's text is copied only once."""
    return _block(name, ((b"", item) for item in items), b"[]")


def object_on_a_line(items: Iterable[tuple[str, bytes]]) -> bytes:
    return b"{%b}" % b",".join(dump(key).encode() + b":" + value for key, value in items)


def object_of_lines(name: str, items: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
    return _block(name, ((dump(key).encode() + b":", value) for key, value in items), b"{}")


def _block(name: str, items: Iterable[tuple[bytes, bytes]], brackets: bytes) -> Iterator[bytes]:
    yield b'"%b":%b' % (name.encode(), brackets[:1])
    line_end = b"\n"
    for item in items:
        yield line_end
        yield from item
        line_end = b",\n"
    yield brackets[1:] if line_end == b"\n" else b"\n" + brackets[1:]
