"""``gather``: a sharded checkpoint to one safetensors file, or to several with an index, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_shard.checkpoint.fetch import Read
from lightning_shard.checkpoint.header import build_header
from lightning_shard.checkpoint.plan import Box, slabs
from lightning_shard.checkpoint.reader import Checkpoint, StoredTensor, read
from lightning_shard.checkpoint.store import Buffer, Store, open_store
from lightning_shard.checkpoint.transfer import byte_view
from lightning_shard.errors import CheckpointError, StateMismatchError

BUFFER_BYTES = 64 * 2**20
"""How much of the output is in memory at a time; the reading threads' scratch comes on top."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True)
class GatherReport:
    """What was written: ``bytes`` of tensors, of how many ``tensors``, into which ``files``."""

    files: list[str]
    tensors: int
    bytes: int


def gather(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    optimizer: bool = False,
    max_shard_bytes: int | None = None,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,
    out_storage_options: dict[str, Any] | None = None,
    fsync: bool = True,
    progress: Progress | None = None,
) -> GatherReport:
    """Write a checkpoint's tensors as plain safetensors. Call it on one process; it needs no process group.

    A file appears under its name when it is complete. Tensors that shared memory are written under each name.

    Args:
        path: The checkpoint.
        out: The file to write. With ``max_shard_bytes``, several are written beside each other, named as transformers
            names them: ``model.safetensors`` gives ``model-00001-of-00002.safetensors`` and so on, and
            ``model.safetensors.index.json``.
        optimizer: Write the optimizer's tensors too, their names prefixed with ``optimizer.``.
        max_shard_bytes: The most bytes of tensors in one file, where one tensor alone isn't larger.
        verify: Check digests.
        out_storage_options: For fsspec, if ``out`` is a URL.
        progress: Called now and then with the bytes done and the bytes in all.

    Raises:
        CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`read`; nothing appears then.
    """
    checkpoint = read(path, storage_options=storage_options, verify=verify)
    tensors = dict(checkpoint.items())
    if optimizer:
        for name, stored in checkpoint.optimizer.items():
            if f"optimizer.{name}" in tensors:
                raise StateMismatchError(f"The model has a tensor named 'optimizer.{name}' itself: gather without it.")
            tensors[f"optimizer.{name}"] = stored
    folder, name = _split(out)
    store = open_store(folder, out_storage_options)
    # wide dtypes first, as safetensors orders them, so that each tensor is aligned to its elements
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
    shards = _shards(order, tensors, max_shard_bytes)
    total = sum(stored.nbytes for stored in tensors.values())
    report = GatherReport([], len(tensors), total)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    stem = name.removesuffix(".safetensors")
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        file = name if max_shard_bytes is None else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(store, file, {key: tensors[key] for key in keys}, checkpoint, fsync, advance)
        weight_map.update(dict.fromkeys(keys, file))
        report.files.append(f"{folder}/{file}")
    if max_shard_bytes is not None:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        data = json.dumps(index, indent=2).encode() + b"\n"
        store.publish(f"{stem}.safetensors.index.json", [memoryview(data)], len(data), durable=fsync)
        report.files.append(f"{folder}/{stem}.safetensors.index.json")
    return report


def _split(out: str | os.PathLike[str]) -> tuple[str, str]:
    text = os.fspath(out)
    folder, _, name = text.rpartition("/")
    if not name or os.path.isdir(text):
        raise CheckpointError(f"out ({text!r}) must be a file to write, such as {text.rstrip('/')}/model.safetensors.")
    return folder or ("/" if text.startswith("/") else "."), name


def _shards(order: list[str], tensors: dict[str, StoredTensor], limit_bytes: int | None) -> list[list[str]]:
    if limit_bytes is None:
        return [order]
    shards: list[list[str]] = [[]]
    size = 0
    for name in order:
        if shards[-1] and size + tensors[name].nbytes > limit_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].nbytes
    return shards


def _write(
    store: Store,
    file: str,
    tensors: dict[str, StoredTensor],
    checkpoint: Checkpoint,
    durable: bool,
    advance: Callable[[int], None],
) -> None:
    header, entries = build_header(
        [(name, stored.entry.dtype, stored.entry.shape) for name, stored in tensors.items()], {"format": "pt"}
    )
    size = entries[-1].end if entries else len(header)
    store.publish(file, _stream(header, tensors, checkpoint, advance), size, durable=durable)


def _stream(
    header: bytes, tensors: dict[str, StoredTensor], checkpoint: Checkpoint, advance: Callable[[int], None]
) -> Iterator[Buffer]:
    yield memoryview(header)
    buffer = torch.empty(min(BUFFER_BYTES, sum(stored.nbytes for stored in tensors.values())), dtype=torch.uint8)
    reads: list[Read] = []
    filled = 0
    for stored in tensors.values():
        for box in slabs(Box.whole(stored.entry.shape), BUFFER_BYTES // stored.dtype.itemsize):
            nbytes = box.numel * stored.dtype.itemsize
            if filled + nbytes > buffer.numel():
                checkpoint.fetch(reads)
                yield byte_view(buffer[:filled])
                advance(filled)
                reads, filled = [], 0
            target = buffer[filled : filled + nbytes].view(stored.dtype).view(box.sizes)
            reads.append(Read(stored.name, stored.entry, box, target))
            filled += nbytes
    checkpoint.fetch(reads)
    yield byte_view(buffer[:filled])
    advance(filled)
