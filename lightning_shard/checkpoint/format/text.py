"""The manifest's text: one JSON object on lines of one file or tensor each, parsed as late as possible."""

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
"""Of so many, chunks are searched for without taking all apart."""
OWN_WRITER = "lightning_shard "
"""How ``writer`` begins in manifests that this program wrote: with their own digest, a tensor to a line."""
_END = f',\n"{OWN_DIGEST}":'.encode()


def signed(*body: bytes) -> bytes:
    """A manifest's bytes: a JSON object without its closing brace, in parts, then the digest of all that."""
    return b"".join([*body, _end(digest_of_parts(body))])


def own_digest_fits(data: bytes) -> bool:
    end = data.rfind(_END)
    return end >= 0 and data[end:] == _end(digest(memoryview(data)[:end]))


def _end(own_digest: str) -> bytes:
    return b'%b"%b"}\n' % (_END, own_digest.encode())


Span = tuple[int, int]
"""Where something begins and ends in the manifest's bytes: a line's without what separates it from the next."""
Bring = Callable[[int, int], bytes]
"""Gives the manifest's bytes from ``begin`` to ``end``."""


class TensorText(NamedTuple):
    """A tensor as far as it is taken apart without parsing: ``{"dtype":…,"shape":…`` without the closing brace, and
    what gives its chunks, joined by commas. That raises ValueError where they aren't laid out as the format says;
    ``unchecked`` gives them as they are.
    """

    head: bytes
    chunks: Callable[[], bytes]
    unchecked: Callable[[], bytes]


class Placed(NamedTuple):
    """A tensor's head, and where in the manifest's bytes its chunks lie."""

    head: bytes
    begin: int
    end: int


ChunkText = tuple[bytes, bytes, bytes, bytes, bytes]
"""A chunk's file, begin, end, place (``"offsets":…,"sizes":…``) and digests."""


class _ByLine(Mapping[str, Any]):
    """What is text, a line each, until it is asked for."""

    lines: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self.lines

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)


class Lines(_ByLine):
    """A section whose tensors are text, a line each, which is parsed when it is asked for.

    Args:
        lines: By name; of a tensor perhaps only where its chunks lie.
        bring: Gives these.
        checked: Whether all chunks are known to be laid out as the format says; else they are checked when asked for.
    """

    def __init__(
        self, lines: Mapping[str, bytes | Placed], bring: Bring | None = None, *, checked: bool = True
    ) -> None:
        self.lines = lines
        self._bring = bring
        self._checked = checked
        self._sound: set[int] = set()
        """Where chunks begin that have been checked."""

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
    """Objects as text, a line each, which is parsed when it is asked for. That raises ValueError where it is no JSON.

    Args:
        lines: By name, the text, or where it lies in the manifest's bytes.
        bring: Gives what lies there.
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
    """The same of a tensor's JSON, however that was laid out; fields that this version doesn't know are left out.

    Raises:
        KeyError, TypeError, ValueError: A field is missing, or of another kind than the format says.
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
    """A tensor's chunks, taken apart."""
    return _CHUNK_TEXT.findall(chunks)


def chunk_texts_in(chunks: bytes, files: frozenset[int]) -> list[ChunkText]:
    """Those of them that lie in some files."""
    if len(files) > FEW_FILES:
        numbers = {b"%d" % number for number in files}
        return [text for text in chunk_texts(chunks) if text[0] in numbers]
    return _chunk_text_in(files).findall(chunks)


@lru_cache(maxsize=4)
def _chunk_text_in(files: frozenset[int]) -> re.Pattern[bytes]:
    numbers = b"|".join(b"%d" % number for number in sorted(files))
    return re.compile(_CHUNK_TEXT.pattern.replace(NUMBER, numbers, 1))


def parse(data: bytes, *, at_once: bool = True) -> Any:
    """The manifest's JSON.

    A large run's has millions of chunks, which take seconds and gigabytes to parse, and a rank needs few of them: where
    all lines are exactly as :meth:`Manifest.to_bytes` lays them out, tensors are left as text until they are asked for.
    A text that is laid out otherwise in a single place is parsed as any JSON: both ways give the same.

    Args:
        at_once: Look at all of the lines of tensors and ranks. Else, where this program is the writer, only at their
            beginnings and ends: for manifests that are known by their own digest to be what was written.

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
# No bracket within a string is taken for one.
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
    """The lines of a manifest, taken in order; none is copied that isn't asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 1  # behind the opening brace

    def field(self, name: str, end: bytes = b",") -> Any:
        """The value of a line ``"name":value,``."""
        line, opening = _cut(self._data, *self._next()), f'"{name}":'.encode()
        if not (line.startswith(opening) and line.endswith(end)):
            raise _OtherwiseLaidOut
        return loads(line[len(opening) : -len(end)])

    def block(self, name: str, brackets: bytes) -> list[Span]:
        """The lines between ``"name":{`` and ``},``, without the commas at their ends."""
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
        """Lines that follow on one another, with what separates them."""
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
    """Lines ``"name":{…}``, each of which is one whole tensor, by name."""
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
    """Lines ``"number":{…}``: where the objects lie, by number."""
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
    """Of a tensor's head, and the texts of its chunks or of several joined by commas."""
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
    """In parts: a large manifest's text is copied once."""
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
