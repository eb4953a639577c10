"""A CPU tensor's memory as bytes, views of its boxes, and what lies between it and devices.

Of torch's private parts this uses ``_foreach_copy_`` (2.11 to 2.13): one call for many small tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.store import Buffer
from lightning_shard.errors import CheckpointError
from lightning_shard.tree import as_bytes

_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable."""


def byte_view(tensor: Tensor) -> Buffer:
    """A contiguous CPU tensor's memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)


SMALL_BYTES = 2**16
"""Tensors up to this are copied by one call for all: one for each would take longer than its bytes."""


def rooms_like(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Buffer]]:
    """For each tensor new CPU memory of its shape and dtype, in row-major order without gaps, and the bytes of it.

    Those of one dtype lie in one piece: making each by itself takes longer than the bytes of small ones.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    rooms: dict[int, tuple[Tensor, Buffer]] = {}
    for dtype, numbers in by_dtype.items():
        lengths = [tensors[number].numel() for number in numbers]
        together = torch.empty(sum(lengths), dtype=dtype)
        memory, begin = byte_view(together), 0
        for number, flat in zip(numbers, together.split(lengths)):
            end = begin + flat.nbytes
            rooms[number] = flat.view(tensors[number].shape), memory[begin:end]
            begin = end
    return [rooms[number] for number in range(len(tensors))]


def fill(copies: Iterable[tuple[Tensor, Tensor, Buffer]]) -> None:
    """Fill tensors with what is in others of the same shape and dtype, whose bytes are given too."""
    small: list[tuple[Tensor, Tensor]] = []
    for target, data, memory in copies:
        if target.device.type != "cpu" or target.is_conj() or target.is_neg():
            target.copy_(data)
        elif memory.nbytes > SMALL_BYTES and target.is_contiguous():
            byte_view(target)[:] = memory  # a plain memcpy, about twice as fast as Tensor.copy_ of one thread
        else:
            small.append((target, data))
    if small:
        with torch.inference_mode():  # where tensors of that mode may be written to as well
            torch._foreach_copy_([target for target, _ in small], [data for _, data in small])


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in CPU memory in row-major order without gaps."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def resolved(tensor: Tensor) -> Tensor:
    """The tensor with its elements as they are, where they are still to be conjugated or negated; before copying it.

    Copying such a tensor from a CUDA device isn't right in torch 2.11: one that isn't contiguous comes as if it were
    neither; others, copied without waiting, are conjugated or negated on the host before they have arrived.
    """
    return tensor.resolve_conj().resolve_neg()


def settle(tensors: Iterable[Tensor]) -> None:
    """Wait until all that was launched on the tensors' devices is done, on whatever stream.

    Before they are read or written by another thread, whose stream is another one, or by the host.
    """
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def host_memory(nbytes: int, *, pinned: bool) -> Tensor:
    """Bytes in host memory; ``pinned``, which devices copy to by themselves, while the host does something else.

    Pinned memory is of just this size, and is freed with the tensor. Torch's own (``pin_memory=True``) is of the next
    power of two, and kept by its allocator until the process ends.

    Raises:
        CheckpointError: The system doesn't let so much memory be pinned.
    """
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if pinned and nbytes:
        runtime: Any = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, _FOR_ALL_DEVICES))
        if error:
            raise CheckpointError(
                f"{nbytes / 2**20:.0f} MiB of memory for the copy of what is saved can't be pinned (cudaHostRegister:"
                f" error {error}): leave the host more memory, or save synchronously."
            )
        # not at exit, when the driver may be gone: the process's memory goes with it
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """A view of a box of a tensor."""
    view: Any = tensor
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes)):
        if size != view.shape[dim]:
            view = view.narrow(dim, offset, size)
    return view
