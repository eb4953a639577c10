"""Keeps a version of a module's plain-Python state for each of several stages on one rank.

The user's code runs once for each stage and microbatch, on the same objects, and may count, collect and cache on them.
With a version per stage, each stage's run continues from the state that the same stage's last run left, as it would on
a rank of its own. Versions live within a batch. At its end the module keeps the version of the rank's last stage, whose
runs got farthest; modules that another stage holds keep that stage's version.

A version is a note of each object that is followed (``state/tree_state.py``). These are the attributes of modules
around the blocks, and in parts that a single stage holds. What else a run changes, such as a tensor, a list that hooks
fill, or a global, is detected in a batch that searches for the values that cross between stages
(``pipeline/dataflow/search.py``). From then on it is followed, by its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.namespaces import Namespace
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.state.patch import mark_of
from lightning_shard.state.tree_state import Note, is_iterator, note_of, notes, uncounted
from lightning_shard.state.walk import (
    CONTAINERS,
    STAND_INS,
    attributes,
    below,
    beside_classes,
    hold_same,
    put_entries,
    reachable,
    slots,
)

_Place = tuple[str, str]
"""A module's name and an attribute's; or a namespace's name and a name in it."""


class _Attributes:
    """The note of a module's own attributes, without iterators, and without what shadows methods while a step runs."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.value = path, module
        self.own = {key: value for key, value in attributes(module).items() if _is_exchanged(key, value)}
        self._held = dict(vars(module))  # all, for comparison

    def put_back(self) -> None:
        now = attributes(self.value).items()
        put_entries(self.value, {key: each for key, each in now if not _is_exchanged(key, each)} | self.own)

    def has_changed(self) -> bool:
        return bool(slots(cast(Any, type(self.value)))) or not hold_same(vars(self.value), self._held)

    @cached_property
    def marked(self) -> dict[str, Any]:
        """What a run may change in place."""
        both = chain(self.own.items(), self.value._buffers.items())
        return {key: value for key, value in both if isinstance(value, (Tensor, *CONTAINERS))}


_Version = dict[int, Note | _Attributes]
"""The state that one stage's last run left: the note of each followed object, by its id."""


