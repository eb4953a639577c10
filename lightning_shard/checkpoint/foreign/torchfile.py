"""Writes and reads torch's own files (a zip of one pickle and the tensors' bytes) without their tensors in memory.

The only file that calls ``torch.save`` and ``torch.load``. It reads with ``weights_only=True``, which builds only plain
values and tensors, and runs no code that a file names.

Unstable parts of torch 2.11 to 2.14: ``serialization.skip_data``, which writes a file with gaps for the tensors' bytes;
and ``_checkpoint_offset``, the position of a storage's bytes in a file that was loaded under ``FakeTensorMode``.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_shard.checkpoint.format.chunks import Chunk, TensorEntry
from lightning_shard.checkpoint.format.header import dtype_name
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError

MAGIC = b"PK\x03\x04"
MAX_DEPTH = 200
MIN_VALUES, MIN_TEXT_BYTES, RATIO = 10_000, 64 * 2**20, 8
"""A pickle may have MIN_VALUES values and MIN_TEXT_BYTES of text, and of each RATIO more for each of its bytes."""
_ENCRYPTED = 1
Key = TypeVar("Key", bound=Hashable)


def fake_tensor(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A tensor without memory, as a placeholder for a stored one in the value that :func:`skeleton` is given."""
    with FakeTensorMode():
        return torch.empty(tuple(shape), dtype=dtype)


@dataclass(frozen=True)
class Skeleton(Generic[Key]):
    """A file without its tensors' bytes.

    Attributes:
        size: The file's size in bytes.
        literals: (position, bytes) of everything outside of the tensors' bytes.
        places: The position of each tensor's bytes.
    """

    size: int
    literals: list[tuple[int, bytes]]
    places: dict[Key, int]


def skeleton(value: Any, fakes: Mapping[Key, Tensor]) -> Skeleton[Key]:
    """The file that ``torch.save`` writes of ``value``, without its tensors' bytes; all its tensors are in ``fakes``.

    The checksums of the tensors' records are left empty; torch doesn't read them.
    """
    keys = {id(fake): key for key, fake in fakes.items()}
    order: dict[Key, None] = {}

    class Pickler(pickle.Pickler):
        """Records the tensors in the order in which torch numbers their records."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Tensor):
                if id(obj) not in keys:
                    raise UnsupportedStateError(
                        "The trainer state has a tensor that a registered codec made, which can't be written to a .ckpt"
                        " file without holding it: gather with optimizer=False."
                    )
                order[keys[id(obj)]] = None
            return NotImplemented

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "archive")
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(value, path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            places = {
                key: _data_offset(file, archive.getinfo(f"archive/data/{number}")) for number, key in enumerate(order)
            }
            literals = list(_between(file, [(places[key], fakes[key].nbytes) for key in order]))
        return Skeleton(os.path.getsize(path), literals, places)


def _data_offset(file: IO[bytes], record: zipfile.ZipInfo) -> int:
    """The position of a record's data: after the fixed 30 bytes of its local header, the name and the padding."""
    file.seek(record.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != MAGIC:
        raise zipfile.BadZipFile(f"there is no record at {record.header_offset}")
    return record.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))


