"""Which entries of objects the blocks of each stage set within one call of the network.

Changes of objects that are there before a call are exchanged after it (``caches.py``), so a block doesn't find what an
earlier stage's blocks have set. Where each block has entries of its own, as in a cache of layers, nothing is missing.
Where blocks of two stages set the same entry, as two that append to a list or add to a sum, one stage's would be lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.objects import Path, is_object, snapshot
from lightning_shard.pipeline.dataflow.objects import entries as entries_of
from lightning_shard.versions import version

if TYPE_CHECKING:
    from lightning_shard.pipeline.runtime.caches import Noted

Entry = tuple[Path, Any]
"""An object's path, and the entry's key."""


class SetByBlocks:
    """Of one stage's run of a call.

    Attributes:
        entries: What blocks have set, in order, and whether another stage's blocks can't have set the same value. A
            number or a text that one block of each stage sets can be the same one, such as a length.
    """

    def __init__(self) -> None:
        self.entries: dict[Entry, bool] = {}
        self._before: dict[Path, tuple[dict[Any, Any], dict[Any, int]]] = {}

    def block_begins(self, noted: Mapping[Path, Noted]) -> None:
        self._before = {path: snapshot(each.value) for path, each in noted.items()}

    def block_ends(self, noted: Mapping[Path, Noted]) -> None:
        for path, (before, versions) in self._before.items():
            for key, value in entries_of(noted[path].value).items():
                is_set = key not in before or not tree.same_entries([before[key]], [value])
                # large tensors may hold a part for each layer, and each stage needs its own blocks' only
                is_sum = not is_set and isinstance(value, Tensor) and value.numel() == 1
                if is_set or (is_sum and version(value) != versions[key]):
                    is_own = isinstance(value, (Tensor, tuple)) or is_object(value)
                    self.entries[path, key] = is_own or (path, key) in self.entries


def set_by_several(stages: Iterable[Mapping[Entry, bool]]) -> dict[Entry, bool]:
    """The entries that blocks of several stages set, and whether their values can't be the same.

    Args:
        stages: What each stage's blocks set.
    """
    found = defaultdict[Entry, list[bool]](list)
    for entries in stages:
        for entry, is_own in entries.items():
            found[entry].append(is_own)
    return {entry: any(of_stages) for entry, of_stages in found.items() if len(of_stages) > 1}


def refuse_lost(key: Any, kind: str) -> NoReturn:
    raise StepError(
        f"Blocks of several pipeline stages set entry {key!r} of a {kind} that the network is given, as by appending to"
        " it or adding up, in a step that calls the network several times: a stage's blocks don't see there what"
        " earlier ones have set. Make it within the network's call, and return it; a cache must know its layers from"
        " the beginning, and texts are generated without one by use_cache=False. Or use pipeline_parallel_size=1."
    )
