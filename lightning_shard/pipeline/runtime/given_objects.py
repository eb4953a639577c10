"""Mutable objects among the arguments of a call of the network, and of its blocks, such as caches and lists of losses.

Each stage runs its part of the call on the objects as they were before it. What it has changed in them is told to all
ranks, and each gives every entry one value: that of the last stage whose blocks have set it; else, since all stages run
the code around the blocks, that of the last stage that has changed it and knows the value. Numbers and small tensors
are told by value; other tensors by shape, as unknown values (``taint.py``), which take no memory.

Of objects that are there before the call a block doesn't find what an earlier stage's blocks have set. Where each block
has entries of its own, as in a cache of layers, nothing is missing. Where blocks of two stages set one entry, as two
that append to a list or add to a sum, one stage's would be lost: that is refused. Objects that the call itself makes,
and gives to its blocks, are made by each stage anew, and what earlier stages' blocks set in them is followed within the
call, as in a step that calls the network once (``own_call.py``, ``stand_in.py``).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.messages import Slot
from lightning_shard.pipeline.dataflow.objects import Path, alike, is_object, objects, rebuilt, set_entry, snapshot
from lightning_shard.pipeline.dataflow.objects import entries as entries_of
from lightning_shard.pipeline.dataflow.side_effects import is_cache
from lightning_shard.pipeline.dataflow.taint import Unknown, fill
from lightning_shard.versions import version

SMALL = 1024
"""The most elements of an integer tensor that is told by value: lengths and positions, of which masks are computed."""
_SMALL_FLOATS = 64
"""The same of other tensors, such as losses."""
_WITHOUT_CACHE = "Generate without a cache (use_cache=False), or use pipeline_parallel_size=1."

Place = Callable[[Any], Tensor]
"""Gives the local tensor for a told tensor, or an unknown one for a slot."""

Entry = tuple[Path, Any]
"""An object's path, and the entry's key."""


class _Left:
    """An entry that a stage's run of a call has changed.

    Args:
        value: Itself.
        written: If it is a small tensor that was there before, a copy: the next stage finds it as it was.
    """

    def __init__(self, value: Any, written: Tensor | None) -> None:
        self._value = value
        self._written = written
        self.told = _told(value if written is None else written)

    @property
    def is_unknown(self) -> bool:
        return isinstance(self._value, Unknown)

    def put(self, holder: Any, key: Any) -> None:
        _set(holder, key, self._value)
        if isinstance(self._written, Unknown):
            self._value.copy_(self._written)
        elif self._written is not None:
            fill(self._value, self._written)


@dataclass
class _Noted:
    """An object as it was before the call.

    Attributes:
        value: The object.
        entries: Its entries.
        given: The entries with which the current stage's run began.
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
    def of(cls, value: Any) -> _Noted:
        held, versions = snapshot(value)
        tensors = {key: held[key] for key in versions}
        small = {k: t.detach().clone() for k, t in tensors.items() if t.numel() <= SMALL and not isinstance(t, Unknown)}
        return cls(value, held, held, versions, small)

    def put_back(self, name: str, stage: int, place: Place) -> None:
        """Restore the object, so that a stage can run its part of the call.

        Raises:
            StepError: The stage ran it before, and wrote to a large tensor, of which there is no copy.
        """
        for key, value in self.values.items():
            if self._is_written(key):
                fill(self.entries[key], value)  # it may have become unknown
                self.versions[key] = version(self.entries[key])
        if stage in self.writers.values():
            raise StepError(
                f"{name} is written to in place by a call that must run once more. {_WITHOUT_CACHE}", breaks=3
            )
        self.given = self.entries | {key: place(Slot.of(self.entries[key])) for key in self.writers}
        if isinstance(self.value, list):
            self.value[:] = self.given.values()
        else:
            entries_of(self.value).clear()
            entries_of(self.value).update(self.given)

    def left(self, stage: int) -> dict[Any, _Left]:
        """The entries that this stage's run has changed.

        Raises:
            StepError: It has taken an entry out.
        """
        now = entries_of(self.value)
        if gone := self.given.keys() - now.keys():
            raise StepError(
                f"The network takes {sorted(map(repr, gone))} out of a {type(self.value).__name__} that it is given,"
                f" which other pipeline stages wouldn't see. {_WITHOUT_CACHE}",
                breaks=3,
            )
        absent = object()
        written = {key for key in self.versions if self._is_written(key) and not self._is_as_before(key)}
        for key in written - self.values.keys():
            self.writers[key], self.versions[key] = stage, version(self.entries[key])
        copied = {key for key in self.values if now.get(key, absent) is self.entries[key]}
        return {
            key: _Left(value, value.detach().clone() if key in copied else None)
            for key, value in now.items()
            if self.given.get(key, absent) is not value or key in written
        }

    def put_in_order(self, of_blocks: Iterable[Any]) -> None:
        """Give a dict the same order on all ranks: what was there, what blocks have set, in order, and the rest."""
        if type(self.value) not in (dict, defaultdict, OrderedDict):
            return
        keys = dict.fromkeys(key for key in (*self.entries, *of_blocks, *self.value) if key in self.value)
        if [*keys] != [*self.value]:
            for key in keys:
                self.value[key] = self.value.pop(key)

    def _is_written(self, key: Any) -> bool:
        return version(self.entries[key]) != self.versions[key]

    def _is_as_before(self, key: Any) -> bool:
        """Whether a small tensor is unchanged: views share a version, so the write may have been to another view."""
        now = self.entries[key]
        return key in self.values and not isinstance(now, Unknown) and torch.equal(self.values[key], now)


