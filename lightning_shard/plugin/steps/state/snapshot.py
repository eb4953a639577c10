"""Snapshots and restores what running a network changes other than gradients, so that it can be run again.

Private: ``torch._C._autograd._unsafe_set_version_counter`` (torch 2.11 to 2.14). A graph that saved a tensor detects by
the tensor's version whether its value has changed since, so restoring the value must restore the version too.
"""

from __future__ import annotations

import functools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.dense import have_equal_values
from lightning_shard.errors import StepError
from lightning_shard.namespaces import Namespace
from lightning_shard.pipeline.dataflow.taint import Hollow, Unknown, has_no_memory
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.checks.lost_changes import changed, sums
from lightning_shard.plugin.steps.randomness import OwnGenerator
from lightning_shard.plugin.steps.state.iterators import ReplayedIterators
from lightning_shard.plugin.steps.state.python_state import attributes, below, hold_same, reachable, slots
from lightning_shard.sharding import local_tensor
from lightning_shard.versions import digest

LARGEST_COPY_BYTES = 2**28
"""Largest tensor or array that is copied. A larger one may not be changed by a step that has to run again."""


_OF_CALLBACK = 1024
"""So many objects that a callback keeps are noted: a list of its own counts once, one of dicts as many times."""


class Note(NamedTuple):
    """A snapshot of one object.

    Attributes:
        path: The first path to it.
        value: The object.
        put_back: Restores the object's state, in place.
        has_changed: Whether its state differs from the snapshot.
    """

    path: str
    value: Any
    put_back: Callable[[], None]
    has_changed: Callable[[], bool]


class Memory:
    """A snapshot of the plain-Python state of a module, which can be restored any number of times.

    Objects keep their identity; their contents are restored: attributes, containers' entries, values of tensors and
    arrays. Parameters are left out, since a forward doesn't change them. That is checked.

    Args:
        stages: How many stages of this rank run the step. With several, the step may not draw from an iterator.
        callbacks: The Trainer's, whose state a step may change too; of each the first objects below it.
        puts_back: Whether the state may have to be restored; else parameters are noted only, for :meth:`check`.
    """

    def __init__(
        self, root: nn.Module, stages: int = 1, callbacks: Sequence[Any] = (), *, puts_back: bool = True
    ) -> None:
        self._root = root
        self._stages = stages
        self._parameters = sums(root)
        of_callbacks = (below(f"callbacks.{i}", each, _OF_CALLBACK) for i, each in enumerate(callbacks))
        found = [*reachable(root), *chain.from_iterable(of_callbacks)] if puts_back else []
        self._iterators = ReplayedIterators(value for _, value in found)
        self._notes = [note for path, value in found if (note := note_of(path, value)) is not None]

    def put_back(self) -> None:
        """Restore the state.

        Raises:
            StepError: A run changed something that can't be restored. All else is restored first.
        """
        failed: list[StepError] = []
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for note in self._notes:
                try:
                    note.put_back()
                except StepError as error:
                    failed.append(error)
        self._iterators.begin_again()
        if failed:
            raise failed[0]

    def changed(self) -> list[str]:
        """Paths of objects that differ from the snapshot."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return [note.path for note in self._notes if note.has_changed()]

    def forget(self) -> None:
        """Discard the snapshot: nothing will be restored any more."""
        self._iterators.end()
        self._notes.clear()

    def check(self) -> None:
        """Check, after a run, that parameters are as they were.

        Raises:
            StepError: A parameter was changed in place. Or several stages have drawn from one iterator.
        """
        if self._stages > 1 and self._iterators.drawn_from():
            raise StepError(
                f"The step draws from an iterator that the module keeps, and {self._stages} stages on this rank, which"
                " run it in turn, would be given different entries: draw in on_train_batch_start, or use a schedule"
                ' with one stage on each rank, such as schedule="1F1B".'
            )
        name = changed(self._parameters, sums(self._root))
        if name is not None:
            raise StepError(
                f"The step changes the parameter {name} in place. In a step parameters are read, not written (sentence"
                " 8 of the contract), and each microbatch would change it: keep it as a buffer, change it in"
                " on_train_batch_start or on_train_batch_end, or use pipeline_parallel_size=1."
            )


def notes(root: nn.Module) -> Iterator[Note]:
    """Snapshots of all reachable objects that can be restored."""
    for path, value in reachable(root):
        if (note := note_of(path, value)) is not None:
            yield note


def note_of(path: str, value: Any) -> Note | None:
    """A snapshot of one object; ``None`` for what isn't followed."""
    kind: Any = type(value)
    return _noting(kind)(path, value)


@functools.cache
def _noting(kind: Any) -> Callable[[str, Any], Note | None]:
    """What takes a snapshot of objects of a type; of each type once, for speed."""
    return next((take for kinds, take in _NOTING if issubclass(kind, kinds)), _note_object)


def _note_generator(path: str, generator: OwnGenerator) -> Note | None:
    if isinstance(generator, random.SystemRandom):
        return None
    return Note(path, generator, randomness.remember_own(generator), lambda: False)  # each run seeds it


