"""What a call of the network leaves in the objects that it is given, such as a cache of keys and values.

Each stage changes what belongs to its own blocks. So that the next call finds objects that are alike on all stages, the
changes of each are told to the others: numbers and small integer tensors as they are, other tensors by their shapes,
as values that aren't known there (``taint.py``). No memory is spent on these.

Of several stages on one rank each runs on the objects as they were before the call, but for large tensors that another
one has written to: these aren't known to it either. When all have run, the changes of each are put together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import Slot
from lightning_shard.pipeline.dataflow.taint import Unknown, fill

Path = tuple[Any, ...]
"""Attributes, keys and places on the way to an object, from the arguments of the network's call or of a block's."""

SMALL = 1024
"""Elements of an integer tensor that is sent as it is: lengths and positions, which masks are made of."""

WITHOUT_CACHE = "Generate without a cache (use_cache=False), or use pipeline_parallel_size=1."


def is_object(value: Any) -> bool:
    """Whether a value may hold others that change: a list, a dict, or what has attributes."""
    if isinstance(value, (list, dict)):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, torch.Size)) and not callable(value)


def objects(value: Any, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """Every object that can be reached, once, with the first path to it."""
    seen = set() if seen is None else seen
    if is_object(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield path, value
    elif not isinstance(value, tuple):
        return
    for key, child in list(_entries(value).items()):
        yield from objects(child, (*path, key), seen)


def _entries(value: Any) -> dict[Any, Any]:
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else vars(value)


Place = Callable[[Any], Tensor]
"""Gives a tensor for one that was sent, or for a slot."""


@dataclass(frozen=True)
class Left:
    """What a stage's run of a call left in an object.

    Attributes:
        told: Its changes, as they are told to other stages.
        entries: The same, as they are.
        values: Of its small tensors that were written to.
    """

    told: dict[Any, Any]
    entries: dict[Any, Any]
    values: dict[Any, Tensor]

    def value(self, key: Any) -> Any:
        return self.values.get(key, self.entries[key])


@dataclass
class Noted:
    """An object as it was before the call.

    Attributes:
        entries: What it held.
        given: What the run under way has found there.
        versions: Of the tensors among them.
        values: Of the small ones.
        writers: The stages that have written to large ones.
    """

    value: Any
    entries: dict[Any, Any]
    given: dict[Any, Any]
    versions: dict[Any, int]
    values: dict[Any, Tensor]
    writers: dict[Any, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Noted:
        entries = dict(_entries(value))
        tensors = {key: each for key, each in entries.items() if isinstance(each, Tensor)}
        small = {k: t.detach().clone() for k, t in tensors.items() if t.numel() <= SMALL and not isinstance(t, Unknown)}
        return cls(value, entries, entries, {key: each._version for key, each in tensors.items()}, small)

    def put_back(self, name: str, stage: int, place: Place) -> None:
        """Have it be as it was, so that a stage can run its part of the call.

        Raises:
            StepError: It has run it before, and written to a large tensor.
        """
        for key, value in self.values.items():
            if self._is_written(key):
                fill(self.entries[key], value)  # it may have become unknown
                self.versions[key] = self.entries[key]._version
        if stage in self.writers.values():
            raise StepError(f"{name} is written to in place by a call that must run once more. {WITHOUT_CACHE}")
        self.given = self.entries | {key: place(Slot.of(self.entries[key])) for key in self.writers}
        if isinstance(self.value, list):
            self.value[:] = self.given.values()
        else:
            _entries(self.value).clear()
            _entries(self.value).update(self.given)

    def left(self, stage: int) -> Left:
        """What this stage's run has changed."""
        now = _entries(self.value)
        if gone := self.given.keys() - now.keys():
            raise StepError(
                f"The network takes {sorted(map(repr, gone))} out of a {type(self.value).__name__} that it is given,"
                f" which other pipeline stages wouldn't see. {WITHOUT_CACHE}"
            )
        absent = object()
        written = [key for key in self.versions if self._is_written(key) and not self._is_as_before(key)]
        changed = {key: v for key, v in now.items() if self.given.get(key, absent) is not v or key in written}
        values = {
            key: self.entries[key].detach().clone()
            for key in written
            if key in self.values and now.get(key) is self.entries[key]
        }
        self.writers.update((key, stage) for key in written if key not in self.values)
        self.versions.update((key, self.entries[key]._version) for key in written if key not in self.values)
        return Left({key: _told(value) for key, value in changed.items()}, changed, values)

    def _is_written(self, key: Any) -> bool:
        return bool(self.entries[key]._version != self.versions[key])

    def _is_as_before(self, key: Any) -> bool:
        """Of a small tensor: views have one version together, and another one may have been written to."""
        now = self.entries[key]
        return key in self.values and not isinstance(now, Unknown) and torch.equal(self.values[key], now)


