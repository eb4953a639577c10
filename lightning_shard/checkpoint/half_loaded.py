"""Tensors that a load has begun to write and did not finish: what is in them is no checkpoint's, so none is made of it.

Told by memory, since a state dict gives other tensor objects each time; views of one storage are told apart by the
bytes from their first element to their last. Those of a view with gaps, as some columns are, are marked as a whole, and
only filling the same view, or all of these bytes, ends that: a neighbour in the gaps may be refused, and never is
anything saved that wasn't filled. What is written past a load, as by torch's own ``load_state_dict``, isn't seen: for
that there is :func:`declare_filled`.

Of torch's private parts this uses ``StorageWeakRef`` (2.11 to 2.13): Python's own weak references die with a storage's
Python object, not with its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_shard.checkpoint.tensors import flatten, locate
from lightning_shard.errors import CheckpointError

CHANGED = "The tensors that were loaded into have changed in part, and can't be saved until a load into them succeeds."


class _Span(NamedTuple):
    """The bytes of a storage from a view's first element to its last."""

    begin: int
    end: int
    view: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Shape and strides of a view with gaps; None where all of these bytes are its own."""

    @classmethod
    def of(cls, tensor: Tensor) -> _Span:
        size = tensor.element_size()
        begin = int(tensor.storage_offset()) * size
        if not tensor.numel():
            return cls(begin, begin, None)
        reach = sum((length - 1) * int(stride) for length, stride in zip(tensor.shape, tensor.stride()))
        end = begin + (reach + 1) * size
        return cls(begin, end, None if end - begin == tensor.nbytes else (tuple(tensor.shape), tensor.stride()))

    def overlaps(self, other: _Span) -> bool:
        return self.begin < other.end and other.begin < self.end

    def without(self, filled: _Span) -> list[_Span]:
        """What is left to be filled."""
        if self == filled:
            return []
        if filled.view is not None or not self.overlaps(filled):
            return [self]
        if self.view is not None:
            return [] if filled.begin <= self.begin and self.end <= filled.end else [self]
        rest = [self._replace(end=filled.begin), self._replace(begin=filled.end)]
        return [span for span in rest if span.begin < span.end]


_marked: dict[int, tuple[StorageWeakRef, list[_Span]]] = {}
"""By storage."""


def mark(tensors: Iterable[Tensor]) -> None:
    """Before the first byte is written into them."""
    for tensor in tensors:
        storage = StorageWeakRef(tensor.untyped_storage())
        _, spans = _marked.setdefault(storage.cdata, (storage, []))
        if (span := _Span.of(tensor)) not in spans and span.begin < span.end:
            spans.append(span)


def clear(tensors: Iterable[Tensor]) -> None:
    """When all of them hold what they should."""
    for tensor in tensors if _marked else ():
        key = StorageWeakRef(tensor.untyped_storage()).cdata
        if key in _marked:
            storage, spans = _marked.pop(key)
            filled = _Span.of(tensor)
            if left := [rest for span in spans for rest in span.without(filled)]:
                _marked[key] = storage, left


def refuse(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError where one of the (local) tensors is marked."""
    for key in [key for key, (storage, _) in _marked.items() if storage.expired()]:
        del _marked[key]
    if not _marked:
        return
    for name, tensor in tensors.items():
        _, spans = _marked.get(StorageWeakRef(tensor.untyped_storage()).cdata, (None, ()))
        if spans and any(span.overlaps(_Span.of(tensor)) for span in spans):
            raise CheckpointError(
                f"{name!r} was being loaded when the load failed, and holds parts of two states: load a checkpoint into"
                " it, or make the module anew, before saving it. If you have filled it by other means, as by"
                " load_state_dict, say so by checkpoint.declare_filled(module)."
            )


def declare_filled(state: Mapping[str, Any] | nn.Module) -> None:
    """Say that tensors hold what they should, though a load into them failed and no other has succeeded since.

    :func:`save` refuses tensors that a failed load has changed in part. A load that succeeds ends that; whoever fills
    them by other means, such as torch's ``load_state_dict`` or by initialising them anew, says so by this call. It
    changes no tensor, and isn't collective: call it on each rank that has filled its part.

    Args:
        state: A module, of which it means all parameters and buffers; or tensors and DTensors as for :func:`save`.
    """
    if isinstance(state, nn.Module):
        tensors: Iterable[Tensor] = (*state.parameters(), *state.buffers())
    else:
        tensors = flatten(state).values()
    clear(locate("", tensor).local for tensor in tensors)
