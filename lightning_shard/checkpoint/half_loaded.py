"""Tensors that a load has begun to write and did not finish: what is in them is no checkpoint's, so none is made of it.

Told by memory, since a state dict gives other tensor objects each time. Of torch's private parts it uses
``StorageWeakRef`` (2.11 to 2.13): Python's own weak references die with a storage's Python object, not with its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_shard.errors import CheckpointError

CHANGED = "The tensors that were loaded into have changed in part, and can't be saved until a load into them succeeds."

_marked: dict[int, StorageWeakRef] = {}


def mark(tensors: Iterable[Tensor]) -> None:
    """Before the first byte is written into them."""
    for tensor in tensors:
        storage = StorageWeakRef(tensor.untyped_storage())
        _marked[storage.cdata] = storage


def clear(tensors: Iterable[Tensor]) -> None:
    """When all of them hold what they should."""
    for tensor in tensors if _marked else ():
        _marked.pop(StorageWeakRef(tensor.untyped_storage()).cdata, None)


def refuse(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError where one of the (local) tensors is marked."""
    for key in [key for key, storage in _marked.items() if storage.expired()]:
        del _marked[key]
    if not _marked:
        return
    for name, tensor in tensors.items():
        if StorageWeakRef(tensor.untyped_storage()).cdata in _marked:
            raise CheckpointError(
                f"{name!r} was being loaded when the load failed, and holds parts of two states: load a checkpoint into"
                " it, or make the module anew, before saving it."
            )