def add(value: Any, left: Left, own: Left) -> None:
    """Have an object hold what an earlier stage of this rank left in it, beside what the last one has.

    Args:
        own: What the last one left; is given what is added.

    Raises:
        StepError: Both have changed the same, to something else.
    """
    for key, entry in left.entries.items():
        if key in own.told and not _is_left_by_one(key, left, own):
            raise _different(value, key)
        if key not in own.told or (isinstance(own.value(key), Unknown) and not isinstance(left.value(key), Unknown)):
            _set(value, key, entry)
            own.told[key], own.entries[key] = left.told[key], entry
            if key in left.values:
                own.values[key] = values = left.values[key]
                entry.copy_(values) if isinstance(values, Unknown) else fill(entry, values)


def _is_left_by_one(key: Any, left: Left, own: Left) -> bool:
    """Whether what two stages of one rank have left can be the same."""
    if not _alike(left.told[key], own.told[key]):
        return False
    one, other = left.value(key), own.value(key)
    if isinstance(one, Tensor):
        return isinstance(one, Unknown) or isinstance(other, Unknown) or torch.equal(one, other)
    return one is other or not _has_slots(left.told[key])


def _has_slots(told: Any) -> bool:
    if isinstance(told, (Slot, Tensor)):
        return isinstance(told, Slot)
    return (is_object(told) or isinstance(told, tuple)) and any(map(_has_slots, _entries(told).values()))


def apply(value: Any, changes: Mapping[Any, Any], own: Mapping[Any, Any], place: Place) -> None:
    """Have an object be changed as it was on another rank.

    Args:
        own: What was changed here; the other rank may have changed it too, to the same.

    Raises:
        StepError: It was changed to something else.
    """
    for key, told in changes.items():
        if key in own:
            if not _alike(told, own[key]):
                raise _different(value, key)
            continue
        _set(value, key, _heard(told, place))


def _set(value: Any, key: Any, entry: Any) -> None:
    if isinstance(value, list):
        if key > len(value):
            raise StepError(f"Pipeline stages add different entries to a list. {WITHOUT_CACHE}")
        value[key : key + 1] = [entry]
    else:
        _entries(value)[key] = entry


def _different(value: Any, key: Any) -> StepError:
    return StepError(
        f"Pipeline stages leave different values as {key!r} of a {type(value).__name__} that the network is given. A"
        f" cache must know its layers from the beginning. {WITHOUT_CACHE}"
    )


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_small = not value.is_floating_point() and not value.is_complex() and value.numel() <= SMALL
        return value.detach().cpu() if is_small and not isinstance(value, Unknown) else Slot.of(value)
    return _rebuilt(value, _told)


def _heard(value: Any, place: Callable[[Any], Tensor]) -> Any:
    if isinstance(value, (Slot, Tensor)):
        return place(value)
    return _rebuilt(value, lambda each: _heard(each, place))


def _rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(function, value))
    if type(value) is dict:
        return {key: function(each) for key, each in value.items()}
    if isinstance(value, nn.Module) or (callable(value) and not isinstance(value, type)):
        raise StepError(f"The network leaves a {type(value).__name__} in what it is given. {WITHOUT_CACHE}")
    if not is_object(value):
        return value
    rebuilt = copy.copy(value)
    vars(rebuilt).update({key: function(each) for key, each in vars(value).items()})
    return rebuilt


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Slot) or not (is_object(one) or isinstance(one, tuple)):
        return bool(one == other)
    mine, theirs = _entries(one), _entries(other)
    return mine.keys() == theirs.keys() and all(_alike(mine[key], theirs[key]) for key in mine)
