"""The manifest's text: one JSON object on lines of one file or tensor each, parsed as late as possible."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_shard.checkpoint.format.blocks import digest, digest_of_parts
from lightning_shard.checkpoint.format.strict_json import loads

OWN_DIGEST = "manifest_digest"
HEAD_FIELDS = ("format", "format_version", "writer", "attempt", "world_size", "layout", "digest")
TENSOR_SECTIONS = ("model", "optimizer", "trainer")
_END = f',\n"{OWN_DIGEST}":'.encode()


def signed(*body: bytes) -> bytes:
    """A manifest's bytes: a JSON object without its closing brace, in parts, then the digest of all that."""
    return b"".join([*body, _end(digest_of_parts(body))])


def own_digest_fits(data: bytes) -> bool:
    end = data.rfind(_END)
    return end >= 0 and data[end:] == _end(digest(memoryview(data)[:end]))


def _end(own_digest: str) -> bytes:
    return b'%b"%b"}\n' % (_END, own_digest.encode())


class TensorText(NamedTuple):
    """A tensor as far as it is taken apart without parsing: ``{"dtype":…,"shape":…`` without the closing brace, and
    its chunks, joined by commas.
    """

    head: bytes
    chunks: bytes


ChunkText = tuple[bytes, bytes, bytes, bytes, bytes]
"""A chunk's file, begin, end, place (``"offsets":…,"sizes":…``) and digests."""


class Lines(Mapping[str, "TensorText | dict[str, Any]"]):
    """A section whose tensors are text, a line each; aliases are parsed when they are asked for."""

    def __init__(self, lines: Mapping[str, bytes]) -> None:
        self._lines = lines

    def __getitem__(self, name: str) -> TensorText | dict[str, Any]:
        line = self._lines[name]
        head, found, chunks = line.partition(_CHUNKS)
        return TensorText(head, chunks[:-2]) if found else json.loads(line)

    def line(self, name: str) -> bytes:
        return self._lines[name]

    def __contains__(self, name: object) -> bool:
        return name in self._lines

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


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
    return TensorText(dump({"dtype": raw["dtype"], "shape": raw["shape"]}).encode()[:-1], b",".join(chunks))


def chunk_texts(chunks: bytes) -> list[ChunkText]:
    """A tensor's chunks, taken apart."""
    return _CHUNK_TEXT.findall(chunks)


def parse(data: bytes) -> Any:
    """The manifest's JSON.

    A large run's has hundreds of thousands of chunks, which take seconds and hundreds of megabytes to parse, and a rank
    needs few of them: where all lines are exactly as :meth:`Manifest.to_bytes` lays them out, tensors are left as text
    until they are asked for. A text that is laid out otherwise in a single place is parsed as any JSON: both ways give
    the same.

    Raises:
        ValueError: As :func:`loads`.
    """
    try:
        return _parse_lines(data)
    except (_OtherwiseLaidOut, ValueError):
        return loads(data)


class _OtherwiseLaidOut(Exception):
    pass


_CHUNKS = b',"chunks":['
_CHUNK_FIELDS = ("file", "bytes", "offsets", "sizes", "digests")
_STRING = rb'"(?:[^"\\\x00-\x1f]|\\.)*+"'
_NUMBER = rb"(?:0|[1-9]\d*+)"
_NUMBERS = rb"\[(?:%(n)b(?:,%(n)b)*+)?\]" % {b"n": _NUMBER}
_CHUNK_TEXT = re.compile(
    rb'\{"file":(%(n)b),"bytes":\[(%(n)b),(%(n)b)\],("offsets":%(ns)b,"sizes":%(ns)b)(?:,"digests":"([0-9a-f]*+)")?\}'
    % {b"n": _NUMBER, b"ns": _NUMBERS}
)
_TENSOR = rb'\{"dtype":"\w++","shape":%b,"chunks":\[(?:%b(?:,(?=\{)|(?=\])))*+\]\}' % (_NUMBERS, _CHUNK_TEXT.pattern)
# Nothing else is on the line, and no bracket within a string is taken for one.
_TENSOR_LINE = re.compile(rb'(%b):(%b|\{"same_as":%b\})' % (_STRING, _TENSOR, _STRING))


def _parse_lines(data: bytes) -> dict[str, Any]:
    lines = data.split(b"\n")
    if lines[0][:1] != b"{" or len(lines) < 2 or lines[-1] or not lines[-2].endswith(b'"}'):
        raise _OtherwiseLaidOut
    lines[0] = lines[0][1:]
    reader = _Lines(lines)
    raw: dict[str, Any] = {name: reader.field(name) for name in HEAD_FIELDS}
    raw["files"] = [loads(line) for line in reader.block("files", b"[]")]
    raw["state_file"] = reader.field("state_file")
    for name in TENSOR_SECTIONS:
        raw[name] = Lines(_named(reader.block(name, b"{}")))
    ranks = b",".join(reader.block("ranks", b"{}"))
    raw["ranks"] = loads(b"{" + ranks + b"}")
    raw[OWN_DIGEST] = reader.field(OWN_DIGEST, end=b"}")
    if reader.at != len(lines) - 1:
        raise _OtherwiseLaidOut
    return raw


class _Lines:
    """The lines of a manifest, taken in order."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines
        self.at = 0

    def field(self, name: str, end: bytes = b",") -> Any:
        """The value of a line ``"name":value,``."""
        line, opening = self._next(), f'"{name}":'.encode()
        if not (line.startswith(opening) and line.endswith(end)):
            raise _OtherwiseLaidOut
        return loads(line[len(opening) : -len(end)])

    def block(self, name: str, brackets: bytes) -> list[bytes]:
        """The lines between ``"name":{`` and ``},``, without the commas at their ends."""
        opening, closing = f'"{name}":'.encode() + brackets[:1], brackets[1:] + b","
        line = self._next()
        if line == opening + closing:
            return []
        end = self._lines.index(closing, self.at)  # a ValueError where there is none
        *inner, last = self._lines[self.at : end] or [b","]
        if line != opening or last.endswith(b",") or not all(line.endswith(b",") for line in inner):
            raise _OtherwiseLaidOut
        self.at = end + 1
        return [*(line[:-1] for line in inner), last]

    def _next(self) -> bytes:
        if self.at == len(self._lines):
            raise _OtherwiseLaidOut
        self.at += 1
        return self._lines[self.at - 1]


def _named(lines: list[bytes]) -> dict[str, bytes]:
    """Lines ``"name":{…}``, each of which is one whole tensor, by name."""
    found = {}
    for line in lines:
        match = _TENSOR_LINE.fullmatch(line)
        if match is None:
            raise _OtherwiseLaidOut
        name = match[1]
        found[loads(name) if b"\\" in name else name[1:-1].decode()] = match[2]
    if len(found) != len(lines):
        raise _OtherwiseLaidOut
    return found


def tensor_head(dtype: str, shape: Sequence[int]) -> str:
    return f'{{"dtype":"{dtype}","shape":{dump(shape)}'


def tensor_line(head: str, chunks: Iterable[bytes]) -> bytes:
    """Of a tensor's head, and the texts of its chunks or of several joined by commas."""
    return b"%b%b%b]}" % (head.encode(), _CHUNKS, b",".join(chunks))


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
