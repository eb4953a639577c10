"""``verify``: whether every byte of a checkpoint is there and is what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning_shard.checkpoint.format.blocks import DIGEST_HEX_CHARS, digest
from lightning_shard.checkpoint.format.decode import parse
from lightning_shard.checkpoint.format.header import CARRIERS, HeaderEntry, layout_fault, parse_header
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, Chunk, FileEntry, Section, TensorEntry
from lightning_shard.checkpoint.loading.open import read
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.store import as_path
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, FormatVersionError


@dataclass(frozen=True)
class Fault:
    """Something wrong: in which file, with which tensor if with one, and what."""

    file: str
    tensor: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {f'{self.tensor!r}: ' if self.tensor is not None else ''}{self.what}"


@dataclass
class VerifyReport:
    """What was checked, and what is wrong. ``digests`` tells whether the bytes themselves could be checked, and
    ``manifest_digest`` whether the manifest could."""

    path: str
    files: int = 0
    tensors: int = 0
    bytes: int = 0
    digests: bool = True
    manifest_digest: bool = True
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        checked = f"{self.files} files, {self.tensors} tensors, {self.bytes:,} bytes"
        depth = "" if self.digests else " (written without digests: sizes and places checked, not the bytes)"
        depth += "" if self.manifest_digest else " (the manifest has no digest of its own)"
        if self.ok:
            return f"{self.path}: sound: {checked}{depth}"
        return "\n".join([f"{self.path}: {len(self.faults)} faults in {checked}{depth}", *map(str, self.faults)])


def verify(
    path: str | os.PathLike[str],
    *,
    storage_options: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check the manifest's own digest, every file's size and header, every chunk's digests, and that the chunks of
    every tensor cover it, each element once.

    Raises:
        CheckpointNotFoundError: No manifest there.
        FormatVersionError: Written by a newer version of the format.
    """
    report = VerifyReport(as_path(path))
    try:
        checkpoint = read(path, storage_options=storage_options)
        sections = checkpoint.manifest.sections()
    except CorruptCheckpointError as error:
        report.faults.append(Fault(MANIFEST_NAME, None, str(error)))
        return report
    manifest = checkpoint.manifest
    report.digests = bool(manifest.block_bytes)
    report.files = len(manifest.files)
    report.manifest_digest = manifest.signed
    chunks: list[list[tuple[str, TensorEntry, Chunk]]] = [[] for _ in manifest.files]
    for name, entry in _tensors(sections, report):
        report.tensors += 1
        for chunk in entry.chunks:
            chunks[chunk.file].append((name, entry, chunk))
    if manifest.block_bytes:
        chunks = [_apart(own, file, report) for file, own in zip(manifest.files, chunks, strict=True)]
    total = sum(file.bytes for file in manifest.files)

    def advance(faults: list[Fault], nbytes: int) -> None:
        report.faults += faults
        report.bytes += nbytes
        if progress is not None:
            progress(report.bytes, total)

    with ThreadPoolExecutor(checkpoint.store.requests, thread_name_prefix="checkpoint-verify") as pool:
        stretches: list[_Stretch] = []
        checked = pool.map(partial(_check_file, checkpoint), manifest.files, chunks)
        for file, own, (faults, readable) in zip(manifest.files, chunks, checked, strict=True):
            found = list(_stretches(checkpoint, file, own)) if readable else []
            stretches += found
            advance(faults, file.bytes - sum(stretch.end - stretch.begin for stretch in found))
        for stretch, faults in zip(stretches, pool.map(partial(_check_stretch, checkpoint), stretches), strict=True):
            advance(faults, stretch.end - stretch.begin)
    if not report.faults:
        try:
            checkpoint.trainer_state(lenient=True)
        except CheckpointError as error:
            report.faults.append(Fault("trainer state", None, str(error)))
    return report


def _tensors(sections: Mapping[str, Section], report: VerifyReport) -> Iterator[tuple[str, TensorEntry]]:
    """Every tensor that has bytes of its own; what can't be parsed is a fault."""
    for title, section in sections.items():
        for name in section:
            label = name if title == "model" else f"{title}: {name}"
            try:
                entry = section[name]
                if section.alias_of(name) is None:
                    yield label, replace(entry, chunks=tuple(iter(entry.chunks)))
            except FormatVersionError:
                raise
            except CheckpointError as error:
                report.faults.append(Fault(MANIFEST_NAME, label, str(error)))


def _apart(
    chunks: list[tuple[str, TensorEntry, Chunk]], file: FileEntry, report: VerifyReport
) -> list[tuple[str, TensorEntry, Chunk]]:
    """A file's chunks but for those that share bytes with one before them, which are faults: no byte is read twice."""
    kept: list[tuple[str, TensorEntry, Chunk]] = []
    for item in sorted(chunks, key=lambda item: (item[2].begin, item[2].end)):
        name, _, chunk = item
        if kept and chunk.begin < kept[-1][2].end:
            what = f"bytes {chunk.begin:,} to {chunk.end:,} are also those of {kept[-1][0]!r}"
            report.faults.append(Fault(file.path, name, what))
        else:
            kept.append(item)
    return kept