def _between(file: IO[bytes], spans: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of everything in a file that is outside of the spans (begin, length)."""
    at = 0
    for begin, nbytes in [*sorted(span for span in spans if span[1]), (file.seek(0, os.SEEK_END), 0)]:
        file.seek(at)
        if begin > at:
            yield at, file.read(begin - at)
        at = begin + nbytes


def read_archive(file: IO[bytes], path: str) -> Archive:
    """Read a file's content, with fake tensors whose storages know the position of their bytes in the file.

    Raises:
        CheckpointError: The file holds more than plain values and tensors, or isn't stored as torch does it.
        CorruptCheckpointError: The file is damaged.
    """
    try:
        records, pickle_bytes = _records(file, path)
        file.seek(0)
        with FakeTensorMode():
            content = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2].strip().partition(" was not an allowed")[0]
        reason = reason.split("\n")[0] or "more than plain values"
        raise CheckpointError(
            f"{path} can't be read without running code that it names ({reason}). If you trust it, allow the type with"
            " torch.serialization.add_safe_globals, or load it with torch.load(weights_only=False) and save what you"
            " need of it."
        ) from error
    except Exception as error:  # any kind, from zipfile, torch, and constructors that it calls
        first = str(error).split("\n")[0]
        raise CorruptCheckpointError(
            f"{path} can't be read as torch's file: {type(error).__name__} {first}."
        ) from error
    _check_size(content, pickle_bytes, path)
    return Archive(content, records)


def _records(file: IO[bytes], path: str) -> tuple[dict[int, int], int]:
    """Check the zip's records; returns each record's size by the position of its data, and the bytes of pickles.

    torch reads the tensors' bytes in place and ignores how the records say they are stored. So this checks that they
    are uncompressed, don't overlap, have this machine's byte order, and that headers and directory agree.

    Raises:
        CheckpointError: Records are compressed, encrypted, or of the other byte order.
        CorruptCheckpointError: Records overlap, or lie outside of the file.
        ValueError, zipfile.BadZipFile: Other damage.
    """
    remedy = "load it with torch.load where that can be done, and save it anew with torch.save"
    size = file.seek(0, os.SEEK_END)
    records: dict[int, int] = {}
    pickle_bytes = 0
    with zipfile.ZipFile(file) as archive:
        found = archive.infolist()
        if len({record.filename.lower() for record in found}) != len(found):
            raise CorruptCheckpointError(f"{path} has two records of one name.")
        end = 0
        for record in sorted(found, key=lambda record: record.header_offset):
            name = record.filename
            if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
                raise CheckpointError(f"{path}: the record {name!r} is compressed: {remedy}.")
            if record.flag_bits & _ENCRYPTED:
                raise CheckpointError(f"{path}: the record {name!r} is encrypted: {remedy}.")
            begin = _data_offset(file, record)
            if not end <= record.header_offset < begin <= begin + record.file_size <= min(archive.start_dir, size):
                raise CorruptCheckpointError(f"{path}: the record {name!r} lies where another one does.")
            end = begin + record.file_size
            records[begin] = record.file_size
            if name.lower().endswith("/byteorder"):
                file.seek(begin)
                order = file.read(min(record.file_size, len("little") + 1))
                if order != sys.byteorder.encode():
                    raise CheckpointError(f"{path} has numbers of another byte order ({order!r}): {remedy}.")
            elif name.lower().endswith(".pkl"):
                pickle_bytes += record.file_size
    return records, pickle_bytes


def _check_size(content: Any, pickle_bytes: int, path: str) -> None:
    """Refuse content that is far larger than the pickle it was read from: a list may occur in others many times, or in
    itself, so that walking it would never end; and a ``bytearray`` can be made from a length alone.
    """
    values, text_bytes = MIN_VALUES + RATIO * pickle_bytes, MIN_TEXT_BYTES + RATIO * pickle_bytes
    pending: list[tuple[Any, int]] = [(content, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, str | bytes | bytearray):
            text_bytes -= len(value)
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            values -= len(value)
            pending.extend((item, depth + 1) for item in (value.values() if isinstance(value, Mapping) else value))
        if min(values, text_bytes) < 0 or depth > MAX_DEPTH:
            raise CorruptCheckpointError(
                f"{path} expands to more, or more deeply nested, values than its size justifies."
            )


@dataclass(frozen=True)
class Archive:
    """A file's content (with fake tensors), and the size of each record by the position of its data."""

    content: Any
    records: dict[int, int]

    def stored_as(self, name: str, tensor: Tensor) -> TensorEntry:
        """The manifest's entry of a tensor of the content, which lies in file 0."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise UnsupportedStateError(
                f"{name!r} is a {tensor.layout} tensor of {tensor.dtype}, stored otherwise than by its elements: load"
                " the file with torch.load, and save it with dense tensors."
            )
        width = tensor.dtype.itemsize
        storage: Any = tensor.untyped_storage()
        shape, strides = tuple(tensor.shape), tensor.stride()
        if not math.prod(shape):
            return TensorEntry(dtype_name(tensor.dtype, name), shape)
        begin = getattr(storage, "_checkpoint_offset", None)
        if begin is None:
            raise UnsupportedStateError(f"{name!r} is on {tensor.device}, and has no bytes in the file.")
        first = tensor.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides))
        if first < 0 or (last + 1) * width > storage.nbytes() or storage.nbytes() > self.records.get(begin, 0):
            raise CorruptCheckpointError(f"{name!r} of shape {shape} reaches beyond its record of the file.")
        if not tensor.is_contiguous():
            raise UnsupportedStateError(
                f"{name!r} of shape {shape} is stored with strides {strides} (transposed, expanded, or part of another"
                " tensor), which can't be read in place: load the file with torch.load, and save it with contiguous"
                " tensors."
            )
        begin += first * width
        chunk = Chunk(0, begin, begin + tensor.nbytes, (0,) * len(shape), shape)
        return TensorEntry(dtype_name(tensor.dtype, name), shape, given=(chunk,))
