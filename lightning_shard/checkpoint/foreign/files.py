"""Reads other programs' files as checkpoints: safetensors files, alone or with an index, and torch's own files.

A manifest without digests is made from their headers; ``read``, ``load``, ``inspect`` and ``gather`` then work on it as
on any other.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_shard.checkpoint.foreign import lightning_ckpt
from lightning_shard.checkpoint.foreign.torchfile import MAGIC, Archive, read_archive
from lightning_shard.checkpoint.format.chunks import Chunk, TensorEntry, rows_of
from lightning_shard.checkpoint.format.header import DTYPES, MAX_HEADER_BYTES, layout_fault, loads, parse_header, text
from lightning_shard.checkpoint.format.manifest import FileEntry, Manifest, Section, is_safe_path
from lightning_shard.checkpoint.format.typed_json import encode
from lightning_shard.checkpoint.store import Store, open_store, parted, read_range
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FIRST_BYTES = 2**16
NOT_A_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Found(NamedTuple):
    """What the first rank has found at a path, in the form that is broadcast to the others."""

    root: str
    """The directory of the files."""
    manifest: bytes
    state: Any = None
    """The trainer state of another program's file, which has it inside, not in a file of its own; as typed JSON."""
    foreign: bool = False
    """Whether the files are another program's."""
    table: bytes | None = None
    """The bytes of the table; None before they are read."""


def find(path: str, storage_options: dict[str, Any] | None) -> Found | None:
    """Find a safetensors file, a folder of them, or torch's file at a path; None if there is none.

    Raises:
        CheckpointError: The file is damaged, or holds values that need code that it names.
    """
    folder = open_store(path, storage_options)
    if _head(folder, SINGLE) is not None:  # if both exist, transformers takes the single file, too
        return _safetensors(path, folder, {SINGLE: None})
    index = _content(folder, INDEX)
    if index is not None:
        return _safetensors(path, folder, _indexed(index, f"{path}/{INDEX}"))
    parent, name = parted(path)
    beside = open_store(parent, storage_options)
    head = _head(beside, name) if name else None
    if head is None:
        return None
    if head[:4] == MAGIC:
        return _torch(path, beside, name)
    if name.endswith(".index.json"):
        return _safetensors(path, beside, _indexed(beside.read(name), path))
    if name.endswith(".safetensors") or head[8:9] == b"{":
        return _safetensors(path, beside, {name: None})
    return None


def _content(store: Store, name: str) -> bytes | None:
    with contextlib.suppress(*NOT_A_FILE):
        return store.read(name)
    return None


def _head(store: Store, name: str) -> bytes | None:
    """The first bytes of a file; None if there is no such file."""
    with contextlib.suppress(*NOT_A_FILE):
        return bytes(read_range(store, name, 0, min(_FIRST_BYTES, store.size(name))))
    return None


# -- safetensors ------------------------------------------------------------------------------------------------------


def _indexed(data: bytes, source: str) -> dict[str, set[str] | None]:
    """Parse an index: the tensors' names that it lists for each file. All files must be in its folder."""
    files: dict[str, set[str]] = {}
    try:
        for name, file in dict(loads(data)["weight_map"]).items():
            if not is_safe_path(text(file, f"the file of {name!r:.60}")):
                raise ValueError(f"it names the file {file!r:.80}, which is not beside it")
            files.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{source} is no index of files: {type(error).__name__} {error}.") from error
    return {**files}


def _found(store: Store, manifest: Manifest, state: Any = None) -> Found:
    """Describe files by a manifest made for them, whose tensors' chunks are given."""
    entries = [entry for section in manifest.sections().values() for _, entry in section.own()]
    table = bytes(manifest.with_rows(rows_of(entries)).chunks.table.data)
    return Found(store.root, manifest.to_bytes(), state, foreign=True, table=table)


