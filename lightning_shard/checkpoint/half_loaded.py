"""Marks tensors that a failed load has overwritten in part, so that ``save`` refuses them.

Marks are kept per storage, not per tensor object, since a state dict makes new tensor objects each time. Within a
storage a view is its byte span, from its first element to its last. A view with gaps (some columns, say) marks its
whole span, and only filling the same view, or the whole span, clears the mark. So a tensor that lies in the gaps may be
refused needlessly, but an unfilled one is never saved. Limit: writes by anything but a load, such as torch's own
``load_state_dict``, aren't seen; :func:`declare_filled` is for these.

Private part of torch 2.11 to 2.14: ``StorageWeakRef``, since Python's weak references die with a storage's Python
object, not with its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_shard.checkpoint.tensors import Located, flatten, locate
from lightning_shard.dense import dense_parts
from lightning_shard.errors import CheckpointError

CHANGED = "The tensors that were loaded into have changed in part, and can't be saved until a load into them succeeds."


class _Span(NamedTuple):
    """The byte span in a storage from a view's first element to its last."""

    begin: int
    end: int
    view: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Shape and strides of a view with gaps; None if the view fills its span."""

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
        """The spans that are still unfilled after ``filled`` has been written."""
        if self == filled:
            return []
        if filled.view is not None or not self.overlaps(filled):
            return [self]
        if self.view is not None:
            return [] if filled.begin <= self.begin and self.end <= filled.end else [self]
        rest = [self._replace(end=filled.begin), self._replace(begin=filled.end)]
        return [span for span in rest if span.begin < span.end]


_marked: dict[int, tuple[StorageWeakRef, list[_Span]]] = {}
"""The unfilled spans by storage."""


def mark(tensors: Iterable[Tensor]) -> None:
    """Mark tensors as half loaded. Called before a load writes the first byte into them."""
    for tensor in chain.from_iterable(map(dense_parts, tensors)):
        storage = StorageWeakRef(tensor.untyped_storage())
        _, spans = _marked.setdefault(storage.cdata, (storage, []))
        if (span := _Span.of(tensor)) not in spans and span.begin < span.end:
            spans.append(span)


def clear(tensors: Iterable[Tensor]) -> None:
    """Remove the marks of tensors that have been filled completely."""
    for tensor in chain.from_iterable(map(dense_parts, tensors)) if _marked else ():
        key = StorageWeakRef(tensor.untyped_storage()).cdata
        if key in _marked:
            storage, spans = _marked.pop(key)
            filled = _Span.of(tensor)
            if left := [rest for span in spans for rest in span.without(filled)]:
                _marked[key] = storage, left


def refuse(tensors: Iterable[Located]) -> None:
    """Raise CheckpointError if one of the tensors is marked."""
    for key in [key for key, (storage, _) in _marked.items() if storage.expired()]:
        del _marked[key]
    if not _marked:
        return
    for name, tensor, _ in tensors:
        _, spans = _marked.get(StorageWeakRef(tensor.untyped_storage()).cdata, (None, ()))
        if spans and any(span.overlaps(_Span.of(tensor)) for span in spans):
            raise CheckpointError(
                f"A load into {name!r} failed midway, so it may be partly overwritten, and isn't saved: load a"
                " checkpoint into it, or build the module again, before saving it. If you have filled it by other"
                " means, such as load_state_dict, call checkpoint.declare_filled(module)."
            )


def declare_filled(state: Mapping[str, Any] | nn.Module) -> None:
    """Declare that tensors are complete again, after a load into them failed and no other load has succeeded since.

    :func:`save` refuses tensors that a failed load has overwritten in part, until a load into them succeeds. Call this
    after filling them by other means, such as torch's ``load_state_dict`` or a new initialisation. It changes no
    tensor, and isn't collective: call it on each rank that has filled its part.

    Args:
        state: A module, for all of its parameters and buffers; or tensors and DTensors as for :func:`save`.
    """
    if isinstance(state, nn.Module):
        tensors: Iterable[Tensor] = (*state.parameters(), *state.buffers())
    else:
        tensors = flatten(state).values()
    clear(locate("", tensor).local for tensor in tensors)
