"""The manifest: every file and every tensor; the chunks are in the table that it names. Specified in docs/format.md.

Only this module knows the JSON's field names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_shard.checkpoint.format.blocks import DIGEST_ALGORITHM, DIGEST_BYTES, Digest, digest
from lightning_shard.checkpoint.format.chunks import ChunkTable, TensorEntry
from lightning_shard.checkpoint.format.header import DTYPES, METADATA, integer, integers, item_bytes, loads, text
from lightning_shard.checkpoint.format.table import Rows, Table, TableFile, table_file
from lightning_shard.errors import CorruptCheckpointError, FormatVersionError

FORMAT = "lightning_shard"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
MAX_DIMS = 64
MAX_TENSOR_BYTES = 2**63 - 1
MAX_BLOCK_BYTES = 2**28
"""A block is read whole, so this bounds the memory that a reader needs."""
OWN_DIGEST = "manifest_digest"
OWN_WRITER = "lightning_shard "
"""Prefix of ``writer`` in manifests that this program wrote, which have their own digest."""
TENSOR_SECTIONS = ("model", "optimizer", "trainer")
MAX_PATH_CHARS, MAX_NAME_BYTES = 1024, 255
_SECTIONS = (*TENSOR_SECTIONS, "ranks")
_FIELDS = {
    *("format", "format_version", "writer", "attempt", "world_size", "layout", "digest", "files", "table"),
    "state_file",
    *_SECTIONS,
    OWN_DIGEST,
}
_HASH = re.compile(r"[0-9a-f]{32}")
_END = f',\n"{OWN_DIGEST}":'.encode()
_DIGESTS = re.compile(r"[0-9a-f]*+")
_RANK = re.compile(r"0|[1-9][0-9]{0,15}")

# The paths that we write, and so may remove. The last part of the stem is the attempt.
OWN_FILE = re.compile(r"(?:(model|optimizer|trainer)/(rank-\d{5,}|state)|table)-([0-9a-f]{12})\.(safetensors|json)")


def writer_of(path: str) -> int | None:
    """The rank that wrote a file, from its name; None for a file that the first rank writes for all."""
    own = OWN_FILE.fullmatch(path)
    return int(own[2].removeprefix("rank-")) if own and own[2] not in (None, "state") else None


def table_path(attempt: str) -> str:
    return f"table-{attempt}.safetensors"


@dataclass(frozen=True)
class FileEntry:
    """One file. The digest of a safetensors file covers its header. A JSON file has ``header_bytes`` 0, and its digest
    covers the whole file."""

    path: str
    bytes: int
    header_bytes: int = 0
    digest: Digest | None = None


class Section(dict[str, TensorEntry]):
    """The tensors of one section by name; an alias maps to the entry of the tensor that it shares memory with."""

    def __init__(
        self, tensors: Mapping[str, TensorEntry] | None = None, aliases: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(tensors or {})
        self.aliases = dict(aliases or {})
        self.update({name: self[target] for name, target in self.aliases.items()})

    def alias_of(self, name: str) -> str | None:
        """The name of the tensor that ``name`` is an alias of; None if it is no alias."""
        return self.aliases.get(name)

    def own(self) -> list[tuple[str, TensorEntry]]:
        """The tensors that aren't aliases."""
        return [(name, entry) for name, entry in self.items() if name not in self.aliases]