def _check_file(
    checkpoint: Checkpoint, file: FileEntry, chunks: list[tuple[str, TensorEntry, Chunk]]
) -> tuple[list[Fault], bool]:
    """Size and header; with what is wrong, whether the tensors' bytes can be looked at."""
    faults: list[Fault] = []
    try:
        size = checkpoint.store.size(file.path)
        if size != file.bytes:
            faults.append(Fault(file.path, None, f"has {size:,} bytes, and {file.bytes:,} were written"))
            if size < file.bytes or not file.header_bytes:
                return faults, False
        if not file.header_bytes:
            if file.path.endswith(".json"):
                faults += _check_json(checkpoint, file)
            return faults, False
        header = _bytes(checkpoint, file, 0, file.header_bytes)
        if file.digest is not None and digest(header) != file.digest:
            what = f"its header (the first {file.header_bytes} bytes) differs from its digest"
            return [*faults, Fault(file.path, None, what)], False
        entries, _ = parse_header(bytes(header), file.path)
        return [*faults, *_check_header(file, list(entries.values()), chunks)], True
    except FileNotFoundError:
        return [*faults, Fault(file.path, None, "is missing")], False
    except (OSError, CheckpointError) as error:
        return [*faults, Fault(file.path, None, str(error))], False


@dataclass(frozen=True)
class _Stretch:
    """Bytes of one chunk that are read at once, and the digests of the blocks in them."""

    file: FileEntry
    name: str
    begin: int
    end: int
    digests: tuple[str, ...]


def _stretches(
    checkpoint: Checkpoint, file: FileEntry, chunks: list[tuple[str, TensorEntry, Chunk]]
) -> Iterator[_Stretch]:
    grid = checkpoint.manifest.block_bytes
    blocks = max(1, checkpoint.store.step_bytes // grid) if grid else 0
    for name, _, chunk in chunks:
        count = len(chunk.digests) // DIGEST_HEX_CHARS
        for first in range(0, count, blocks or 1):
            last = min(first + blocks, count)
            begin, end = chunk.begin + first * grid, min(chunk.begin + last * grid, chunk.end)
            yield _Stretch(file, name, begin, end, tuple(chunk.block_digest(block) for block in range(first, last)))


def _check_stretch(checkpoint: Checkpoint, stretch: _Stretch) -> list[Fault]:
    grid = checkpoint.manifest.block_bytes
    try:
        data = _bytes(checkpoint, stretch.file, stretch.begin, stretch.end)
    except (OSError, CheckpointError) as error:
        return [Fault(stretch.file.path, stretch.name, str(error))]
    faults = []
    for index, expected in enumerate(stretch.digests):
        block = data[index * grid : (index + 1) * grid]
        if digest(block) != expected:
            begin = stretch.begin + index * grid
            what = f"bytes {begin:,} to {begin + block.nbytes:,} differ from their digest"
            faults.append(Fault(stretch.file.path, stretch.name, what))
    return faults


def _check_header(
    file: FileEntry, entries: list[HeaderEntry], chunks: list[tuple[str, TensorEntry, Chunk]]
) -> Iterator[Fault]:
    """The header and the manifest must tell of the same bytes, and the header of all of them."""
    fault = layout_fault(entries, file.header_bytes, file.bytes)
    if fault is not None:
        yield Fault(file.path, *fault)
        return
    declared = {(entry.begin, entry.end, entry.dtype, entry.shape) for entry in entries}
    for name, tensor, chunk in chunks:
        carrier, extra = CARRIERS.get(tensor.dtype, (tensor.dtype, ()))
        if (chunk.begin, chunk.end, carrier, (*chunk.sizes, *extra)) not in declared:
            where = f"bytes {chunk.begin:,} to {chunk.end:,}"
            yield Fault(file.path, name, f"the header has no {carrier} of shape {chunk.sizes} at {where}")


def _check_json(checkpoint: Checkpoint, file: FileEntry) -> Iterator[Fault]:
    data = checkpoint.store.read(file.path)
    if file.digest is not None and digest(data) != file.digest:
        yield Fault(file.path, None, "differs from its digest")
    else:
        parse(data, file.path)


def _bytes(checkpoint: Checkpoint, file: FileEntry, begin: int, end: int) -> memoryview:
    buffer = memoryview(bytearray(end - begin))
    with checkpoint.store.reading(file.path) as read_into:
        read_into([(begin, buffer)])
    return buffer