def _note_object(path: str, value: Any) -> Note:
    before = attributes(value)

    def put_back() -> None:
        now, named = attributes(value), slots(value.__class__)
        for name in now.keys() - before.keys():
            object.__delattr__(value, name) if name in named else vars(value).pop(name)
        for name, old in before.items():
            if now.get(name, before) is not old:
                object.__setattr__(value, name, old) if name in named else vars(value).update({name: old})

    def has_changed() -> bool:
        now = attributes(value)
        return now.keys() != before.keys() or any(now[name] is not old for name, old in before.items())

    return Note(path, value, put_back, has_changed)


def _note_namespace(path: str, namespace: Namespace) -> Note:
    before = namespace.held

    def put_back() -> None:
        now = namespace.held
        for name in now.keys() - before.keys():
            namespace.remove(name)
        for name, old in before.items():
            if now.get(name, before) is not old:
                namespace.put(name, old)

    return Note(path, namespace, put_back, lambda: not hold_same(before, namespace.held))


def _note_dict(path: str, value: Any) -> Note:
    """Uses the builtin type's own methods: those of a derived class may have side effects."""
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    before = [*kind.items(value)]
    has_parameters = any(_is_parameter(entry) for _, entry in before)

    def put_back() -> None:
        now = dict(kind.items(value)) if has_parameters else {}
        kind.clear(value)
        kind.update(value, [(key, _latest(old, now.get(key))) for key, old in before] if now else before)

    def has_changed() -> bool:
        now = kind.items(value)
        return len(now) != len(before) or any(
            key is not old_key or _latest(old, entry) is not entry for (key, entry), (old_key, old) in zip(now, before)
        )

    return Note(path, value, put_back, has_changed)


def _note_container(path: str, value: Any) -> Note:
    """Of a list, set or deque. Uses the builtin type's own methods: those of a derived class may have side effects."""
    kind: Any = next(kind for kind in (list, set, deque) if isinstance(value, kind))
    before = [*kind.__iter__(value)]
    parameters = sum(map(_is_parameter, before))
    fill = kind.update if kind is set else kind.extend

    def latest() -> list[Any]:
        """The entries of before, with the parameters of now."""
        now = [entry for entry in kind.__iter__(value) if _is_parameter(entry)] if parameters else []
        if not parameters or len(now) != parameters:
            return before
        rest = iter(now)
        return [next(rest) if _is_parameter(entry) else entry for entry in before]

    def put_back() -> None:
        entries = latest()
        kind.clear(value)
        fill(value, entries)

    def has_changed() -> bool:
        now = [*kind.__iter__(value)]
        return len(now) != len(before) or any(_latest(old, entry) is not entry for entry, old in zip(now, before))

    return Note(path, value, put_back, has_changed)


def _is_parameter(value: Any) -> bool:
    return isinstance(value, (nn.Parameter, Hollow))


def _latest(old: Any, now: Any) -> Any:
    """What is put back for an entry: of a parameter the one of now, since sharding registers another at each gather."""
    return now if _is_parameter(old) and _is_parameter(now) else old


def _note_cell(path: str, cell: types.CellType) -> Note:
    absent = object()

    def content() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return absent

    before = content()

    def put_back() -> None:
        if before is absent:
            del cell.cell_contents
        else:
            cell.cell_contents = before

    return Note(path, cell, put_back, lambda: content() is not before)


def _note_tensor(path: str, tensor: Tensor) -> Note | None:
    if isinstance(tensor, (nn.Parameter, Hollow)) or (isinstance(tensor, Unknown) and has_no_memory(tensor)):
        return None
    kind, version, needs_gradient = type(tensor), tensor._version, tensor.requires_grad
    if tensor.is_meta:
        return Note(path, tensor, lambda: None, lambda: False)
    if tensor.is_inference() or tensor.numel() * tensor.element_size() > LARGEST_COPY_BYTES:

        def check() -> None:
            if tensor._version != version:
                raise _too_large(path, tensor.numel() * tensor.element_size())

        return Note(path, tensor, check, lambda: tensor._version != version)
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
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

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

        def check() -> None:
            if digest(array) != before:
                raise _too_large(path, array.nbytes)

        return Note(path, array, check, lambda: digest(array) != before)
    copy = array.copy()

    def put_back() -> None:
        array[...] = copy

    return Note(path, array, put_back, lambda: array.tobytes() != copy.tobytes())


_NOTING: list[tuple[Any, Callable[[str, Any], Note | None]]] = [
    (OwnGenerator, _note_generator),
    (Tensor, _note_tensor),
    (np.ndarray, _note_array),
    (types.CellType, _note_cell),
    (Namespace, _note_namespace),
    (nn.Module, _note_object),
    (dict, _note_dict),
    ((list, set, deque), _note_container),
]


def _too_large(path: str, size: int) -> StepError:
    return StepError(
        f"The step changes {path} in place, which holds {size} bytes. Its first batch runs again in a rehearsal, after"
        f" which tensors of up to {LARGEST_COPY_BYTES} bytes are restored: assign a new one instead, or use"
        " pipeline_parallel_size=1."
    )
