"""Mutable objects among the arguments of a call of the network, and of its blocks, such as caches and lists of losses.

Each rank's stages run the call on objects of their own. A rank notes what is there before (``caches.py``), which of the
objects the call has made itself, and what blocks set (``set_by_blocks.py``). When all stages have run, ranks tell each
other what has changed, and have the same entries again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.objects import Path, objects
from lightning_shard.pipeline.dataflow.side_effects import is_cache
from lightning_shard.pipeline.runtime.caches import WITHOUT_CACHE, Left, Noted, Place, add, apply, apply_to_made
from lightning_shard.pipeline.runtime.set_by_blocks import Entry, SetByBlocks, refuse_lost, set_by_several


@dataclass(frozen=True)
class Changes:
    """What a rank tells of the objects that its stages' runs of a call have changed.

    Attributes:
        of: By path, the changed entries.
        made: The paths of those that the call itself has made.
        by_blocks: By stage, what its blocks have set (:attr:`SetByBlocks.entries`).
    """

    of: dict[Path, dict[Any, Any]]
    made: set[Path]
    by_blocks: dict[int, dict[Entry, bool]]


class GivenObjects:
    """Of one rank, in one step.

    Args:
        rank: This rank's number in the pipeline.
        place: Makes what this rank has of a tensor, or a slot, that another rank's object holds.
    """

    def __init__(self, rank: int, place: Place) -> None:
        self._rank = rank
        self._place = place
        self._stage = 0
        self._of_network: dict[Path, Noted] = {}
        self._noted: dict[Path, Noted] = {}  # also of the blocks of the current, or last, stage
        self._made: dict[int, Path] = {}
        self._of_last_call: list[Any] = []
        self._left: dict[int, dict[Path, Left]] = {}
        self._by_blocks: dict[int, SetByBlocks] = {}

    def call_begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._note((), args, kwargs, self._of_network)

    def call_ends(self) -> None:
        self._of_last_call = [noted.value for noted in self._noted.values()]
        for each in (self._of_network, self._noted, self._made, self._left, self._by_blocks):
            each.clear()

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Context in which a stage runs its part of a call, with the network's arguments as they were at the call."""
        for path, noted in self._noted.items():
            noted.put_back(f"{type(noted.value).__name__} ({'.'.join(map(str, path))})", stage, self._place)
        self._noted = dict(self._of_network)
        self._made.clear()
        self._stage, self._by_blocks[stage] = stage, SetByBlocks()
        yield
        self._left[stage] = {path: noted.left(stage) for path, noted in self._noted.items()}

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
        self._by_blocks[self._stage].block_begins(self._noted)

    def block_ends(self) -> None:
        """A block of the current stage returns."""
        self._by_blocks[self._stage].block_ends(self._noted)

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
                f" get to. {WITHOUT_CACHE}"
            )
        return self._noted[path].value

    def __contains__(self, path: Path) -> bool:
        return path in self._noted

    def changes(self) -> Changes:
        """Merge the changes of all stages of this rank into the objects; returns what other ranks are told.

        Raises:
            StepError: Stages left different values in an object that was there before the call.
        """
        *siblings, last = (self._left[stage] for stage in sorted(self._left))
        made = {*self._made.values()}
        by_blocks = {stage: each.entries for stage, each in self._by_blocks.items()}
        self._refuse_lost(set_by_several(by_blocks.values()), made)
        for each in siblings:
            for path, left in each.items():
                if left.told and (path in self or path not in made):
                    add(self.at(path), left, last[path], is_made=path in made)
        return Changes({path: left.told for path, left in last.items() if left.told}, made, by_blocks)

    def take(self, told: Sequence[Changes]) -> None:
        """Apply the changes of the other ranks.

        Args:
            told: All ranks' changes; the last stage's rank comes last.

        Raises:
            StepError: As :meth:`changes`.
        """
        stages = sorted((stage, rank) for rank, each in enumerate(told) for stage in each.by_blocks)
        by_blocks = [(rank, told[rank].by_blocks[stage]) for stage, rank in stages]
        several = set_by_several(entries for _, entries in by_blocks)
        self._refuse_lost(several, {path for each in told for path in each.made})
        newest = {entry: rank for rank, entries in by_blocks for entry in entries if entry in several}
        for rank, theirs in enumerate(told):
            if rank != self._rank:
                self._apply(rank, theirs, told[self._rank], newest, is_complete=rank == len(told) - 1)
        for path, noted in self._of_network.items():
            noted.put_in_order(key for _, entries in by_blocks for each, key in entries if each == path)

    def _apply(
        self, rank: int, theirs: Changes, own: Changes, newest: Mapping[Entry, int], *, is_complete: bool
    ) -> None:
        for path, changed in theirs.of.items():
            mine = own.of.get(path, {})
            if path not in theirs.made:
                apply(self.at(path), changed, mine, self._place)
            elif path in self:  # else this rank's stages don't come to it
                setters = {key: newest.get((path, key)) for key in changed}
                newer = {key for key, setter in setters.items() if setter == rank}
                valid = {k: each for k, each in changed.items() if is_complete or setters[k] in (rank, None)}
                apply_to_made(self.at(path), valid, mine, self._place, is_complete=is_complete, newer=newer)

    def _refuse_lost(self, entries: Mapping[Entry, bool], made: Collection[Path]) -> None:
        for (path, key), may_differ in entries.items():
            if may_differ and path not in made:
                refuse_lost(key, type(self.at(path)).__name__)

    def _note(
        self, prefix: Path, args: Sequence[Any], kwargs: Mapping[str, Any], into: dict[Path, Noted]
    ) -> list[tuple[Path, Noted]]:
        """Note objects among arguments; returns those that weren't noted before."""
        seen, new = {id(noted.value) for noted in into.values()}, []
        for key, argument in [*enumerate(args), *kwargs.items()]:
            for path, value in objects(argument, (*prefix, key), seen):
                into[path] = noted = Noted.of(value)
                new.append((path, noted))
        return new
