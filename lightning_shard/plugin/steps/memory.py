"""What running a network changes beside gradients, put back as it was, so that it can be run anew."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.taint import Hollow
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.iterators import ReplayedIterators
from lightning_shard.plugin.steps.lost_changes import Sums, changed, sums
from lightning_shard.plugin.steps.python_state import attributes, is_object, reachable, slots
from lightning_shard.plugin.steps.randomness import OwnGenerator

LARGEST_COPY_BYTES = 2**28
"""Of a tensor or array that a module keeps; a larger one may not be changed by a step that has to run again."""

PutBack = Callable[[], None]


class Memory:
    """The plain-Python state of a module, noted, to be put back any number of times.

    Objects stay the ones they are, and what each of them holds is put back: attributes, containers' entries, values of
    tensors and arrays. Parameters are left out, since a forward doesn't change them; that is checked.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._iterators = ReplayedIterators(root)
        self._notes = [note for path, value in reachable(root) if (note := _note(path, value)) is not None]
        self._parameters: Sums = {}

    def put_back(self) -> None:
        """Undo what a run changed.

        Raises:
            StepError: It changed something that can't be put back.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for put_back in self._notes:
                put_back()
        self._iterators.begin_again()

    def forget(self) -> None:
        """Nothing will be put back any more."""
        self._iterators.end()
        self._notes.clear()

    def check(self) -> None:
        """See, after each run, whether parameters are as after the run before.

        Raises:
            StepError: One was changed in place: so it was twice.
        """
        before, self._parameters = self._parameters, sums(self._root)
        name = changed(before, self._parameters)
        if name is not None:
            raise StepError(
                f"The step changes the parameter {name} in place. A pipeline stage has to run its part of this"
                " network more than once to find out what crosses between stages, and parameters aren't put back in"
                " between: keep it as a buffer, change it in on_train_batch_start or on_train_batch_end, or use"
                " pipeline_parallel_size=1."
            )


def _note(path: str, value: Any) -> PutBack | None:
    """What puts one object back as it is now."""
    if isinstance(value, OwnGenerator):
        return None if isinstance(value, random.SystemRandom) else randomness.remember_own(value)
    if isinstance(value, Tensor):
        return None if isinstance(value, (Hollow, nn.Parameter)) else _note_tensor(path, value)
    if isinstance(value, np.ndarray):
        return _note_array(path, value)
    if isinstance(value, types.CellType):
        return _note_cell(value)
    if isinstance(value, nn.Module) or is_object(value):
        return _note_object(value)
    return _note_container(value)


def _note_object(value: Any) -> PutBack:
    before, named = attributes(value), slots(value.__class__)

    def put_back() -> None:
        now = attributes(value)
        for name in now.keys() - before.keys():
            object.__delattr__(value, name) if name in named else vars(value).pop(name)
        for name, old in before.items():
            if now.get(name, before) is not old:
                object.__setattr__(value, name, old) if name in named else vars(value).update({name: old})

    return put_back


def _note_container(value: Any) -> PutBack | None:
    """By the builtin's own methods: those of a class derived from it may do more."""
    kind: Any = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(value, kind))
    before = [*kind.items(value)] if issubclass(kind, dict) else [*kind.__iter__(value)]
    entries = kind.values(value) if issubclass(kind, dict) else before
    if any(isinstance(entry, nn.Parameter) for entry in entries):
        return None  # which are gathered and freed, and registered anew each time, as a recurrent layer's weights
    fill = kind.update if issubclass(kind, (dict, set)) else kind.extend

    def put_back() -> None:
        kind.clear(value)
        fill(value, before)

    return put_back


def _note_cell(cell: types.CellType) -> PutBack | None:
    try:
        before = cell.cell_contents
    except ValueError:  # not assigned yet

        def empty() -> None:
            del cell.cell_contents

        return empty

    def put_back() -> None:
        cell.cell_contents = before

    return put_back


def _note_tensor(path: str, tensor: Tensor) -> PutBack:
    kind, version, needs_gradient = type(tensor), tensor._version, tensor.requires_grad
    if tensor.is_meta:
        return lambda: None
    if tensor.is_inference() or tensor.numel() * tensor.element_size() > LARGEST_COPY_BYTES:

        def check() -> None:
            if tensor._version != version:
                raise _too_large(path, tensor.numel() * tensor.element_size())

        return check
    with torch._C.DisableTorchFunctionSubclass():
        copy = tensor.detach().clone()

    def put_back() -> None:
        tensor.__class__ = kind  # it may have become unknown
        if tensor.requires_grad and not needs_gradient:
            tensor.detach_()
        if tensor.shape != copy.shape:
            tensor.data = copy.clone()
        elif tensor._version != version or not torch.equal(tensor, copy):  # `.data` doesn't count as a version
            tensor.copy_(copy)

    return put_back


def _note_array(path: str, array: np.ndarray[Any, Any]) -> PutBack | None:
    if not array.flags.writeable:
        return None
    if array.nbytes > LARGEST_COPY_BYTES:
        digest = _digest(array)

        def check() -> None:
            if _digest(array) != digest:
                raise _too_large(path, array.nbytes)

        return check
    copy = array.copy()

    def put_back() -> None:
        array[...] = copy

    return put_back


def _digest(array: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).view(np.uint8).data)


def _too_large(path: str, size: int) -> StepError:
    return StepError(
        f"The step changes {path} in place, which holds {size} bytes. A pipeline stage has to run its part of this"
        f" network more than once, and puts back at most {LARGEST_COPY_BYTES} bytes of a tensor: assign a new one"
        " instead, or use pipeline_parallel_size=1."
    )
