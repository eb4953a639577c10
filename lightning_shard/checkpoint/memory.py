"""A CPU tensor's memory as bytes, views of its boxes, and what lies between it and devices."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.store import Buffer
from lightning_shard.errors import CheckpointError

_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable."""


def byte_view(tensor: Tensor) -> Buffer:
    """A contiguous CPU tensor's memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # not reshape(-1), which leaves a single element its odd stride
    array: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(array)


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
