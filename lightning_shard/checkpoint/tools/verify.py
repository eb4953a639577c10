"""``verify``: checks that every byte of a checkpoint exists and is what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from lightning_shard.checkpoint.engine import each, read_blocks, thread_memory
from lightning_shard.checkpoint.format.blocks import DIGEST_BYTES, digest, digest_at
from lightning_shard.checkpoint.format.chunks import Chunk, ChunkTable
from lightning_shard.checkpoint.format.header import CARRIERS, HeaderEntry, layout_fault, parse_header
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, FileEntry
from lightning_shard.checkpoint.format.typed_json import parse
from lightning_shard.checkpoint.loading.open import read
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.memory import byte_view
from lightning_shard.checkpoint.store import as_path, read_range
from lightning_shard.errors import CheckpointError, CorruptCheckpointError


@dataclass(frozen=True)
class Fault:
    """One fault: the file, the tensor (None if it concerns no single tensor), and what is wrong."""

    file: str
    tensor: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {f'{self.tensor!r}: ' if self.tensor is not None else ''}{self.what}"


@dataclass
class VerifyReport:
    """What was checked, and what is wrong. ``digests``: whether the tensors' bytes could be checked;
    ``manifest_digest``: whether the manifest's could."""

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
    """Check the digests of the manifest and of its table, every number in them, every file's size and header, every
    chunk's digests, and that the chunks of every tensor cover it, each element exactly once.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        FormatVersionError: Written by a newer version of the format.
    """
    report = VerifyReport(as_path(path))
    try:
        checkpoint = read(path, storage_options=storage_options)
    except CorruptCheckpointError as error:
        report.faults.append(Fault(MANIFEST_NAME, None, str(error)))
        return report
    manifest, table = checkpoint.manifest, checkpoint.manifest.chunks
    report.digests = bool(manifest.block_bytes)
    report.files = len(manifest.files)
    report.manifest_digest = manifest.signed
    report.tensors = len(table.entries)
    try:
        wrong = table.faults(range(len(table.entries)))
        # another program's files have no table
        if manifest.attempt and (size := checkpoint.store.size(manifest.table.path)) != manifest.table.bytes:
            report.faults.append(Fault(manifest.table.path, None, f"has {size:,} bytes, not {manifest.table.bytes:,}"))
    except (CorruptCheckpointError, OSError) as error:
        report.faults.append(Fault(manifest.table.path, None, str(error)))
        return report
    report.faults += [Fault(manifest.table.path, label(table, number), what) for number, what in wrong.items()]
    total = sum(file.bytes for file in manifest.files)
    headers: list[Fault] = []
    contents: list[Fault] = []

    def advance(nbytes: int) -> None:
        report.bytes += nbytes
        if progress is not None:
            progress(report.bytes, total)

    threads = checkpoint.store.requests

    def stretches() -> Iterator[Claim]:
        for number, (faults, claims) in each(partial(_check_file, checkpoint), range(len(manifest.files)), threads):
            headers.extend(faults)
            own = list(_stretches(checkpoint, claims))
            advance(manifest.files[number].bytes - sum(stretch.nbytes for stretch in own))
            yield from own

    for stretch, faults in each(partial(_check_stretch, checkpoint), stretches(), threads):
        contents += faults
        advance(stretch.nbytes)
    report.faults += headers + contents
    if not report.faults:
        try:
            checkpoint.trainer_state(lenient=True)
        except CheckpointError as error:
            report.faults.append(Fault("trainer state", None, str(error)))
    return report


class Claim(NamedTuple):
    """A chunk, or a part of one that is read at once, with its tensor's name and dtype (by the format's name)."""

    name: str
    dtype: str
    chunk: Chunk

    @property
    def nbytes(self) -> int:
        return self.chunk.end - self.chunk.begin


def label(table: ChunkTable, number: int) -> str:
    """A tensor's name, with its section if that isn't the model."""
    title, name = table.names[number]
    return name if title == "model" else f"{title}: {name}"


