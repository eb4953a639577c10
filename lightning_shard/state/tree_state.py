"""The state of a tree of Python objects: taken, compared with later, and put back in place.

Objects keep their identity; what they hold is restored: attributes, containers' entries, values of tensors and arrays,
states of generators. Iterators are replayed. Parameters are left out: a forward doesn't change them, and sharding
registers others at each gather.

A graph that saved a tensor detects by the tensor's version whether its value has changed since, so restoring the value
restores the version too.
"""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.dense import has_no_memory, have_equal_values
from lightning_shard.errors import StepError
from lightning_shard.namespaces import Namespace
from lightning_shard.sharding import local_tensor
from lightning_shard.state.walk import (
    CONTAINERS,
    OwnGenerator,
    below,
    children,
    entries,
    hold_same,
    put_entries,
    put_entry,
    reachable,
)
from lightning_shard.torch_private import set_version
from lightning_shard.versions import digest

LARGEST_COPY_BYTES = 2**28
"""Largest tensor or array that is copied. A larger one may not be changed by a step that has to run again."""
_OF_OTHERS = 1024
"""So many objects that a callback keeps are noted: a list of its own counts once, one of dicts as many times."""


class Note(NamedTuple):
    """The state of one object.

    Attributes:
        path: The first path to it.
        value: The object.
        put_back: Restores its state, in place.
        has_changed: Whether its state is another one now.
    """

    path: str
    value: Any
    put_back: Callable[[], None]
    has_changed: Callable[[], bool]


class Taken:
    """The state of objects, which can be restored any number of times.

    Args:
        found: The objects, each with its path.
    """

    def __init__(self, found: Sequence[tuple[str, Any]]) -> None:
        self._iterators = _Iterators(value for _, value in found)
        self._notes = [*notes(found)]

    def put_back(self) -> None:
        """Restore the state.

        Raises:
            StepError: Something was changed that can't be restored. All else is restored first.
        """
        failed: list[StepError] = []
        with uncounted():
            for note in self._notes:
                try:
                    note.put_back()
                except StepError as error:
                    failed.append(error)
        self._iterators.begin_again()
        if failed:
            raise failed[0]

    def changed(self) -> list[str]:
        """Paths of objects whose state is another one now."""
        with uncounted():
            return [note.path for note in self._notes if note.has_changed()]

    def has_drawn(self) -> bool:
        """Whether an iterator has given anything since."""
        return self._iterators.have_drawn()

    def forget(self) -> None:
        """Nothing will be restored any more."""
        self._iterators.end()
        self._notes.clear()


def take(root: nn.Module, others: Iterable[Any] = ()) -> Taken:
    """The state that a module's code may change, and the first objects below each of some others."""
    of_others = (below(f"callbacks.{i}", each, _OF_OTHERS) for i, each in enumerate(others))
    return Taken([*reachable(root), *chain.from_iterable(of_others)])


@contextmanager
def as_taken(before: Sequence[Note]) -> Iterator[None]:
    """Inside, objects are as they were when these notes were taken; afterwards, as they are now."""
    now = [*notes((note.path, note.value) for note in before)]
    try:
        for note in before:
            note.put_back()
        yield
    finally:
        for note in now:
            note.put_back()


@contextmanager
def uncounted() -> Iterator[None]:
    """Operations inside are none of the code that is traced around them."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


def notes(found: Iterable[tuple[str, Any]]) -> Iterator[Note]:
    """The states of objects that have one to restore."""
    for path, value in found:
        if (note := note_of(path, value)) is not None:
            yield note


def note_of(path: str, value: Any) -> Note | None:
    """The state of one object; ``None`` if there is nothing to restore."""
    kind: Any = type(value)
    return _noting(kind)(path, value)


@functools.cache
def _noting(kind: Any) -> Callable[[str, Any], Note | None]:
    """What notes objects of a type; of each type once, for speed."""
    return next((note for kinds, note in _NOTING if issubclass(kind, kinds)), _note_entries)


def _note_entries(path: str, value: Any) -> Note:
    before, in_order = entries(value), isinstance(value, CONTAINERS)
    has_parameters = in_order and any(map(_is_parameter, before.values()))

    def latest() -> dict[Any, Any]:
        """What it held, with the parameters of now in place of those."""
        if not has_parameters:
            return before
        now = entries(value)
        if isinstance(value, dict):
            return {
                key: now[key] if _is_parameter(old) and _is_parameter(now.get(key)) else old
                for key, old in before.items()
            }
        held = [entry for entry in now.values() if _is_parameter(entry)]
        places = [place for place, entry in before.items() if _is_parameter(entry)]
        return before | dict(zip(places, held)) if len(places) == len(held) else before

    def has_changed() -> bool:
        return not hold_same(latest(), entries(value), in_order=in_order)

    return Note(path, value, lambda: put_entries(value, latest()), has_changed)


def _is_parameter(value: Any) -> bool:
    return isinstance(value, nn.Parameter) or getattr(type(value), "stands_for_parameter", False)


def _note_generator(path: str, generator: OwnGenerator) -> Note | None:
    if isinstance(generator, random.SystemRandom):
        return None
    return Note(path, generator, remember_own(generator), lambda: False)  # each run seeds it


def remember_own(generator: OwnGenerator) -> Callable[[], None]:
    """Snapshot a generator's state; returns a function that restores it."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    own: Any = generator
    return partial(own.set_state, own.get_state())


