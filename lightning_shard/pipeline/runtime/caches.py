"""Changes of an object among the arguments of a call of the network, such as a cache of keys and values, over stages.

Each stage changes the entries of its own blocks. So that the next call finds equal objects on all stages, each stage's
changes are sent to the others: numbers and small tensors by value; other tensors by shape, as unknown values
(``taint.py``), which take no memory.

Several stages of one rank share the objects. Each runs on the objects as they were before the call, except that large
tensors that another one wrote to in place are unknown to it too. When all have run, their changes are merged.

Objects that a call makes itself, and gives to its blocks, such as a list of losses, are made by each stage anew. What
earlier stages' blocks set in them is followed within the call, as in a step that calls the network once
(``own_call.py``, ``stand_in.py``). So the last stage's are complete, and other ranks take from them what they lack.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.messages import Slot
from lightning_shard.pipeline.dataflow.objects import alike, is_object, rebuilt, set_entry
from lightning_shard.pipeline.dataflow.objects import entries as entries_of
from lightning_shard.pipeline.dataflow.taint import Unknown, fill

SMALL = 1024
"""The most elements of an integer tensor that is sent by value: lengths and positions, of which masks are computed."""
_SMALL_FLOATS = 64
"""The same of other tensors, such as losses."""

WITHOUT_CACHE = "Generate without a cache (use_cache=False), or use pipeline_parallel_size=1."


Place = Callable[[Any], Tensor]
"""Gives the local tensor for a sent tensor, or an unknown one for a slot."""


@dataclass(frozen=True)
class Left:
    """The changes that a stage's run of a call made to an object.

    Attributes:
        told: The changed entries, in the form sent to other stages.
        entries: The changed entries themselves.
        values: Copies of changed small tensors.
    """

    told: dict[Any, Any]
    entries: dict[Any, Any]
    values: dict[Any, Tensor]

    def value(self, key: Any) -> Any:
        return self.values.get(key, self.entries[key])


@dataclass
class Noted:
    """A snapshot of an object, taken before the call.

    Attributes:
        value: The object.
        entries: Its entries.
        given: The entries with which the current run began.
        versions: The versions of tensors among ``entries``.
        values: Copies of small tensors among ``entries``.
        writers: The stages that wrote in place to large tensors, by key.
    """

    value: Any
    entries: dict[Any, Any]
    given: dict[Any, Any]
    versions: dict[Any, int]
    values: dict[Any, Tensor]
    writers: dict[Any, int] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Noted:
        entries = dict(entries_of(value))
        tensors = {key: each for key, each in entries.items() if isinstance(each, Tensor)}
        small = {k: t.detach().clone() for k, t in tensors.items() if t.numel() <= SMALL and not isinstance(t, Unknown)}
        return cls(value, entries, entries, {key: each._version for key, each in tensors.items()}, small)

    def put_back(self, name: str, stage: int, place: Place) -> None:
        """Restore the object, so that a stage can run its part of the call.

        Raises:
            StepError: The stage ran it before, and wrote to a large tensor, of which there is no copy.
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
            entries_of(self.value).clear()
            entries_of(self.value).update(self.given)

    def left(self, stage: int) -> Left:
        """The changes that this stage's run made."""
        now = entries_of(self.value)
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

    def put_in_order(self, of_blocks: Iterable[Any]) -> None:
        """Give a dict the same order on all ranks: what was there, what blocks have set, in order, and the rest."""
        if type(self.value) not in (dict, defaultdict, OrderedDict):
            return
        keys = dict.fromkeys(key for key in (*self.entries, *of_blocks, *self.value) if key in self.value)
        if [*keys] != [*self.value]:
            for key in keys:
                self.value[key] = self.value.pop(key)

    def _is_written(self, key: Any) -> bool:
        return bool(self.entries[key]._version != self.versions[key])

    def _is_as_before(self, key: Any) -> bool:
        """Whether a small tensor is unchanged: views share a version, so the write may have been to another view."""
        now = self.entries[key]
        return key in self.values and not isinstance(now, Unknown) and torch.equal(self.values[key], now)