@dataclass(frozen=True)
class Told:
    """What a rank tells of its stages' runs of a call.

    Attributes:
        changed: By stage, the changed entries, in the form in which they are told.
        by_blocks: By stage, what its blocks have set, in order, and whether blocks of another stage can't have set the
            same value. A number or a text that one block of each stage sets can be the same one, such as a length.
        made: The paths of objects that the call itself has made.
    """

    changed: dict[int, dict[Entry, Any]]
    by_blocks: dict[int, dict[Entry, bool]]
    made: set[Path]


class GivenObjects:
    """Of one rank, in one step.

    Args:
        place: Makes what this rank has of a tensor, or a slot, that another rank's object holds.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._stage = 0
        self._of_network: dict[Path, _Noted] = {}
        self._noted: dict[Path, _Noted] = {}  # also of the blocks of the current, or last, stage
        self._made: dict[int, Path] = {}
        self._of_last_call: list[Any] = []
        self._left: dict[int, dict[Entry, _Left]] = {}
        self._by_blocks: dict[int, dict[Entry, bool]] = {}
        self._before_block: dict[Path, tuple[dict[Any, Any], dict[Any, int]]] = {}

    def call_begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._note((), args, kwargs, self._of_network)

    def call_ends(self) -> None:
        self._of_last_call = [noted.value for noted in self._noted.values()]
        for each in (self._of_network, self._noted, self._made, self._left, self._by_blocks, self._before_block):
            each.clear()

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Context in which a stage runs its part of a call, with the network's arguments as they were at the call."""
        for path, noted in self._noted.items():
            noted.put_back(f"{type(noted.value).__name__} ({'.'.join(map(str, path))})", stage, self._place)
        self._noted = dict(self._of_network)
        self._made.clear()
        self._stage, self._by_blocks[stage] = stage, {}
        yield
        left = ((path, noted.left(stage)) for path, noted in self._noted.items())
        self._left[stage] = {(path, key): each for path, entries in left for key, each in entries.items()}

    def block_begins(self, block: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A block is called: note objects in its arguments that weren't noted yet.

        Those that the call before didn't have either are taken to be made by this one. Caches aren't followed within
        the call: what layers keep is large, and each block has its own.
        """
        there_before = {id(each) for each in self._of_last_call}
        for path, noted in self._note(("block", block), args, kwargs, self._noted):
            above = (self._noted[path[:length]] for length in range(len(path)) if path[:length] in self._noted)
            if id(noted.value) not in there_before and not any(is_cache(each.value) for each in (noted, *above)):
                self._made[id(noted.value)] = path
        self._before_block = {path: snapshot(each.value) for path, each in self._noted.items()}

    def block_ends(self) -> None:
        """A block of the current stage returns: note which entries it has set."""
        entries = self._by_blocks[self._stage]
        for path, (before, versions) in self._before_block.items():
            for key, value in entries_of(self._noted[path].value).items():
                is_set = key not in before or not tree.same_entries([before[key]], [value])
                # large tensors may hold a part for each layer, and each stage needs its own blocks' only
                is_sum = not is_set and isinstance(value, Tensor) and value.numel() == 1
                if is_set or (is_sum and version(value) != versions[key]):
                    is_own = isinstance(value, (Tensor, tuple)) or is_object(value)
                    entries[path, key] = is_own or (path, key) in entries

    def has_made(self, value: Any) -> bool:
        """Whether the current call has made an object, as far as blocks were given it."""
        return id(value) in self._made

    def ids(self) -> set[int]:
        """The ids of the objects noted so far in this call, and of the tensors in them."""
        tensors = (each for n in self._noted.values() for each in n.entries.values() if isinstance(each, Tensor))
        return {id(each) for each in chain(tensors, (n.value for n in self._noted.values()))}

    def paths(self) -> dict[int, Path]:
        """By the ids of objects, where this rank's last stage has noted them."""
        return {id(noted.value): path for path, noted in self._noted.items()}

    def at(self, path: Path) -> Any:
        """The object at a path.

        Raises:
            StepError: This rank's last stage has none there.
        """
        if path not in self._noted:
            raise StepError(
                f"A pipeline stage changes or returns an object ({'.'.join(map(str, path))}) that another one didn't"
                f" get to. {_WITHOUT_CACHE}",
                breaks=3,
            )
        return self._noted[path].value

    def __contains__(self, path: Path) -> bool:
        return path in self._noted

    def told(self) -> Told:
        """What this rank's stages have changed."""
        changed = {stage: {entry: each.told for entry, each in left.items()} for stage, left in self._left.items()}
        return Told(changed, dict(self._by_blocks), {*self._made.values()})

    def take(self, told: Sequence[Told]) -> None:
        """Give all entries that any stage has changed one value on all ranks.

        Args:
            told: By all ranks; the last stage's rank comes last.

        Raises:
            StepError: Several stages have set an entry of an object that was there before the call otherwise.
        """
        changed = dict(sorted(item for each in told for item in each.changed.items()))
        by_blocks = dict(sorted(item for each in told for item in each.by_blocks.items()))
        made = set().union(*(each.made for each in told))
        several = Counter(chain.from_iterable(by_blocks.values()))
        for entry, number in several.items():
            is_own = any(entries.get(entry, False) for entries in by_blocks.values())
            if number > 1 and is_own and entry[0] not in made:
                raise _lost(entry[1], type(self.at(entry[0])).__name__)
        for entry in dict.fromkeys(chain.from_iterable(changed.values())):
            if entry[0] in self or entry[0] not in made:  # else this rank's stages don't come to it
                every = {stage: entries[entry] for stage, entries in changed.items() if entry in entries}
                setters = [stage for stage in every if entry in by_blocks[stage]]
                knowing = [stage for stage, each in every.items() if not _has_slots(each)]
                owner = (setters or knowing or [*every])[-1]
                if setters and knowing and knowing[-1] > owner and not alike(every[owner], every[knowing[-1]]):
                    if entry[0] not in made:
                        raise _lost(entry[1], type(self.at(entry[0])).__name__)
                    owner = knowing[-1]  # which has followed what the blocks have set
                self._give(entry, owner, every[owner], is_newer=len(setters) > 1)
        for path, noted in self._of_network.items():
            noted.put_in_order(key for entries in by_blocks.values() for each, key in entries if each == path)

    def _give(self, entry: Entry, owner: int, told: Any, *, is_newer: bool) -> None:
        """Set an entry to what a stage has left.

        Args:
            is_newer: Whether other stages' blocks have set it before.
        """
        holder, key = self.at(entry[0]), entry[1]
        own = next((left[entry] for left in reversed(self._left.values()) if entry in left), None)
        if owner in self._left:
            self._left[owner][entry].put(holder, key)
        elif own is not None and not own.is_unknown and not is_newer and (_has_slots(told) or alike(told, own.told)):
            own.put(holder, key)  # with values that aren't told
        else:
            _set(holder, key, _heard(told, self._place))

    def _note(
        self, prefix: Path, args: Sequence[Any], kwargs: Mapping[str, Any], into: dict[Path, _Noted]
    ) -> list[tuple[Path, _Noted]]:
        """Note objects among arguments; returns those that weren't noted before."""
        seen, new = {id(noted.value) for noted in into.values()}, []
        for key, argument in [*enumerate(args), *kwargs.items()]:
            for path, value in objects(argument, (*prefix, key), seen):
                into[path] = noted = _Noted.of(value)
                new.append((path, noted))
        return new


def _set(value: Any, key: Any, entry: Any) -> None:
    try:
        set_entry(value, key, entry)
    except IndexError as error:
        raise StepError(f"Pipeline stages add different entries to a list. {_WITHOUT_CACHE}", breaks=3) from error


def _lost(key: Any, kind: str) -> StepError:
    return StepError(
        f"Blocks of several pipeline stages set entry {key!r} of a {kind} that the network is given, as by appending to"
        " it or adding up, in a step that calls the network several times: a stage's blocks don't see there what"
        " earlier ones have set. Make it within the network's call, and return it; a cache must know its layers from"
        " the beginning, and texts are generated without one by use_cache=False. Or use pipeline_parallel_size=1.",
        breaks=3,
    )


def _has_slots(told: Any) -> bool:
    if isinstance(told, (Slot, Tensor)):
        return isinstance(told, Slot)
    return (is_object(told) or isinstance(told, tuple)) and any(map(_has_slots, entries_of(told).values()))


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        most = _SMALL_FLOATS if value.is_floating_point() or value.is_complex() else SMALL
        is_small = value.numel() <= most and not isinstance(value, Unknown)
        return value.detach().cpu().clone() if is_small else Slot.of(value)
    return rebuilt(value, _told, _WITHOUT_CACHE)


def _heard(value: Any, place: Place) -> Any:
    if isinstance(value, (Slot, Tensor)):
        return place(value)
    return rebuilt(value, lambda each: _heard(each, place), _WITHOUT_CACHE)
