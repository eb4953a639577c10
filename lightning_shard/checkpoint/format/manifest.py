"""The manifest: every file, every tensor, and where each chunk of it lies. See ``docs/format.md`` for the JSON.

Only this module knows the JSON's field names. Chunks are parsed when a tensor is first asked for: a large run has
hundreds of thousands of them, and a rank needs few.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_shard.checkpoint.boxes import Box, intersection
from lightning_shard.checkpoint.format.blocks import DIGEST_ALGORITHM, DIGEST_HEX_CHARS, Digest, digest
from lightning_shard.checkpoint.format.header import DTYPES, item_bytes
from lightning_shard.checkpoint.format.text import Lines, block_of_lines, dump, own_digest_fits, parse
from lightning_shard.errors import CorruptCheckpointError, FormatVersionError

FORMAT = "lightning_shard"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


# What we write, and so what we may remove. The last part of the stem is the attempt.
OWN_FILE = re.compile(r"(model|optimizer|trainer)/(rank-\d{5,}|state)-([0-9a-f]{12})\.(safetensors|json)")


@dataclass(frozen=True)
class FileEntry:
    """One file. ``header_bytes`` is 0 for JSON files, whose digest covers the whole file; else it covers the header."""

    path: str
    bytes: int
    header_bytes: int = 0
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and its bytes (row-major) in a file.

    ``offsets`` and ``sizes`` are in elements, one per dim; ``begin`` and ``end`` are bytes from the start of the file;
    ``digests`` holds one digest per block of ``block_bytes`` counted from ``begin``, or nothing.
    """

    file: int
    begin: int
    end: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digests: str = ""

    def block_digest(self, block: int) -> Digest:
        return self.digests[block * DIGEST_HEX_CHARS : (block + 1) * DIGEST_HEX_CHARS]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its dtype by the format's name, its global shape and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)

    def overlapping(self, box: Box) -> list[tuple[Chunk, Box]]:
        """The chunks that hold a part of the box, each with that part."""
        chunks = self.chunks.near(box) if isinstance(self.chunks, _Chunks) else self.chunks
        parts = ((chunk, intersection(chunk.offsets, chunk.sizes, box)) for chunk in chunks)
        return [(chunk, part) for chunk, part in parts if part is not None]


class _Chunks(Sequence[Chunk]):
    """Chunks that are checked when they are looked at, and not kept: large runs have many, and a rank needs few.

    Args:
        load: Gives them as JSON, from text each time where the manifest is kept as text.
    """

    def __init__(self, load: Callable[[], list[Any]], parse: Callable[[Any], Chunk]) -> None:
        self._load = load
        self._parse = parse

    def __len__(self) -> int:
        return len(self._load())

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[Chunk]:
        return map(self._parse, self._load())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def near(self, box: Box) -> list[Chunk]:
        """Those that may overlap with the box: one where it is that very box, as on the layout that saved."""
        loaded = self._load()
        offsets, sizes = list(box.offsets), list(box.sizes)
        near = []
        for raw in loaded:
            try:
                if raw["sizes"] == sizes and raw["offsets"] == offsets:
                    return [self._parse(raw)]
                outside = intersection(raw["offsets"], raw["sizes"], box) is None
            except (KeyError, TypeError, ValueError):
                outside = False  # the parser tells what is wrong
            if not outside:
                near.append(raw)
        return [self._parse(raw) for raw in near]


class Section(Mapping[str, TensorEntry]):
    """The tensors of one section by name; an alias gives the entry of the tensor that it shares storage with."""

    def __init__(self, raw: Mapping[str, Any], manifest: Manifest, title: str) -> None:
        self.raw = raw
        self._manifest = manifest
        self._title = title
        self._parsed: dict[str, tuple[TensorEntry, str | None]] = {}

    def __getitem__(self, name: str) -> TensorEntry:
        return self._parse(name)[0]

    def alias_of(self, name: str) -> str | None:
        """The tensor that this name is another one of, if it is."""
        return self._parse(name)[1]

    def _parse(self, name: str) -> tuple[TensorEntry, str | None]:
        known = self._parsed.get(name)
        if known is not None:
            return known
        title = f"{self._title} tensor {name!r}"
        try:
            raw = self.raw[name]
            target = raw.get("same_as") if isinstance(raw, dict) else None
            lost = target is not None and (target not in self.raw or "same_as" in self.raw[target])
        except (ValueError, TypeError) as error:
            raise self._manifest.corrupt(f"{title} is damaged: {error}") from error
        if target is None:
            entry = self._manifest.parse_tensor(title, raw)
        else:
            if lost:
                raise self._manifest.corrupt(f"{title} is an alias of {target!r}: no tensor")
            entry = self[target]
        self._parsed[name] = entry, target
        return entry, target

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


