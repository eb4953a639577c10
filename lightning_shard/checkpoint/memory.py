"""Tensor memory: byte views of CPU tensors, views of boxes, batched copies, pinned memory, and waiting for devices.

Private part of torch 2.11 to 2.14: ``_foreach_copy_``, one call that copies many small tensors.
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
    """The memory of a contiguous CPU tensor as bytes, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)


SMALL_BYTES = 2**16
"""Tensors up to this size are copied in one batched call, since a call costs more than copying their bytes."""


def rooms_like(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Buffer]]:
    """Allocate for each tensor a contiguous CPU tensor of its shape and dtype; returns it with its bytes.

    Tensors of one dtype share one allocation, since allocating each small one costs more than copying its bytes.
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
    """Copy tensors.

    Args:
        copies: Triples of target, source (a contiguous CPU tensor of the same shape and dtype), and the source's bytes.
    """
    small: list[tuple[Tensor, Tensor]] = []
    for target, data, memory in copies:
        if target.device.type != "cpu" or target.is_conj() or target.is_neg():
            target.copy_(data)
        elif memory.nbytes > SMALL_BYTES and target.is_contiguous():
            byte_view(target)[:] = memory  # a plain memcpy, about twice as fast as Tensor.copy_ of one thread
        else:
            small.append((target, data))
    if small:
        with torch.inference_mode():  # only here may inference tensors be written in place
            torch._foreach_copy_([target for target, _ in small], [data for _, data in small])


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in CPU memory in row-major order without gaps."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def resolved(tensor: Tensor) -> Tensor:
    """The tensor with a lazy conjugation or negation carried out; needed before copying it.

    torch 2.11 copies such tensors from a CUDA device incorrectly: a non-contiguous one arrives without the conjugation
    or negation; in a non-blocking copy it is applied on the host before the bytes have arrived.
    """
    return tensor.resolve_conj().resolve_neg()


def settle(tensors: Iterable[Tensor]) -> None:
    """Wait until all work on the tensors' devices is done, on all streams.

    Needed before the host or another thread, which has another current stream, reads or writes the tensors.
    """
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def host_memory(nbytes: int, *, pinned: bool) -> Tensor:
    """Allocate host memory as a uint8 tensor; ``pinned`` for asynchronous copies from devices.

    Pinned memory has exactly this size, and is freed with the tensor. With torch's ``pin_memory=True`` it would have
    the next power of two, and the allocator would keep it until the process ends.
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
        # not at exit, when the driver may be unloaded: the memory is freed with the process
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """A view of a box of a tensor."""
    view: Any = tensor
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes)):
        if size != view.shape[dim]:
            view = view.narrow(dim, offset, size)
    return view