def add(value: Any, left: Left, own: Left, *, is_made: bool) -> None:
    """Merge the changes of an earlier stage of this rank into an object, which holds those of the rank's last stage.

    Args:
        value: The object.
        left: The earlier stage's changes.
        own: The last stage's changes; the added ones are entered here too.
        is_made: Whether the call has made the object: the last stage has followed the earlier one's changes.

    Raises:
        StepError: Both stages changed an entry, to different values.
    """
    for key, entry in left.entries.items():
        if key in own.told and not is_made and not _is_left_by_one(key, left, own):
            raise _different(value, key)
        if key not in own.told or (isinstance(own.value(key), Unknown) and not isinstance(left.value(key), Unknown)):
            _set(value, key, entry)
            own.told[key], own.entries[key] = left.told[key], entry
            if key in left.values:
                own.values[key] = values = left.values[key]
                entry.copy_(values) if isinstance(values, Unknown) else fill(entry, values)


def _is_left_by_one(key: Any, left: Left, own: Left) -> bool:
    """Whether an entry that two stages of one rank changed can have the same value in both."""
    if not _may_be_one(left.told[key], own.told[key]):
        return False
    one, other = left.value(key), own.value(key)
    if isinstance(one, Tensor):
        return isinstance(one, Unknown) or isinstance(other, Unknown) or torch.equal(one, other)
    return one is other or not _has_slots(left.told[key])


def _may_be_one(told: Any, other: Any) -> bool:
    """Whether what two stages tell of an entry may be the same value: floats are compared by their shapes."""
    return alike(_of_shapes(told), _of_shapes(other))


def _of_shapes(told: Any) -> Any:
    if isinstance(told, Tensor):
        return Slot.of(told) if _is_inexact(told) else told
    return rebuilt(told, _of_shapes, WITHOUT_CACHE)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_slots(told: Any) -> bool:
    if isinstance(told, (Slot, Tensor)):
        return isinstance(told, Slot)
    return (is_object(told) or isinstance(told, tuple)) and any(map(_has_slots, entries_of(told).values()))


def apply(value: Any, changes: Mapping[Any, Any], own: Mapping[Any, Any], place: Place) -> None:
    """Apply another rank's changes to an object.

    Args:
        value: The object.
        changes: The changed entries, as sent.
        own: Entries that this rank changed; the other rank may have changed them to the same values.
        place: Gives local tensors.

    Raises:
        StepError: Both ranks changed an entry, to different values.
    """
    for key, told in changes.items():
        if key in own:
            if not _may_be_one(told, own[key]):
                raise _different(value, key)
            if not (isinstance(told, Tensor) and isinstance(entries_of(value)[key], Unknown)):
                continue
        _set(value, key, _heard(told, place))


def apply_to_made(
    value: Any,
    changes: Mapping[Any, Any],
    own: Mapping[Any, Any],
    place: Place,
    *,
    is_complete: bool,
    newer: Container[Any],
) -> None:
    """Take what this rank lacks from another rank's changes to an object that the call has made.

    Args:
        is_complete: Whether it is the last stage's rank, whose numbers, texts and small tensors are the final ones.
        newer: The entries that the other rank's blocks have set after this rank's.
    """
    for key, told in changes.items():
        if key in own and key not in newer:
            is_known_there = isinstance(told, Tensor) and isinstance(entries_of(value)[key], Unknown)
            is_later = is_complete and not _has_slots(told) and not alike(told, own[key])
            if not (is_known_there or is_later):
                continue
        _set(value, key, _heard(told, place))


def _set(value: Any, key: Any, entry: Any) -> None:
    try:
        set_entry(value, key, entry)
    except IndexError as error:
        raise StepError(f"Pipeline stages add different entries to a list. {WITHOUT_CACHE}") from error


def _different(value: Any, key: Any) -> StepError:
    return StepError(
        f"Pipeline stages leave different values as {key!r} of a {type(value).__name__} that the network is given. A"
        f" cache must know its layers from the beginning. {WITHOUT_CACHE}"
    )


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_small = value.numel() <= (_SMALL_FLOATS if _is_inexact(value) else SMALL)
        return value.detach().cpu() if is_small and not isinstance(value, Unknown) else Slot.of(value)
    return rebuilt(value, _told, WITHOUT_CACHE)


def _heard(value: Any, place: Callable[[Any], Tensor]) -> Any:
    if isinstance(value, (Slot, Tensor)):
        return place(value)
    return rebuilt(value, lambda each: _heard(each, place), WITHOUT_CACHE)
