"""The manifest's text: one JSON object on lines of one file or tensor each, parsed as late as possible."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_shard.checkpoint.format.blocks import digest


def own_digest_fits(data: bytes) -> bool:
    body, mark, tail = data.rpartition(b',\n"manifest_digest":')
    return bool(mark) and tail == f'"{digest(body)}"}}\n'.encode()


PARSED_WHOLE_BYTES = 4096
"""Of a tensor's line, where few chunks aren't worth parsing apart."""


class Lines(Mapping[str, Any]):
    """A section whose tensors are text, a line each, until they are asked for; then only their chunks are text."""

    def __init__(self, lines: Mapping[str, bytes]) -> None:
        self._lines = lines

    def __getitem__(self, name: str) -> Any:
        line = self._lines[name]
        if len(line) <= PARSED_WHOLE_BYTES:
            return json.loads(line)
        head, found, chunks = line.partition(b',"chunks":[')
        if found and (chunks.endswith(b"}]}") or chunks == b"]}"):  # they come last
            with contextlib.suppress(ValueError):  # those words may be a part of something else
                return {**json.loads(head + b"}"), "chunks": b"[" + chunks[:-1]}
        return json.loads(line)

    def text(self, name: str) -> str:
        return self._lines[name].decode()

    def __contains__(self, name: object) -> bool:
        return name in self._lines

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


_TENSOR_NAME = re.compile(rb'("(?:[^"\\]|\\.)*"):')


def parse(data: bytes) -> Any:
    """The manifest's JSON.

    A large run's has hundreds of thousands of chunks, which take seconds and hundreds of megabytes to parse, and a rank
    needs few of them: where the tensors are laid out a line each, as :meth:`Manifest.to_bytes` does, they are left as
    text until they are asked for.
    """
    sections: dict[str, Lines] = {}
    head, position = b"", 0
    for name in ("model", "optimizer"):
        opening = f'\n"{name}":{{\n'.encode()
        begin = data.find(opening, position)
        if begin < 0:
            continue
        begin += len(opening)
        end = data.find(b"\n}", begin)
        lines = _tensor_lines(data[begin:end])
        if end < 0 or lines is None:
            return json.loads(data)
        sections[name] = lines
        head += data[position:begin]
        position = end + 1
    raw = json.loads(head + data[position:])
    if not isinstance(raw, dict) or any(raw.get(name) != {} for name in sections):
        return json.loads(data)
    return {**raw, **sections}


def _tensor_lines(text: bytes) -> Lines | None:
    """A section's inside, or None if it isn't a tensor to a line."""
    found = {}
    for line in text.split(b"\n"):
        name = _TENSOR_NAME.match(line)
        value = line[name.end() :].removesuffix(b",") if name is not None else b""
        if name is None or value[:1] != b"{" or value[-1:] != b"}":
            return None
        found[json.loads(name[1])] = value
    return Lines(found)


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def block_of_lines(name: str, items: list[str], brackets: str) -> str:
    inner = ("\n" + ",\n".join(items) + "\n") if items else ""
    return f'"{name}":{brackets[0]}{inner}{brackets[1]}'