def _safetensors(path: str, store: Store, expected: Mapping[str, set[str] | None]) -> Found:
    """Describe safetensors files; ``expected``: for each file, the names to take, or None for all."""
    files: list[FileEntry] = []
    model: dict[str, TensorEntry] = {}
    for number, (file, names) in enumerate(sorted(expected.items())):
        source = f"{store.root}/{file}"
        head = _head(store, file)
        if head is None:
            raise CorruptCheckpointError(f"{source} is missing, which the index beside it lists.")
        size = store.size(file)
        length = 8 + struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else size + 1
        if length > min(size, MAX_HEADER_BYTES):
            raise CorruptCheckpointError(f"{source} is no whole safetensors file: its header is beyond its end.")
        head = head[:length] + (read_range(store, file, len(head), length) if length > len(head) else b"")
        entries, _ = parse_header(head, source)
        if (fault := layout_fault(entries.values(), length, size)) is not None:
            where = f"{fault[0]!r}: " if fault[0] is not None else ""
            raise CorruptCheckpointError(f"{source} is no whole safetensors file: {where}{fault[1]}.")
        lacking = sorted((names or set()) - entries.keys())
        if lacking:
            raise CorruptCheckpointError(f"{source} lacks {lacking[0]!r}, which the index beside it lists.")
        files.append(FileEntry(file, size, length))
        for name, entry in entries.items():
            if names is not None and name not in names:
                continue
            if entry.dtype not in DTYPES:
                raise UnsupportedStateError(f"{source}: {name!r} has dtype {entry.dtype!r}, which is unknown here.")
            chunk = Chunk(number, entry.begin, entry.end, (0,) * len(entry.shape), entry.shape)
            model[name] = TensorEntry(entry.dtype, entry.shape, given=(chunk,))
    return _found(store, Manifest("", files, writer="safetensors", model=Section(model), source=path))


# -- torch ------------------------------------------------------------------------------------------------------------


def _torch(path: str, store: Store, name: str) -> Found:
    size = store.size(name)
    with io.BufferedReader(_StoreFile(store, name, size), _FIRST_BYTES) as file:
        archive = read_archive(file, path)
    try:
        model, optimizer, rest = _take_apart(archive.content, path)
        state, others = encode(rest, lambda name, tensor: None)  # stored already, so storable
        sections = {"model": model, "optimizer": optimizer, "trainer": others}
        entries: Any = {title: _entries(section, archive) for title, section in sections.items()}
    except CheckpointError:
        raise
    except Exception as error:  # the content isn't as Lightning and torch save it
        raise CorruptCheckpointError(
            f"{path} isn't as Lightning or torch saves a checkpoint: {type(error).__name__} {error}."
        ) from error
    return _found(store, Manifest("", [FileEntry(name, size)], writer="torch", source=path, **entries), state)


def _take_apart(content: Any, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}: a checkpoint is a dict of tensors.")
    if isinstance(content.get("state_dict"), Mapping):
        return lightning_ckpt.take_apart(content)
    leaves = list(_leaves(content, ""))
    tensors = dict(leaves)
    if len(tensors) != len(leaves):
        raise CheckpointError(f"{path} has two tensors that get the same name when nested keys are joined by '.'.")
    return tensors, {}, None


def _entries(tensors: Mapping[str, Tensor], archive: Archive) -> Section:
    """A section of the manifest; tensors that are the same bytes of the file become aliases."""
    section: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    known: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or any("\ud800" <= character <= "\udfff" for character in name):
            raise CheckpointError(f"A tensor is named {name!r:.60}: names must be strings that UTF-8 has.")
        entry = archive.stored_as(name, tensor)
        first = known.setdefault((entry.dtype, entry.shape, entry.given), name) if tensor.numel() else name
        if first == name:
            section[name] = entry
        else:
            aliases[name] = first
    return Section(section, aliases)


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, with keys joined by ``.``; other values are left out."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


class _StoreFile(io.RawIOBase):
    """A seekable, read-only file object over a store's file."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._name, self._size, self._at = store, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        if memory.nbytes:
            with self._store.reading(self._name) as read:
                read([(self._at, memory)])
        self._at += memory.nbytes
        return memory.nbytes