@dataclass
class Manifest:
    """A parsed manifest. ``model``, ``optimizer``, ``trainer`` and ``ranks[r]`` are sections of tensors."""

    attempt: str
    files: list[FileEntry]
    layout: Any = None
    world_size: int = 1
    writer: str = ""
    format_version: int = FORMAT_VERSION
    block_bytes: int = 0
    """The digests' grid; 0 where there are none."""
    state_file: int | None = None
    """The index of ``trainer/state-….json``."""
    raw_sections: dict[str, Any] = field(default_factory=dict)
    source: str = MANIFEST_NAME
    """Where it was read from, for errors."""
    intact: bool | None = None
    """Whether the manifest's own digest fits; None where it carries none."""

    def __post_init__(self) -> None:
        raw = self.raw_sections
        self.model = Section(raw.get("model", {}), self, "model")
        self.optimizer = Section(raw.get("optimizer", {}), self, "optimizer")
        self.trainer = Section(raw.get("trainer", {}), self, "trainer")
        self.ranks = {int(rank): Section(value, self, f"rank {rank}") for rank, value in raw.get("ranks", {}).items()}

    def sections(self) -> dict[str, Section]:
        """Every section by its title: ``model``, ``optimizer``, ``trainer``, ``rank 0`` …"""
        all_ranks = {f"rank {rank}": section for rank, section in sorted(self.ranks.items())}
        return {"model": self.model, "optimizer": self.optimizer, "trainer": self.trainer, **all_ranks}

    def corrupt(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.source}: {what}.")

    # -- to and from bytes --------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The file's bytes: one JSON object on lines of one file or tensor each, its own digest last."""
        head: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "writer": self.writer,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "layout": self.layout,
            "digest": {"algorithm": DIGEST_ALGORITHM, "block_bytes": self.block_bytes} if self.block_bytes else None,
        }
        lines = [f"{dump(key)}:{dump(value)}" for key, value in head.items()]
        lines.append(block_of_lines("files", [dump(_file_to_json(file)) for file in self.files], "[]"))
        lines.append(f'"state_file":{dump(self.state_file)}')
        for name in ("model", "optimizer", "trainer"):
            section = self.raw_sections.get(name, {})
            value_of = section.text if isinstance(section, Lines) else lambda key, raw=section: dump(raw[key])
            lines.append(block_of_lines(name, [f"{dump(key)}:{value_of(key)}" for key in section], "{}"))
        ranks = self.raw_sections.get("ranks", {})
        lines.append(block_of_lines("ranks", [f"{dump(str(rank))}:{dump(ranks[rank])}" for rank in ranks], "{}"))
        body = ("{" + ",\n".join(lines)).encode()
        return body + f',\n"manifest_digest":"{digest(body)}"}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = MANIFEST_NAME) -> Manifest:
        """Parse and check a manifest.

        Raises:
            FormatVersionError: Written by a newer version of the format.
            CorruptCheckpointError: Not a manifest, torn, or one that names files outside of the checkpoint.
        """
        try:
            raw = parse(data)
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{source} is not valid JSON ({error}): it is damaged, use another checkpoint."
            ) from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise CorruptCheckpointError(f"{source} is not a manifest of this format: it has no format={FORMAT!r}.")
        version = raw.get("format_version")
        if not isinstance(version, int) or version < 1:
            raise CorruptCheckpointError(f"{source} has format_version {version!r}, which is no version.")
        if version > FORMAT_VERSION:
            raise FormatVersionError(
                f"{source} has format version {version}, and this program reads up to {FORMAT_VERSION}: upgrade"
                f" lightning-shard (it was written by {raw.get('writer') or 'an unnamed writer'})."
            )
        intact = own_digest_fits(data) if "manifest_digest" in raw else None
        try:
            grid = raw.get("digest") or {}
            if grid and grid["algorithm"] != DIGEST_ALGORITHM:
                raise _unknown(f"{source} has digests of a kind unknown here, {grid['algorithm']!r}", intact)
            manifest = cls(
                attempt=str(raw["attempt"]),
                files=[_file_from_json(file) for file in raw["files"]],
                layout=raw.get("layout"),
                world_size=int(raw.get("world_size", 1)),
                writer=str(raw.get("writer", "")),
                format_version=version,
                block_bytes=int(grid["block_bytes"]) if grid else 0,
                state_file=raw.get("state_file"),
                raw_sections={name: raw.get(name, {}) for name in ("model", "optimizer", "trainer", "ranks")},
                source=source,
                intact=intact,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(f"{source} is damaged: {type(error).__name__} {error}.") from error
        manifest._check_files()
        return manifest

    def _check_files(self) -> None:
        sections = (*self.raw_sections.values(), *self.raw_sections["ranks"].values())
        if not all(isinstance(section, Mapping) for section in sections):
            raise self.corrupt("a section of it is no object")
        for file in self.files:
            if not is_safe_path(file.path):
                raise self.corrupt(f"it names the file {file.path!r}, which is not inside of the checkpoint")
            if not 0 <= file.header_bytes <= file.bytes:
                raise self.corrupt(f"{file.path} has {file.bytes} bytes and a header of {file.header_bytes}")
        if self.state_file is not None and not (
            isinstance(self.state_file, int) and 0 <= self.state_file < len(self.files)
        ):
            raise self.corrupt(f"state_file is {self.state_file!r}, and there are {len(self.files)} files")
        if self.block_bytes < 0 or self.block_bytes % 64:
            raise self.corrupt(f"digests have blocks of {self.block_bytes} bytes, which is no multiple of 64")

    def parse_tensor(self, title: str, raw: Any) -> TensorEntry:
        """A tensor's entry, with every number checked against the shape, the dtype and the file's size.

        Args:
            title: For errors.
            raw: Its JSON; its chunks may still be text.
        """
        try:
            dtype, shape = str(raw["dtype"]), tuple(int(size) for size in raw["shape"])
            if dtype not in DTYPES:
                raise _unknown(f"{self.source}: {title} has dtype {dtype!r}, which is unknown here", self.intact)
            if min(shape, default=0) < 0:
                raise ValueError(f"shape {shape}")
            chunks = raw["chunks"]
            if not isinstance(chunks, list | bytes):
                raise TypeError("its chunks are no list")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise self._damaged(title, error) from error

        def load() -> list[Any]:
            try:
                return chunks.copy() if isinstance(chunks, list) else json.loads(chunks)
            except ValueError as error:
                raise self._damaged(title, error) from error

        return TensorEntry(dtype, shape, _Chunks(load, partial(self._parse_chunk, title, shape, item_bytes(dtype))))

    def _damaged(self, title: str, error: Exception) -> CorruptCheckpointError:
        return self.corrupt(f"{title} is damaged: {type(error).__name__} {error}")

    def _parse_chunk(self, title: str, shape: tuple[int, ...], width: int, raw: Any) -> Chunk:
        try:
            return self._checked_chunk(title, shape, width, raw)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise self._damaged(title, error) from error

    def _checked_chunk(self, title: str, shape: tuple[int, ...], width: int, raw: Any) -> Chunk:
        number, (begin, end) = raw["file"], raw["bytes"]
        offsets, sizes = tuple(raw["offsets"]), tuple(raw["sizes"])
        digests = raw.get("digests", "")
        for value in (number, begin, end, *offsets, *sizes):
            if type(value) is not int:
                raise TypeError(f"{value!r} is no integer")
        if type(digests) is not str:
            raise TypeError(f"digests {digests!r}")
        if not 0 <= number < len(self.files):
            raise self.corrupt(f"{title} refers to file {number} of {len(self.files)}")
        inside = len(offsets) == len(sizes) == len(shape)
        nbytes = width
        for offset, size, whole in zip(offsets, sizes, shape):
            inside = inside and 0 <= offset <= offset + size <= whole
            nbytes *= size
        if not inside:
            raise self.corrupt(f"{title} of shape {shape} has a chunk at {offsets} of {sizes}")
        file = self.files[number]
        if end - begin != nbytes or not file.header_bytes <= begin <= end <= file.bytes:
            raise self.corrupt(f"{title} has a chunk at bytes {begin}..{end} of {file.path}")
        if digests:
            blocks = -(-nbytes // self.block_bytes) if self.block_bytes else 0
            if len(digests) != blocks * DIGEST_HEX_CHARS:
                raise self.corrupt(f"{title} has {len(digests)} digits of digests for {blocks} blocks")
        return Chunk(number, begin, end, offsets, sizes, digests)


def tensor_to_json(dtype: str, shape: tuple[int, ...], chunks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "chunks": chunks}


def chunk_to_json(chunk: Chunk, file: int) -> dict[str, Any]:
    """``file`` is the index in the manifest, which the chunk's writer didn't know."""
    entry: dict[str, Any] = {
        "file": file,
        "bytes": (chunk.begin, chunk.end),
        "offsets": chunk.offsets,
        "sizes": chunk.sizes,
    }
    if chunk.digests:
        entry["digests"] = chunk.digests
    return entry


def is_safe_path(path: str) -> bool:
    """Whether a file named in a manifest is surely inside of the checkpoint's directory."""
    return (
        0 < len(path) <= 1024
        and not any(char in path for char in "\\:?#*[]\0\n")
        and all(part not in ("", ".", "..") for part in path.split("/"))
        and path != MANIFEST_NAME
    )


def _file_to_json(file: FileEntry) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": file.path, "bytes": file.bytes}
    if file.header_bytes:
        entry["header_bytes"] = file.header_bytes
    if file.digest:
        entry["digest"] = file.digest
    return entry


def _file_from_json(raw: Mapping[str, Any]) -> FileEntry:
    digest_text = raw.get("digest")
    return FileEntry(
        str(raw["path"]),
        int(raw["bytes"]),
        int(raw.get("header_bytes", 0)),
        None if digest_text is None else str(digest_text),
    )


def _unknown(what: str, intact: bool | None) -> FormatVersionError | CorruptCheckpointError:
    """The error for a word that only a newer version could have written, or damage."""
    if intact is False:
        return CorruptCheckpointError(f"{what}, and it differs from its own digest: it is damaged.")
    return FormatVersionError(f"{what}: upgrade lightning-shard.")
