"""The manifest: every file, every tensor, and the file and bytes of each of its chunks. Specified in docs/format.md.

Only this module and ``text`` know the JSON's field names. Tensors are parsed lazily, when they are first accessed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format.blocks import DIGEST_ALGORITHM, DIGEST_HEX_CHARS, Digest
from lightning_shard.checkpoint.format.chunks import Chunk, Chunks, Places, TensorEntry, Tiling, tiling_of
from lightning_shard.checkpoint.format.columns import Integers, Parsed
from lightning_shard.checkpoint.format.header import DTYPES, item_bytes
from lightning_shard.checkpoint.format.strict_json import integer, text
from lightning_shard.checkpoint.format.text import (
    OWN_DIGEST,
    OWN_WRITER,
    TENSOR_SECTIONS,
    ChunkText,
    Lines,
    Objects,
    TensorText,
    array_of_lines,
    dump,
    object_of_lines,
    object_on_a_line,
    own_digest_fits,
    parse,
    signed,
    tensor_text,
)
from lightning_shard.errors import CorruptCheckpointError, FormatVersionError

FORMAT = "lightning_shard"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_DIMS = 64
MAX_TENSOR_BYTES = 2**63 - 1
MAX_BLOCK_BYTES = 2**28
"""A block is read whole, so this bounds the memory that a reader needs."""
LARGE_BYTES = 64 * 2**20
"""In larger manifests that this program wrote, and that match their own digest, tensors' lines are checked lazily: a
rank needs few of them, and checking all takes seconds."""
KINDS_KEPT = 256
"""Size of the cache of parsed dtypes and shapes, which most tensors share with others."""
MAX_PATH_CHARS, MAX_NAME_BYTES = 1024, 255
_SECTIONS = (*TENSOR_SECTIONS, "ranks")
_FIELDS = {
    *("format", "format_version", "writer", "attempt", "world_size", "layout", "digest", "files", "state_file"),
    *_SECTIONS,
    OWN_DIGEST,
}
_HASH = re.compile(r"[0-9a-f]{32}")
_RANK = re.compile(r"0|[1-9][0-9]{0,15}")

# The paths that we write, and so may remove. The last part of the stem is the attempt.
OWN_FILE = re.compile(r"(model|optimizer|trainer)/(rank-\d{5,}|state)-([0-9a-f]{12})\.(safetensors|json)")


@dataclass(frozen=True)
class FileEntry:
    """One file. The digest of a safetensors file covers its header. A JSON file has ``header_bytes`` 0, and its digest
    covers the whole file."""

    path: str
    bytes: int
    header_bytes: int = 0
    digest: Digest | None = None


class Section(Mapping[str, TensorEntry]):
    """The tensors of one section by name; an alias maps to the entry of the tensor that it shares memory with."""

    def __init__(self, raw: Mapping[str, Any], manifest: Manifest, title: str) -> None:
        self.raw = raw
        self._manifest = manifest
        self._title = title
        self._parsed: dict[str, tuple[TensorEntry, str | None]] = {}

    def __getitem__(self, name: str) -> TensorEntry:
        return self._parse(name)[0]

    def alias_of(self, name: str) -> str | None:
        """The name of the tensor that ``name`` is an alias of; None if it is no alias."""
        return self._parse(name)[1]

    def _parse(self, name: str) -> tuple[TensorEntry, str | None]:
        known = self._parsed.get(name)
        if known is not None:
            return known
        title = f"{self._title} tensor {name!r}"
        try:
            raw = self.raw[name]
            target = text(raw["same_as"], "same_as") if _is_alias(raw) else None
            if target is not None and "chunks" in raw:
                raise ValueError("it is an alias, and has chunks")
            lost = target is not None and (target not in self.raw or _is_alias(self.raw[target]))
        except (ValueError, TypeError) as error:
            raise self._manifest.corrupt(f"{title} is damaged: {error}") from error
        if lost:
            raise self._manifest.corrupt(f"{title} is an alias of {target!r}: no tensor")
        entry = self._manifest.parse_tensor(title, raw) if target is None else self[target]
        self._parsed[name] = entry, target
        return entry, target

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


class RankSections(Mapping[int, Section]):
    """The sections of tensors that belong to a single rank, by rank. Those of a large manifest are parsed lazily."""

    def __init__(self, raw: Mapping[str, Any], manifest: Manifest) -> None:
        self._raw = raw
        self._manifest = manifest
        self._names = {int(rank): rank for rank in raw}
        self._parsed: dict[int, Section] = {}

    def __getitem__(self, rank: int) -> Section:
        name = self._names[rank]
        if rank not in self._parsed:
            try:
                section = self._raw[name]
                _check_section(name, section)
            except ValueError as error:
                raise self._manifest.corrupt(f"the section of rank {rank} is damaged: {error}") from error
            self._parsed[rank] = Section(section, self._manifest, f"rank {rank}")
        return self._parsed[rank]

    def __contains__(self, rank: object) -> bool:
        return rank in self._names

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _is_alias(raw: Any) -> bool:
    return not isinstance(raw, TensorText) and "same_as" in raw


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
    """The block size of digests; 0 if there are no digests."""
    state_file: int | None = None
    """The index of ``trainer/state-….json`` in ``files``."""
    raw_sections: dict[str, Any] = field(default_factory=dict)
    source: str = MANIFEST_NAME
    """The path that it was read from, for errors."""
    signed: bool = True
    """Whether it contains its own digest."""

    def __post_init__(self) -> None:
        raw = self.raw_sections
        self.model = Section(raw.get("model", {}), self, "model")
        self.optimizer = Section(raw.get("optimizer", {}), self, "optimizer")
        self.trainer = Section(raw.get("trainer", {}), self, "trainer")
        self.ranks = RankSections(raw.get("ranks", {}), self)

    def sections(self) -> dict[str, Section]:
        """Every section by its title: ``model``, ``optimizer``, ``trainer``, ``rank 0`` …"""
        all_ranks = {f"rank {rank}": section for rank, section in sorted(self.ranks.items())}
        return {"model": self.model, "optimizer": self.optimizer, "trainer": self.trainer, **all_ranks}

    def corrupt(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.source}: {what}.")

    # -- to and from bytes --------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The file's bytes: one JSON object with one file or tensor per line, and its own digest last."""
        head: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "writer": self.writer,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "layout": self.layout,
            "digest": {"algorithm": DIGEST_ALGORITHM, "block_bytes": self.block_bytes} if self.block_bytes else None,
        }
        parts = [b"{"]
        for key, value in head.items():
            parts.append(f"{dump(key)}:{dump(value)},\n".encode())
        parts += array_of_lines("files", (dump(_file_to_json(file)).encode() for file in self.files))
        parts.append(f',\n"state_file":{dump(self.state_file)}'.encode())
        for name in TENSOR_SECTIONS:
            parts.append(b",\n")
            parts += object_of_lines(name, _lines(self.raw_sections.get(name, {})))
        parts.append(b",\n")
        of_ranks = self.raw_sections.get("ranks", {})
        parts += object_of_lines("ranks", ((str(rank), _line_of_rank(of_ranks, rank)) for rank in of_ranks))
        return signed(*parts)

    @classmethod
    def from_bytes(cls, data: bytes, source: str = MANIFEST_NAME, *, foreign: bool = False) -> Manifest:
        """Parse and check a manifest.

        Args:
            data: The file's bytes.
            source: Its path, for errors.
            foreign: It describes another program's files, whose paths aren't checked.

        Raises:
            FormatVersionError: Written by a newer version of the format.
            CorruptCheckpointError: Not a manifest, torn, different from its own digest, or it names files outside of
                the checkpoint.
        """
        fits = own_digest_fits(data)
        try:
            raw = parse(data, at_once=not (fits and is_large(data)))
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{source} is not valid JSON ({error}): it is damaged, use another checkpoint."
            ) from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise CorruptCheckpointError(f"{source} is not a manifest of this format: it has no format={FORMAT!r}.")
        signed_by_itself = OWN_DIGEST in raw
        if signed_by_itself and not fits:
            raise CorruptCheckpointError(
                f"{source} differs from its own digest: it was damaged, or changed by hand. Use another checkpoint."
            )
        try:
            version = integer(raw.get("format_version"), "format_version", 1)
            if version > FORMAT_VERSION:
                raise FormatVersionError(
                    f"{source} has format version {version}, and this program reads up to {FORMAT_VERSION}: upgrade"
                    f" lightning-shard (it was written by {raw.get('writer') or 'an unnamed writer'})."
                )
            manifest = cls(
                attempt=text(raw["attempt"], "attempt"),
                files=[_file_from_json(file) for file in raw["files"]],
                layout=raw["layout"],
                world_size=integer(raw["world_size"], "world_size", 1),
                writer=text(raw["writer"], "writer"),
                format_version=version,
                block_bytes=_block_bytes(raw["digest"], source),
                state_file=None
                if raw["state_file"] is None
                else integer(raw["state_file"], "state_file", 0, len(raw["files"]) - 1),
                raw_sections=_sections(raw, source),
                source=source,
                signed=signed_by_itself,
            )
        except KeyError as error:
            raise CorruptCheckpointError(f"{source} is damaged: it has no {error}.") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpointError(f"{source} is damaged: {error}.") from error
        if not signed_by_itself and manifest.writer.startswith(OWN_WRITER):
            raise manifest.corrupt(
                f"it has lost its {OWN_DIGEST}, which {manifest.writer} always writes: it was damaged, or changed by"
                " hand. Use another checkpoint"
            )
        manifest._check_files(foreign)
        return manifest

    def _check_files(self, foreign: bool) -> None:
        for file in self.files:
            if not foreign and not is_safe_path(file.path):
                raise self.corrupt(f"it names the file {file.path!r:.80}, which is not inside of the checkpoint")
            if file.header_bytes > file.bytes:
                raise self.corrupt(f"{file.path} has {file.bytes} bytes and a header of {file.header_bytes}")
            if (file.digest is None) == bool(self.block_bytes):
                raise self.corrupt(f"{file.path} has {'no' if self.block_bytes else 'a'} digest, unlike the checkpoint")
        if len({file.path for file in self.files}) != len(self.files):
            raise self.corrupt("it names a file twice")
        if self.state_file is not None and self.files[self.state_file].header_bytes:
            raise self.corrupt(f"state_file is {self.files[self.state_file].path}, which is no JSON")

    def parse_tensor(self, title: str, raw: Any) -> TensorEntry:
        """Parse a tensor. Its chunks are checked lazily against the shape, the dtype and the files' sizes.

        Args:
            title: For errors.
            raw: The tensor's JSON value, or its text.
        """
        try:
            text_of = raw if isinstance(raw, TensorText) else tensor_text(raw)
            dtype, shape = _dtype_and_shape(text_of.head)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise self._damaged(title, error) from error
        if dtype not in DTYPES:
            raise FormatVersionError(
                f"{self.source}: {title} has dtype {dtype!r:.40}, which is unknown here: upgrade lightning-shard."
            )
        width = item_bytes(dtype)
        if math.prod(filter(None, shape)) * width > MAX_TENSOR_BYTES:
            raise self.corrupt(f"{title} is damaged: no memory could hold its shape")
        return TensorEntry(
            dtype,
            shape,
            Chunks(
                partial(self._chunks, title, text_of.chunks),
                partial(self._tiling, title, shape),
                partial(self._chunk, title, width),
                partial(self._fit, width),
                text_of.unchecked,
            ),
        )

    def _chunks(self, title: str, text_of: Callable[[], bytes]) -> bytes:
        try:
            return text_of()
        except ValueError as error:
            raise self._damaged(title, error) from error

    def _tiling(self, title: str, shape: tuple[int, ...], places: Places) -> Tiling:
        try:
            return tiling_of(shape, places)
        except ValueError as error:
            raise self.corrupt(f"the chunks of {title} don't make it up: {error}") from error

    def _damaged(self, title: str, error: Exception) -> CorruptCheckpointError:
        return self.corrupt(f"{title} is damaged: {type(error).__name__} {error}")

    def _chunk(self, title: str, width: int, text_of: ChunkText, box: Box) -> Chunk:
        try:
            number, begin, end = map(int, text_of[:3])
        except ValueError as error:  # int() of thousands of digits
            raise self._damaged(title, error) from error
        if number >= len(self.files):
            raise self.corrupt(f"{title} refers to file {number} of {len(self.files)}")
        file, nbytes = self.files[number], box.numel * width
        if end - begin != nbytes or not file.header_bytes <= begin <= end <= file.bytes:
            raise self.corrupt(f"{title} has a chunk at bytes {begin}..{end} of {file.path}")
        digests = text_of[4].decode()
        blocks = -(-nbytes // self.block_bytes) if self.block_bytes else 0
        if len(digests) != blocks * DIGEST_HEX_CHARS:
            raise self.corrupt(f"{title} has {len(digests)} digits of digests for {blocks} blocks")
        return Chunk(number, begin, end, box.offsets, box.sizes, digests)

    def _fit(self, width: int, parsed: Parsed, tiling: Tiling) -> bool:
        """Whether :meth:`_chunk` would accept all of a tensor's chunks (vectorized)."""
        if (parsed.files >= len(self.files)).any():
            return False
        nbytes, (begins, ends) = tiling.numels * width, parsed.spans.T
        headers, sizes = self._file_sizes[:, parsed.files]
        blocks = -(-nbytes // self.block_bytes) if self.block_bytes else 0
        return bool(
            (ends - begins == nbytes).all()
            and (headers <= begins).all()
            and (ends <= sizes).all()
            and (parsed.digits == blocks * DIGEST_HEX_CHARS).all()
        )

    def has_files_like(self, other: Manifest) -> bool:
        """Whether both manifests have the same block size, and files of equal sizes and header sizes: then chunks that
        are valid for the one's files are valid for the other's."""
        return self.block_bytes == other.block_bytes and np.array_equal(self._file_sizes, other._file_sizes)

    @cached_property
    def _file_sizes(self) -> Integers:
        """Each file's header bytes (row 0) and bytes (row 1), of shape (2, files)."""
        return np.array([(file.header_bytes, file.bytes) for file in self.files], np.int64).reshape(-1, 2).T


@lru_cache(maxsize=KINDS_KEPT)
def _dtype_and_shape(head: bytes) -> tuple[str, tuple[int, ...]]:
    """A tensor's dtype and shape, parsed from the text before its chunks."""
    raw = json.loads(head + b"}")
    dtype, shape = text(raw["dtype"], "dtype"), raw["shape"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ValueError(f"its shape is no list of up to {MAX_DIMS} sizes")
    return dtype, tuple(integer(size, "a size in its shape") for size in shape)


def _lines(section: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield a section's tensors: (name, the tensor's JSON text)."""
    for name in section:
        yield name, section.line(name) if isinstance(section, Lines) else dump(section[name]).encode()


def _line_of_rank(ranks: Mapping[str, Any], rank: str) -> bytes:
    return ranks.line(rank) if isinstance(ranks, Objects) else object_on_a_line(_lines(ranks[rank]))


def is_large(data: bytes) -> bool:
    """Whether a manifest's lines are to be checked lazily; see :data:`LARGE_BYTES`."""
    return len(data) > LARGE_BYTES


def tensor_to_json(dtype: str, shape: tuple[int, ...], chunks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "chunks": chunks}


def chunk_to_json(chunk: Chunk, file: int) -> dict[str, Any]:
    """A chunk as JSON; ``file`` is its file's index in the manifest, which replaces ``chunk.file``."""
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
    """Whether a path in a manifest is certain to be inside the checkpoint's directory, on any store."""
    return (
        0 < len(path) <= MAX_PATH_CHARS
        and not any(char in "\\:?#*[]%\x7f" or char < " " for char in path)
        and all(part not in ("", ".", "..") and len(part.encode()) <= MAX_NAME_BYTES for part in path.split("/"))
        and path != MANIFEST_NAME
    )


def _sections(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    sections = {name: raw[name] for name in _SECTIONS}
    for name, tensors in sections.items():
        _check_section(name, tensors)
    ranks = sections["ranks"]
    for rank, tensors in ranks.items() if isinstance(ranks, dict) else ():
        _check_section(rank, tensors)
    lost = next((rank for rank in ranks if not _RANK.fullmatch(rank)), None)
    if lost is not None:
        raise ValueError(f"{lost!r} is no rank")
    for name, value in raw.items():
        entries = value.values() if isinstance(value, dict) and name not in _FIELDS else ()
        if any(isinstance(entry, dict) and ("chunks" in entry or "same_as" in entry) for entry in entries):
            raise FormatVersionError(
                f"{source} has a section {name!r} of tensors, unknown here: upgrade lightning-shard."
            )
    return sections


def _check_section(name: str, tensors: Any) -> None:
    if not isinstance(tensors, Mapping):
        raise ValueError(f"its section {name!r} is no object")
    if "__metadata__" in tensors:
        raise ValueError("it has a tensor with the name __metadata__, which no file can hold")


def _block_bytes(grid: Any, source: str) -> int:
    if grid is None:
        return 0
    if text(grid["algorithm"], "the algorithm of its digests") != DIGEST_ALGORITHM:
        raise FormatVersionError(
            f"{source} has digests of a kind unknown here, {grid['algorithm']!r}: upgrade lightning-shard."
        )
    block_bytes = integer(grid["block_bytes"], "block_bytes", 64, MAX_BLOCK_BYTES)
    if block_bytes % 64:
        raise ValueError(f"its digests have blocks of {block_bytes} bytes, which is no multiple of 64")
    return block_bytes


def _file_to_json(file: FileEntry) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": file.path, "bytes": file.bytes}
    if file.header_bytes:
        entry["header_bytes"] = file.header_bytes
    if file.digest:
        entry["digest"] = file.digest
    return entry


def _file_from_json(raw: Mapping[str, Any]) -> FileEntry:
    header_bytes = integer(raw["header_bytes"], "header_bytes", 8) if "header_bytes" in raw else 0
    digest = text(raw["digest"], "a file's digest") if "digest" in raw else None
    if digest is not None and not _HASH.fullmatch(digest):
        raise ValueError(f"{digest!r:.40} is no digest of a file")
    return FileEntry(text(raw["path"], "a file's path"), integer(raw["bytes"], "a file's size"), header_bytes, digest)
