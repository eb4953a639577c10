"""torch's own files (a zip of one pickle and the tensors' bytes), written and read without their tensors in memory.

The only file that calls ``torch.save`` and ``torch.load``. Reading is by ``weights_only=True``, which builds plain
values and tensors, and runs no code that a file names.

Of torch 2.11 to 2.13 it uses what may yet change there: ``serialization.skip_data``, which leaves room for the tensors'
bytes, and the ``_checkpoint_offset`` that storages loaded under ``FakeTensorMode`` have, where their bytes are.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import tempfile
import zipfile
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_shard.checkpoint.format.header import dtype_name
from lightning_shard.checkpoint.format.manifest import Chunk, chunk_to_json, tensor_to_json
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError

MAGIC = b"PK\x03\x04"
MAX_CHUNKS = 2**16
"""A tensor that isn't contiguous in the file is read in pieces that are, in no more than this."""
Key = TypeVar("Key", bound=Hashable)


def fake_tensor(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A tensor without memory, to stand for a stored one in what is given to :func:`skeleton`."""
    with FakeTensorMode():
        return torch.empty(tuple(shape), dtype=dtype)


@dataclass(frozen=True)
class Skeleton(Generic[Key]):
    """A file without its tensors' bytes: its size, where each tensor's bytes begin, and what lies between them."""

    size: int
    literals: list[tuple[int, bytes]]
    places: dict[Key, int]


def skeleton(value: Any, fakes: Mapping[Key, Tensor]) -> Skeleton[Key]:
    """What ``torch.save`` writes of ``value``, whose tensors are all among ``fakes``, beside those tensors' bytes.

    The checksums of these records are left empty; torch doesn't read them.

    Raises:
        UnsupportedStateError: There is another tensor in it.
    """
    keys = {id(fake): key for key, fake in fakes.items()}
    order: dict[Key, None] = {}

    class Pickler(pickle.Pickler):
        """Notes the tensors in the order in which torch numbers their records."""

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
    """Where a record's bytes begin: after the fixed 30 bytes, the name and the padding of its own header."""
    file.seek(record.header_offset)
    header = file.read(30)
    return record.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))


def _between(file: IO[bytes], spans: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """What is outside of the spans (begin, bytes) of a file, with where it begins."""
    at = 0
    for begin, nbytes in [*sorted(span for span in spans if span[1]), (file.seek(0, os.SEEK_END), 0)]:
        file.seek(at)
        if begin > at:
            yield at, file.read(begin - at)
        at = begin + nbytes


def load_fake(file: IO[bytes], path: str) -> Any:
    """What a file holds, with fake tensors that know where in the file their bytes are.

    Raises:
        CheckpointError: It holds more than plain values and tensors.
        CorruptCheckpointError: It can't be read.
    """
    try:
        with FakeTensorMode():
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2].strip().partition(" was not an allowed")[0]
        reason = reason.split("\n")[0] or "more than plain values"
        raise CheckpointError(
            f"{path} can't be read without running code that it names ({reason}). If you trust it, allow the type with"
            " torch.serialization.add_safe_globals, or load it with torch.load(weights_only=False) and save what you"
            " need of it."
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError, TypeError) as error:
        first = str(error).split("\n")[0]
        raise CorruptCheckpointError(
            f"{path} can't be read as torch's file: {type(error).__name__} {first}."
        ) from error


def stored_as(name: str, tensor: Tensor) -> dict[str, Any]:
    """A manifest's tensor for one of :func:`load_fake`, in the checkpoint's only file.

    Raises:
        UnsupportedStateError: A sparse or quantized tensor, or one whose elements lie scattered.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedStateError(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype}, stored otherwise than by its elements: load the"
            " file with torch.load, and save it with dense tensors."
        )
    width = tensor.dtype.itemsize
    storage: Any = tensor.untyped_storage()
    base = storage._checkpoint_offset + tensor.storage_offset() * width
    shape, strides = tuple(tensor.shape), tensor.stride()
    inner = _contiguous_dims(shape, strides)
    if math.prod(shape[:inner]) > MAX_CHUNKS:
        raise UnsupportedStateError(
            f"{name!r} of shape {shape} lies in the file with strides {strides}, transposed or in another memory"
            " format: load the file with torch.load, and save it with contiguous tensors."
        )
    nbytes = math.prod(shape[inner:]) * width
    chunks = []
    for index in itertools.product(*map(range, shape[:inner])) if math.prod(shape) else ():
        begin = base + sum(i * stride for i, stride in zip(index, strides)) * width
        offsets, sizes = index + (0,) * (len(shape) - inner), (1,) * inner + shape[inner:]
        chunks.append(chunk_to_json(Chunk(0, begin, begin + nbytes, offsets, sizes), 0))
    return tensor_to_json(dtype_name(tensor.dtype, name), shape, chunks)


def _contiguous_dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """From which dim on the elements lie in row-major order without gaps."""
    expected = 1
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1 and strides[dim] != expected:
            return dim + 1
        expected *= shape[dim]
    return 0
