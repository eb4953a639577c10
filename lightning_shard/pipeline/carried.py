"""What a call of the network leaves in the objects that it is given, such as a cache of keys and values.

Each stage changes what belongs to its own blocks. So that the next call finds objects that are alike on all stages, the
changes of each are told to the others: numbers and small integer tensors as they are, other tensors by their shapes,
as values that aren't known there (``taint.py``). No memory is spent on these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.crossing import Slot
from lightning_shard.pipeline.taint import Unknown

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


@dataclass(frozen=True)
class Noted:
    """An object as it was before the call."""

    value: Any
    entries: dict[Any, Any]
    versions: dict[Any, int]

    @classmethod
    def of(cls, value: Any) -> Noted:
        entries = dict(_entries(value))
        return cls(value, entries, {key: each._version for key, each in entries.items() if isinstance(each, Tensor)})

    def put_back(self, name: str) -> None:
        """Have it be as it was, so that the call can be run again.

        Raises:
            StepError: A tensor in it was written to.
        """
        if any(self.entries[key]._version != version for key, version in self.versions.items()):
            raise StepError(f"{name} is written to in place by a call that must run once more. {WITHOUT_CACHE}")
        if isinstance(self.value, list):
            self.value[:] = self.entries.values()
        else:
            _entries(self.value).clear()
            _entries(self.value).update(self.entries)

    def changes(self) -> dict[Any, Any]:
        """Its new entries, as they are told to other stages."""
        now = _entries(self.value)
        if gone := self.entries.keys() - now.keys():
            raise StepError(
                f"The network takes {sorted(map(repr, gone))} out of a {type(self.value).__name__} that it is given,"
                f" which other pipeline stages wouldn't see. {WITHOUT_CACHE}"
            )
        absent = object()
        return {
            key: _told(value)
            for key, value in now.items()
            if self.entries.get(key, absent) is not value
            or (key in self.versions and value._version != self.versions[key])
        }


def apply(value: Any, changes: Mapping[Any, Any], own: Mapping[Any, Any], place: Callable[[Any], Tensor]) -> None:
    """Have an object be changed as it was on another stage.

    Args:
        own: What was changed here; the other stage may have changed it too, to the same.
        place: Gives a tensor for one that was sent, or for a slot.

    Raises:
        StepError: It was changed to something else.
    """
    for key, told in changes.items():
        if key in own:
            if not _alike(told, own[key]):
                raise StepError(
                    f"Pipeline stages leave different values as {key!r} of a {type(value).__name__} that the network is"
                    f" given. A cache must know its layers from the beginning. {WITHOUT_CACHE}"
                )
        elif isinstance(value, list):
            if key > len(value):
                raise StepError(f"Pipeline stages add different entries to a list. {WITHOUT_CACHE}")
            value[key : key + 1] = [_heard(told, place)]
        else:
            _entries(value)[key] = _heard(told, place)


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