class StatesApart:
    """The state versions of one rank's stages; does nothing for a single stage.

    Args:
        root: Cut and sharded.
        stages: This rank's.
    """

    def __init__(self, root: nn.Module, stages: Stages) -> None:
        self._root = root
        self._stages = stages
        self._several = len(stages) > 1
        self._places: set[_Place] = set()
        self._paths: set[str] = set()
        self._versions: dict[Stage, _Version] = {}
        self._shown: _Version = {}  # what the objects hold, as far as that is known
        if not self._several:
            return
        self._modules = dict(root.named_modules())
        self._beside: dict[str, Namespace] = {}
        self._others: set[str] = set()
        self._find_beside()
        self._holder = {path: self._held_by(path) for path in self._modules}
        within = tuple(f"{name}." for name in (*stages[0].blocks, *stages[0].parts))
        parts = tuple(f"{name}." for name in stages[0].parts)
        around = [path for path in self._modules if not f"{path}.".startswith(within)]
        of_parts = [path for path, stage in self._holder.items() if stage and f"{path}.".startswith(parts)]
        self._exchanged = [*around, *of_parts]
        for stage in stages:
            stage.apart = partial(self._running, stage)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Keep versions while a batch's microbatches run inside."""
        self.begin()
        yield
        self._versions.clear()
        self._shown = {}

    @contextmanager
    def call(self) -> Iterator[Callable[[], None]]:
        """Keep versions for one call of the network, in a step with several; yields what ends them (:meth:`settle`)."""
        with self._stages.hidden():
            self.begin()
            yield self.settle

    def begin(self) -> None:
        """Begin every stage's version from the module's current state, also where that was put back."""
        if not self._several:
            return
        self._shown = {id(note.value): note for note in self._followed()}
        self._versions = {stage: dict(self._shown) for stage in self._stages}

    def show(self, stage: Stage) -> None:
        """Swap a stage's version into the module."""
        if self._several:
            self._put(self._versions[stage].items())
            self._shown = self._versions[stage]

    def settle(self) -> None:
        """End a batch: keep the last stage's version, and for modules that another stage holds, that stage's.

        So what is followed of a block, such as statistics of a layer that is called by itself, is its holder's.
        """
        if not self._several:
            return
        self.show(self._stages[-1])
        for number, note in self._shown.items():
            if (holder := self._holder.get(self._place_of(note.path)[0])) is not None:
                self._put([(number, self._versions[holder][number])])
        self._stages.leave_foreign()
        self._shown = {}

    def _put(self, version: Iterable[tuple[int, Note | _Attributes]]) -> None:
        of_calls = self._of_calls()
        with uncounted():
            for number, note in version:
                if self._shown.get(number) is not note and number not in of_calls:
                    note.put_back()

    @contextmanager
    def _running(self, stage: Stage) -> Iterator[None]:
        """Swap in the version of the stage that runs inside, and store what its run leaves as its next version."""
        self.show(stage)
        searching = stage.passage.active and stage.passage.searching
        # the module may hold objects of other classes since
        before = [*notes([*self._find_beside(), *self._beside.items()])] if searching else []
        marks = [] if searching else [*self._marks(stage)]
        yield
        self._check(stage, marks)
        with uncounted():
            self._follow(stage, [note for note in before if note.has_changed()])
            self._shown = {number: _as_now(note) for number, note in self._versions[stage].items()}
        self._versions[stage] = self._shown

    def _follow(self, stage: Stage, changed: list[Note]) -> None:
        """Follow what a run changed, except in modules that its stage holds."""
        known = self._versions[stage].keys() | self._of_calls()
        for note in changed:
            module, key = self._place_of(note.path)
            if self._is_of_all_stages(note, module, key):
                continue
            is_own = self._holder.get(module) is stage and (key == "_buffers" or not key.startswith("_"))
            if not is_own and id(note.value) not in known:
                self._places.add((module, key))
                self._paths.add(note.path)
                for version in self._versions.values():
                    version.setdefault(id(note.value), note)

    def _of_calls(self) -> set[int]:
        """Ids of objects that a call of the network is given: its stages' changes are merged, not kept apart."""
        calls = self._stages[-1].calls
        return calls.objects.ids() if calls is not None else set()

    def _followed(self) -> Iterator[Note | _Attributes]:
        """Notes of what is followed, as it is now."""
        for name, key in sorted(self._places):
            is_held = self._holder.get(name) is not None  # its stage writes to the rest while others run
            found = below(_joined(name, key), self._found_at(name, key))
            yield from notes((path, value) for path, value in found if path in self._paths or not is_held)
        for name in self._exchanged:
            module = self._modules[name]
            yield _Attributes(name, module)
            yield from notes([(_joined(name, "_buffers"), module._buffers)])

    def _found_at(self, name: str, key: str) -> Any:
        if name in self._modules:
            return vars(self._modules[name]).get(key)
        return self._beside[name].held.get(key) if key else self._beside[name]

    def _find_beside(self) -> list[tuple[str, Any]]:
        """Find the namespaces that the module's code uses; returns all that is reachable from it."""
        found = reachable(self._root)
        self._beside = {each.name: each for each in beside_classes(self._root) if each.name not in self._modules}
        used = {each.name for _, each in found if isinstance(each, Namespace)}
        self._others = used - self._beside.keys() - self._modules.keys()
        return found

    def _is_of_all_stages(self, note: Note, module: str, key: str) -> bool:
        """Whether it is of globals that only hooks and objects use."""
        if isinstance(note.value, Namespace):
            return note.value is not self._beside.get(note.path)
        if module in self._beside:
            names = self._beside[module].names
            return names is not None and key not in names
        return not module and any(f"{note.path}.".startswith(f"{name}.") for name in self._others)

    def _place_of(self, path: str) -> _Place:
        """The innermost module, or the namespace, on a path, and the name that follows it there."""
        parts = path.split(".") if path else []
        starts = [(".".join(parts[:n]), n) for n in range(len(parts), -1, -1)]
        name, length = next(start for start in starts if start[0] in self._modules or start[0] in self._beside)
        return name, "".join(parts[length : length + 1])

    def _marks(self, stage: Stage) -> Iterator[tuple[str, str, Any, int]]:
        """What a run may not change in place, as it isn't followed: tensors and containers not seen to change.

        Compared in each action of each microbatch.
        """
        version = self._versions[stage]
        for note in version.values():
            if isinstance(note, _Attributes) and stage is not (self._holder[note.path] or self._stages[-1]):
                for key, held in note.marked.items():
                    if id(held) not in version:
                        yield note.path, key, held, mark_of(held)

    def _check(self, stage: Stage, marks: list[tuple[str, str, Any, int]]) -> None:
        """
        Raises:
            StepError: A run has changed what isn't followed. One that a stage's run has made is in its version only.
        """
        for module, key, held, mark in marks:
            if mark_of(held) != mark and any(held is each for each in self._marked_besides(stage)):
                raise StepError(
                    f"The step changes {_joined(module, key)} in place. {len(self._stages)} stages on this rank run it,"
                    " and each needs a version of its own. None are kept of what the first microbatch of these shapes"
                    " didn't change: assign a new one instead, change it in on_train_batch_start or on_train_batch_end,"
                    ' or use a schedule with one stage on each rank, such as schedule="1F1B".',
                    breaks=6,
                )

    def _marked_besides(self, stage: Stage) -> Iterator[Any]:
        """The tensors and containers in other stages' versions of modules."""
        versions = (version for each, version in self._versions.items() if each is not stage)
        noted = (note for version in versions for note in version.values() if isinstance(note, _Attributes))
        return (held for note in noted for held in note.marked.values())

    def _held_by(self, path: str) -> Stage | None:
        """The one stage of this rank that holds the block or part that contains a module."""
        for stage in self._stages:
            names = {
                *(name for name, places in stage.places.items() if all(place in stage.owned for place in places)),
                *stage.own_parts,
            }
            if any(f"{path}.".startswith(f"{name}.") for name in names):
                return stage
        return None


def _as_now(note: Note | _Attributes) -> Note | _Attributes:
    """The same note of what has not changed since."""
    if not note.has_changed():
        return note
    if isinstance(note, _Attributes):
        return _Attributes(note.path, note.value)
    return note_of(note.path, note.value) or note


def _is_exchanged(key: str, value: Any) -> bool:
    return key not in STAND_INS and not is_iterator(value)


def _joined(module: str, key: str) -> str:
    return ".".join(filter(None, (module, key)))