def _note_tensor(path: str, tensor: Tensor) -> Note | None:
    if _is_parameter(tensor) or has_no_memory(tensor):
        return None
    kind, version, needs_gradient = type(tensor), tensor._version, tensor.requires_grad
    if tensor.is_meta:
        return Note(path, tensor, lambda: None, lambda: False)
    if tensor.is_inference() or tensor.numel() * tensor.element_size() > LARGEST_COPY_BYTES:
        return _note_large(path, tensor, tensor.numel() * tensor.element_size(), lambda: tensor._version != version)
    with torch._C.DisableTorchFunctionSubclass():
        # of a DTensor this rank's shard: to compare DTensors is a collective, and stages run at different times
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        copy = local.detach().clone()

    def put_back() -> None:
        tensor.__class__ = kind  # it may have become Unknown
        if tensor.requires_grad and not needs_gradient:
            tensor.detach_()
        if local.shape != copy.shape:
            local.data = copy.clone()
        elif tensor._version != version or not have_equal_values(local, copy):  # writes through `.data` bump no version
            local.copy_(copy)
            # the value that a graph saved is there again; with a new version, its backward would refuse it
            set_version(tensor, version)

    def has_changed() -> bool:
        if type(tensor) is not kind or tensor._version != version or tensor.requires_grad != needs_gradient:
            return True
        return local.shape != copy.shape or not have_equal_values(local, copy)

    return Note(path, tensor, put_back, has_changed)


def _note_array(path: str, array: np.ndarray[Any, Any]) -> Note | None:
    if not array.flags.writeable:
        return None
    if array.nbytes > LARGEST_COPY_BYTES:
        before = digest(array)
        return _note_large(path, array, array.nbytes, lambda: digest(array) != before)
    copy = array.copy()
    return Note(path, array, lambda: np.copyto(array, copy), lambda: array.tobytes() != copy.tobytes())


def _note_large(path: str, value: Any, size: int, has_changed: Callable[[], bool]) -> Note:
    def put_back() -> None:
        if has_changed():
            raise StepError(
                f"The step changes {path} in place, which holds {size} bytes. Its first batch runs again in a"
                f" rehearsal, after which tensors of up to {LARGEST_COPY_BYTES} bytes are restored: assign a new one"
                " instead, or use pipeline_parallel_size=1.",
                breaks=12,
            )

    return Note(path, value, put_back, has_changed)


_NOTING: list[tuple[Any, Callable[[str, Any], Note | None]]] = [
    (OwnGenerator, _note_generator),
    (Tensor, _note_tensor),
    (np.ndarray, _note_array),
]


class _Replayed(Iterator[Any]):
    """Replaces an iterator, such as one over a second loader, that may have to be rewound to where it stood."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.drawn: list[Any] = []
        self.place = 0

    def __next__(self) -> Any:
        if self.place == len(self.drawn):
            self.drawn.append(next(self._iterator))
        self.place += 1
        return self.drawn[self.place - 1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def rest(self) -> Iterator[Any]:
        """The iterator to continue with: the original, preceded by entries that were drawn but not used."""
        return chain(self.drawn[self.place :], self._iterator) if self.place < len(self.drawn) else self._iterator


class _Iterators:
    """Replaces all iterators that objects, lists, dicts, globals and closures hold."""

    def __init__(self, holders: Iterable[Any]) -> None:
        replayed: dict[int, _Replayed] = {}
        self._begin: dict[_Replayed, int] = {}  # where each is rewound to; includes those replaced by another instance
        self._places: list[tuple[Any, Any, _Replayed]] = []
        for holder in holders:
            for key, value in [*children(holder)]:
                if not is_iterator(value):
                    continue
                if isinstance(value, _Replayed):
                    self._begin[value] = value.place
                elif _can_put(holder, key):
                    found = replayed.setdefault(id(value), _Replayed(value))
                    put_entry(holder, key, found)
                    self._places.append((holder, key, found))
        self._begin |= dict.fromkeys(replayed.values(), 0)

    def begin_again(self) -> None:
        for replayed, place in self._begin.items():
            replayed.place = place

    def have_drawn(self) -> bool:
        return any(replayed.drawn for _, _, replayed in self._places)

    def end(self) -> None:
        """Restore the original iterators to their places, where code hasn't replaced them."""
        rests: dict[int, Iterator[Any]] = {}
        for holder, key, replayed in self._places:
            if entries(holder).get(key) is replayed:
                put_entry(holder, key, rests.setdefault(id(replayed), replayed.rest()))


def is_iterator(value: Any) -> bool:
    kind: Any = type(value)
    return _are_iterators(kind)


@functools.cache  # checks against an abstract class are slow
def _are_iterators(kind: Any) -> bool:
    return issubclass(kind, Iterator) and not issubclass(kind, (nn.Module, io.IOBase))


def _can_put(holder: Any, key: Any) -> bool:
    """``False`` for a default of a function's parameter."""
    return not isinstance(holder, Namespace) or isinstance(holder.holder, dict) or key in vars(holder.holder)