def _check_file(checkpoint: Checkpoint, number: int) -> tuple[list[Fault], list[Claim]]:
    """Check one file without its tensors' bytes; returns faults, and the chunks whose bytes can be checked: those of a
    sound header, without any that overlaps with an earlier one, so that no byte is read twice."""
    file, table = checkpoint.manifest.files[number], checkpoint.manifest.chunks
    faults: list[Fault] = []
    kept: list[Claim] = []
    for tensor, chunk in table.in_file(number):
        claim = Claim(label(table, tensor), table.entries[tensor].dtype, chunk)
        if checkpoint.manifest.block_bytes and kept and chunk.begin < kept[-1].chunk.end:
            what = f"bytes {chunk.begin:,} to {chunk.end:,} are also those of {kept[-1].name!r}"
            faults.append(Fault(file.path, claim.name, what))
        else:
            kept.append(claim)
    try:
        size = checkpoint.store.size(file.path)
        if size != file.bytes:
            faults.append(Fault(file.path, None, f"has {size:,} bytes, and {file.bytes:,} were written"))
        whole = size == file.bytes or (size > file.bytes and file.header_bytes > 0)
        head_bytes = file.header_bytes or (file.bytes if file.path.endswith(".json") else 0)
        if not whole or not head_bytes:
            return faults, []
        head = read_range(checkpoint.store, file.path, 0, head_bytes)
        if file.digest is not None and digest(head) != file.digest:
            header = f"its header (the first {head_bytes} bytes) " if file.header_bytes else ""
            faults.append(Fault(file.path, None, f"{header}differs from its digest"))
        elif file.header_bytes:
            entries, _ = parse_header(bytes(head), file.path)
            return [*faults, *_check_header(file, list(entries.values()), kept)], kept
        else:
            parse(bytes(head), file.path)
    except FileNotFoundError:
        faults.append(Fault(file.path, None, "is missing"))
    except (OSError, CheckpointError) as error:
        faults.append(Fault(file.path, None, str(error)))
    return faults, []


def _stretches(checkpoint: Checkpoint, claims: list[Claim]) -> Iterator[Claim]:
    """The parts of chunks to read at once, of whole blocks, each with the digests of its blocks."""
    grid = checkpoint.manifest.block_bytes
    blocks = max(1, checkpoint.store.step_bytes // grid) if grid else 1
    for claim in claims:
        chunk = claim.chunk
        for first in range(0, len(chunk.digests) // DIGEST_BYTES, blocks):
            digests = chunk.digests[first * DIGEST_BYTES : (first + blocks) * DIGEST_BYTES]
            begin = chunk.begin + first * grid
            end = min(begin + blocks * grid, chunk.end)
            yield claim._replace(chunk=chunk._replace(begin=begin, end=end, digests=digests))


def _check_stretch(checkpoint: Checkpoint, stretch: Claim) -> list[Fault]:
    grid, chunk, faults = checkpoint.manifest.block_bytes, stretch.chunk, []
    path = checkpoint.manifest.files[chunk.file].path
    store = checkpoint.store
    try:
        with store.reading(path) as read_into:
            found = read_blocks(
                read_into, chunk.begin, byte_view(thread_memory(stretch.nbytes)), grid, store.step_bytes
            )
            for number, (start, stop, digest_of_block) in enumerate(found):
                if digest_of_block != digest_at(chunk.digests, number):
                    what = f"bytes {chunk.begin + start:,} to {chunk.begin + stop:,} differ from their digest"
                    faults.append(Fault(path, stretch.name, what))
    except (OSError, CheckpointError) as error:
        return [Fault(path, stretch.name, str(error))]
    return faults


def _check_header(file: FileEntry, entries: list[HeaderEntry], claims: list[Claim]) -> Iterator[Fault]:
    """Check that the header declares every byte of the file, and each of the manifest's chunks."""
    fault = layout_fault(entries, file.header_bytes, file.bytes)
    if fault is not None:
        yield Fault(file.path, *fault)
        return
    declared = {(entry.begin, entry.end, entry.dtype, entry.shape) for entry in entries}
    for name, dtype, chunk in claims:
        carrier, extra = CARRIERS.get(dtype, (dtype, ()))
        if (chunk.begin, chunk.end, carrier, (*chunk.sizes, *extra)) not in declared:
            where = f"bytes {chunk.begin:,} to {chunk.end:,}"
            yield Fault(file.path, name, f"the header has no {carrier} of shape {chunk.sizes} at {where}")
