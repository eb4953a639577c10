"""Which entries of objects the blocks of each stage set within one call of the network.

Changes of objects that are there before a call are exchanged after it (``caches.py``), so a block doesn't find what an
earlier stage's blocks have set. Where each block has entries of its own, as in a cache of layers, nothing is missing.
Where blocks of two stages set the same entry, as two that append to a list or add to a sum, one stage's would be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.objects import Path, is_object
from lightning_shard.pipeline.dataflow.objects import entries as entries_of
from lightning_shard.versions import version

if TYPE_CHECKING:
    from lightning_shard.pipeline.runtime.caches import Noted

Entry = tuple[Path, Any]
"""An object's path, and the entry's key."""
Told = list[tuple[Path, Any, int, bool]]
"""The entries that a stage's blocks set, how many blocks did, and whether the value is a tensor or an object."""


class SetByBlocks:
    """Of one stage's run of a call."""

    def __init__(self) -> None:
        self.times: Counter[Entry] = Counter()
        """How many blocks have set an entry."""
        self.of_values: set[Entry] = set()
        """Those that can't be the same value on two stages: tensors and objects. Numbers and texts can."""
        self._before: dict[Path, tuple[dict[Any, Any], dict[Any, int]]] = {}

    def block_begins(self, noted: Mapping[Path, Noted]) -> None:
        self._before = {path: _snapshot(each.value) for path, each in noted.items()}

    def block_ends(self, noted: Mapping[Path, Noted]) -> None:
        for path, (before, versions) in self._before.items():
            for key, value in entries_of(noted[path].value).items():
                is_set = key not in before or not _is_same(before[key], value)
                # large tensors may hold a part for each layer, and each stage needs its own blocks' only
                is_sum = not is_set and isinstance(value, Tensor) and value.numel() == 1
                if is_set or (is_sum and version(value) != versions[key]):
                    self.times[path, key] += 1
                    if isinstance(value, Tensor | tuple) or is_object(value):
                        self.of_values.add((path, key))

    def told(self) -> Told:
        """What other ranks are told of it."""
        return [(*entry, times, entry in self.of_values) for entry, times in self.times.items()]


def set_by_several(told: Iterable[Told]) -> dict[Entry, bool]:
    """The entries that blocks of several stages set, and whether their values can differ.

    A number or a text that one block of each stage sets can be the same one, such as a length.

    Args:
        told: What each stage's blocks set.
    """
    stages: Counter[Entry] = Counter()
    differ: set[Entry] = set()
    for stage in told:
        for path, key, times, is_value in stage:
            stages[path, key] += 1
            if is_value or times > 1:
                differ.add((path, key))
    return {entry: entry in differ for entry, number in stages.items() if number > 1}


def refuse_lost(key: Any, kind: str) -> NoReturn:
    raise StepError(
        f"Blocks of several pipeline stages set entry {key!r} of a {kind} that the network is given, as by appending to"
        " it or adding up, in a step that calls the network several times: a stage's blocks don't see there what"
        " earlier ones have set. Make it within the network's call, and return it; a cache must know its layers from"
        " the beginning, and texts are generated without one by use_cache=False. Or use pipeline_parallel_size=1."
    )


def _snapshot(value: Any) -> tuple[dict[Any, Any], dict[Any, int]]:
    held = dict(entries_of(value))
    return held, {key: version(each) for key, each in held.items() if isinstance(each, Tensor)}


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    plain = (bool, int, float, str, bytes)
    return type(one) is type(other) and isinstance(one, plain) and one == other