@dataclass(eq=False)
class Manifest:
    """A manifest. ``model``, ``optimizer``, ``trainer`` and ``ranks[r]`` are sections of tensors.

    It has many attributes, as the file has (``docs/format.md``).

    Attributes:
        block_bytes: The block size of digests; 0 if there are no digests.
        state_file: The index of ``trainer/state-….json`` in ``files``.
        source: The path that it was read from, for errors.
        signed: Whether it contains its own digest.
        chunks: The table of all tensors' chunks; set by :meth:`take_table`.
    """

    attempt: str
    files: list[FileEntry]
    layout: Any = None
    world_size: int = 1
    writer: str = ""
    format_version: int = FORMAT_VERSION
    block_bytes: int = 0
    state_file: int | None = None
    model: Section = field(default_factory=Section)
    optimizer: Section = field(default_factory=Section)
    trainer: Section = field(default_factory=Section)
    ranks: dict[int, Section] = field(default_factory=dict)
    table: TableFile = field(default_factory=lambda: TableFile("", 0, ""))
    source: str = MANIFEST_NAME
    signed: bool = True
    chunks: ChunkTable = field(init=False, repr=False)

    def sections(self) -> dict[str, Section]:
        """Every section by its title: ``model``, ``optimizer``, ``trainer``, ``rank 0`` …"""
        all_ranks = {f"rank {rank}": section for rank, section in sorted(self.ranks.items())}
        return {"model": self.model, "optimizer": self.optimizer, "trainer": self.trainer, **all_ranks}

    def corrupt(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.source}: {what}.")

    # -- the table ----------------------------------------------------------------------------------------------------

    def with_rows(self, rows: Rows) -> Manifest:
        """Set the rows that the tensors' spans refer to."""
        data = rows.encode()
        self.table = table_file(table_path(self.attempt), data)
        return self.take_table(Table(self.table, self.table.path, lambda: data))

    def take_table(self, table: Table) -> Manifest:
        """Set the table that the tensors' spans refer to; its rows are checked when a tensor of them is used."""
        tensors = [(title, *tensor) for title, section in self.sections().items() for tensor in section.own()]
        files = np.array([(file.header_bytes, file.bytes) for file in self.files], np.int64).reshape(-1, 2).T
        self.chunks = ChunkTable(table, tensors, files, self.block_bytes, self.corrupt)
        return self

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
            "table": {"path": self.table.path, "bytes": self.table.bytes, "digests": self.table.digests},
        }
        fields = [f"{_dump(key)}:{_dump(value)}" for key, value in head.items()]
        fields.append(_lines("files", "[]", (_dump(_file_to_json(file)) for file in self.files)))
        fields.append(f'"state_file":{_dump(self.state_file)}')
        fields += [_lines(name, "{}", _tensors(getattr(self, name))) for name in TENSOR_SECTIONS]
        of_ranks = (f'"{rank}":{{{",".join(_tensors(section))}}}' for rank, section in self.ranks.items())
        fields.append(_lines("ranks", "{}", of_ranks))
        return signed(b"{" + ",\n".join(fields).encode())

    @classmethod
    def from_bytes(cls, data: bytes, source: str = MANIFEST_NAME, *, foreign: bool = False) -> Manifest:
        """Parse and check a manifest; its table is to be set by :meth:`take_table`.

        Args:
            data: The file's bytes.
            source: Its path, for errors.
            foreign: It describes another program's files, whose paths aren't checked.

        Raises:
            FormatVersionError: Written by another version of the format.
            CorruptCheckpointError: Not a manifest, torn, different from its own digest, or it names files outside of
                the checkpoint.
        """
        try:
            raw = loads(data)
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{source} is not valid JSON ({error}): it is damaged, use another checkpoint."
            ) from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise CorruptCheckpointError(f"{source} is not a manifest of this format: it has no format={FORMAT!r}.")
        signed_by_itself = OWN_DIGEST in raw
        if signed_by_itself and data != signed(data[: data.rfind(_END)]):
            raise CorruptCheckpointError(
                f"{source} differs from its own digest: it was damaged, or changed by hand. Use another checkpoint."
            )
        try:
            version = integer(raw.get("format_version"), "format_version", 1)
            if version != FORMAT_VERSION:
                remedy = "upgrade lightning-shard" if version > FORMAT_VERSION else "save it anew with this program"
                raise FormatVersionError(
                    f"{source} has format version {version}, and this program reads version {FORMAT_VERSION}: {remedy}"
                    f" (it was written by {raw.get('writer') or 'an unnamed writer'})."
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
                table=_table_from_json(raw["table"]),
                source=source,
                signed=signed_by_itself,
                **_sections(raw, source),
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
        paths = [*(file.path for file in self.files), self.table.path]
        for path in paths if not foreign else ():
            if not is_safe_path(path):
                raise self.corrupt(f"it names the file {path!r:.80}, which is not inside of the checkpoint")
        for file in self.files:
            if file.header_bytes > file.bytes:
                raise self.corrupt(f"{file.path} has {file.bytes} bytes and a header of {file.header_bytes}")
            if (file.digest is None) == bool(self.block_bytes):
                raise self.corrupt(f"{file.path} has {'no' if self.block_bytes else 'a'} digest, unlike the checkpoint")
        if len(set(paths)) != len(paths):
            raise self.corrupt("it names a file twice")
        if self.state_file is not None and self.files[self.state_file].header_bytes:
            raise self.corrupt(f"state_file is {self.files[self.state_file].path}, which is no JSON")


def signed(body: bytes) -> bytes:
    """Append the manifest's own digest to a JSON object without its closing brace."""
    return body + _END + f'"{digest(body)}"}}\n'.encode()


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_dump = _ENCODER.encode


def _lines(name: str, brackets: str, items: Iterable[str]) -> str:
    """``"name":[…]`` with one item per line."""
    inner = ",\n".join(items)
    return f'"{name}":{brackets[0]}\n{inner}\n{brackets[1]}' if inner else f'"{name}":{brackets}'


def _tensors(section: Section) -> list[str]:
    found = []
    for name, entry in section.items():
        value: Any = {"dtype": entry.dtype, "shape": entry.shape, "chunks": entry.span}
        if name in section.aliases:
            value = {"same_as": section.aliases[name]}
        found.append(f"{_dump(name)}:{_dump(value)}")
    return found


def is_safe_path(path: str) -> bool:
    """Whether a path in a manifest is certain to be inside the checkpoint's directory, on any store."""
    return (
        0 < len(path) <= MAX_PATH_CHARS
        and not any(char in "\\:?#*[]%\x7f" or char < " " for char in path)
        and all(part not in ("", ".", "..") and len(part.encode()) <= MAX_NAME_BYTES for part in path.split("/"))
        and path != MANIFEST_NAME
    )


def _sections(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    for name, value in raw.items():
        entries = value.values() if isinstance(value, dict) and name not in _FIELDS else ()
        if any(isinstance(entry, dict) and ("chunks" in entry or "same_as" in entry) for entry in entries):
            raise FormatVersionError(
                f"{source} has a section {name!r} of tensors, unknown here: upgrade lightning-shard."
            )
    ranks = raw["ranks"]
    if not isinstance(ranks, dict):
        raise ValueError("its section 'ranks' is no object")
    lost = next((rank for rank in ranks if not _RANK.fullmatch(rank)), None)
    if lost is not None:
        raise ValueError(f"{lost!r} is no rank")
    return {
        **{name: _section(name, raw[name], source) for name in TENSOR_SECTIONS},
        "ranks": {int(rank): _section(f"rank {rank}", tensors, source) for rank, tensors in ranks.items()},
    }


def _section(title: str, raw: Any, source: str) -> Section:
    if not isinstance(raw, dict):
        raise ValueError(f"its section {title!r} is no object")
    if METADATA in raw:
        raise ValueError(f"it has a tensor with the name {METADATA}, which no file can hold")
    tensors: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    for name, value in raw.items():
        try:
            if "same_as" not in value:
                tensors[name] = _tensor(value, f"{source}: {title} tensor {name!r}")
            elif "chunks" in value:
                raise ValueError("it is an alias, and has chunks")
            else:
                aliases[name] = text(value["same_as"], "same_as")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{title} tensor {name!r} is damaged: {type(error).__name__} {error}") from error
    for name, target in aliases.items():
        if target not in tensors:
            raise ValueError(f"{title} tensor {name!r} is an alias of {target!r}: no tensor")
    return Section(tensors, aliases)


def _tensor(raw: Any, title: str) -> TensorEntry:
    dtype, sizes, span = raw["dtype"], integers(raw["shape"], "its shape"), integers(raw["chunks"], "its chunks")
    if text(dtype, "dtype") not in DTYPES:
        raise FormatVersionError(f"{title} has dtype {dtype!r:.40}, which is unknown here: upgrade lightning-shard.")
    if len(sizes) > MAX_DIMS:
        raise ValueError(f"its shape has more than {MAX_DIMS} sizes")
    if math.prod(filter(None, sizes)) * item_bytes(dtype) > MAX_TENSOR_BYTES:
        raise ValueError("no memory could hold its shape")
    if len(span) != 2 or span[0] > span[1]:
        raise ValueError("its chunks are no range of rows")
    return TensorEntry(dtype, sizes, (span[0], span[1]))


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
    entry = {"path": file.path, "bytes": file.bytes, "header_bytes": file.header_bytes or None, "digest": file.digest}
    return {key: value for key, value in entry.items() if value is not None}


def _table_from_json(raw: Any) -> TableFile:
    size = integer(raw["bytes"], "the table's size", 8)
    file = TableFile(text(raw["path"], "the table's path"), size, text(raw["digests"], "the table's digests"))
    if not _DIGESTS.fullmatch(file.digests) or len(file.digests) != 2 * DIGEST_BYTES * file.blocks:
        raise ValueError(f"the table of {size:,} bytes has {len(file.digests)} digits of digests")
    return file


def _file_from_json(raw: Mapping[str, Any]) -> FileEntry:
    header_bytes = integer(raw["header_bytes"], "header_bytes", 8) if "header_bytes" in raw else 0
    digest = text(raw["digest"], "a file's digest") if "digest" in raw else None
    if digest is not None and not _HASH.fullmatch(digest):
        raise ValueError(f"{digest!r:.40} is no digest of a file")
    return FileEntry(text(raw["path"], "a file's path"), integer(raw["bytes"], "a file's size"), header_bytes, digest)
