"""Keeps a version of a module's plain-Python state for each of several stages on one rank.

The user's code runs once for each stage and microbatch, on the same objects, and may count, collect and cache on them.
With a version per stage, each stage's run continues from the state that the same stage's last run left, as it would on
a rank of its own. Versions live within a batch. At its end the module keeps the version of the rank's last stage, whose
runs got farthest; modules that another stage holds keep that stage's version.

For modules around the blocks, and in parts that a single stage holds, all attributes are swapped between runs. Other
state that a run changes, such as a list that hooks fill, or a global, is detected in a batch that searches for the
values that cross between stages (``pipeline/dataflow/search.py``). From then on it is followed, by its place.

Globals that no step or forward uses, but hooks or objects do, are one for all stages of the rank: hooks of several
stages' blocks collect there, and a version of one stage would lack what those of the others have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, repeat
from typing import Any, cast

from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.namespaces import Namespace
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.state.tree_state import Note, is_iterator, note_of, notes, uncounted
from lightning_shard.state.walk import (
    CONTAINERS,
    STAND_INS,
    attributes,
    below,
    beside,
    beside_classes,
    hold_same,
    reachable,
    slots,
)

LARGEST_COPY_BYTES = 2**24
"""Largest tensor on a module that is copied for each stage. A larger one may not be changed in place by a step."""

_Place = tuple[str, str]
"""A module's name and an attribute's; or a namespace's name and a name in it."""
_Marks = list[tuple[str, str, Any, int]]
"""A module's name, an attribute's, its container or tensor, and the length or version of that."""


@dataclass(frozen=True, eq=False)
class _Attributes:
    """One stage's version of a module's own attributes and buffers; iterators aren't swapped.

    Stages whose runs leave a module unchanged share one object as its version.

    Attributes:
        held: All entries of the module's ``__dict__``, for comparison.
    """

    module: nn.Module
    own: dict[str, Any]
    buffers: dict[str, Any]
    held: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Attributes:
        return cls(module, _exchanged(module), dict(module._buffers), dict(vars(module)))

    def copied(self) -> _Attributes:
        """A version with clones of its tensors."""
        own, buffers = ({k: _copied(v) for k, v in held.items()} for held in (self.own, self.buffers))
        if hold_same(own, self.own) and hold_same(buffers, self.buffers):
            return self
        return _Attributes(self.module, own, buffers, self.held | own)

    def is_current(self) -> bool:
        """Whether the module equals this version, as far as object identities tell."""
        is_same = hold_same(vars(self.module), self.held) and hold_same(self.module._buffers, self.buffers)
        return is_same and not slots(cast(Any, type(self.module)))

    def put_back(self) -> None:
        now = vars(self.module)
        for key in _exchanged(self.module).keys() - self.own.keys():
            del now[key]
        now.update(self.own)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)

    @cached_property
    def containers(self) -> dict[str, Any]:
        return {key: value for key, value in self._all if isinstance(value, CONTAINERS)}

    @cached_property
    def large(self) -> dict[str, Tensor]:
        """Tensors that are too large to be cloned for each stage."""
        return {key: value for key, value in self._all if _is_large(value)}

    @property
    def _all(self) -> Iterator[tuple[str, Any]]:
        return chain(self.own.items(), self.buffers.items())


@dataclass
class _Version:
    """The state that one stage's last run left: of modules, and of other followed objects by id."""

    modules: list[_Attributes] = field(default_factory=list)
    objects: dict[int, Note] = field(default_factory=dict)


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
        self._base: dict[int, Note] = {}
        self._versions: dict[Stage, _Version] = {}
        self._shown: list[_Attributes] | None = None  # the version that the modules hold, where that is known
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
        self._base.clear()
        self._shown = None

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
        self._base = dict(self._notes_of_places())
        now = [_Attributes.of(self._modules[path]) for path in self._exchanged]
        for stage in self._stages:
            own = [each if self._keeps(stage, path) else each.copied() for path, each in zip(self._exchanged, now)]
            self._versions[stage] = _Version(own)
        self._shown = now

    def show(self, stage: Stage) -> None:
        """Swap a stage's version into the module."""
        if not self._several:
            return
        version = self._versions[stage]
        for each, now in zip(version.modules, self._shown or repeat(None)):
            if each is not now:
                each.put_back()
        self._shown = version.modules
        if not self._base:
            return
        with uncounted():
            for number, base in self._followed():
                version.objects.get(number, base).put_back()

    def settle(self) -> None:
        """End a batch: keep the last stage's version, and for modules that another stage holds, that stage's."""
        if not self._several:
            return
        self.show(self._stages[-1])
        for stage in self._stages[:-1]:
            for path, each, now in zip(self._exchanged, self._versions[stage].modules, self._shown or ()):
                if self._keeps(stage, path) and each is not now:
                    each.put_back()
        self._put_back_of_holders()
        self._stages.leave_foreign()
        self._shown = None

    def _put_back_of_holders(self) -> None:
        """What is followed of a block, such as statistics of a layer that is called by itself, is its holder's."""
        with uncounted():
            for number, base in self._followed():
                holder = self._holder.get(self._place_of(base.path)[0])
                if holder is not None and holder is not self._stages[-1]:
                    self._versions[holder].objects.get(number, base).put_back()

    def changed(self) -> None:
        """Note that the module was changed outside of stages' runs."""
        self._shown = None

    @contextmanager
    def _running(self, stage: Stage) -> Iterator[None]:
        """Swap in the version of the stage that runs inside, and store what its run leaves as its next version."""
        self.show(stage)
        searching = stage.passage.active and stage.passage.searching
        before = [*notes(reachable(self._root))] if searching else []
        if searching:
            self._find_beside()  # the module may hold objects of other classes since
            before += [note for name, each in self._beside.items() if (note := note_of(name, each)) is not None]
        marks = self._marks(stage, searching=searching)
        yield
        self._check(stage, marks)
        if before:
            with uncounted():
                self._follow(stage, [note for note in before if note.has_changed()])
        objects = {number: note_of(base.path, base.value) for number, base in self._followed()}
        modules = [each if each.is_current() else _Attributes.of(each.module) for each in self._versions[stage].modules]
        self._versions[stage] = _Version(
            modules, {number: note for number, note in objects.items() if note is not None}
        )
        self._shown = modules

    def _follow(self, stage: Stage, changed: list[Note]) -> None:
        """Follow what a run changed, except in modules that its stage holds and in swapped attributes."""
        exchanged = self._of_calls()
        for each in self._versions[stage].modules:
            tensors = (v for v in (*each.own.values(), *each.buffers.values()) if isinstance(v, Tensor))
            exchanged.update(map(id, (each.module, each.module._buffers, *tensors)))
        for note in changed:
            module, key = self._place_of(note.path)
            if self._is_of_all_stages(note, module, key):
                continue
            is_own = self._holder.get(module) is stage and (key == "_buffers" or not key.startswith("_"))
            if not is_own and id(note.value) not in exchanged:
                self._places.add((module, key))
                self._paths.add(note.path)
                self._base.setdefault(id(note.value), note)

    def _followed(self) -> list[tuple[int, Note]]:
        of_calls = self._of_calls()
        return [(number, base) for number, base in self._base.items() if number not in of_calls]

    def _of_calls(self) -> set[int]:
        """Ids of objects that a call of the network is given: its stages' changes are merged, not kept apart."""
        calls = self._stages[-1].calls
        return calls.objects.ids() if calls is not None else set()

    def _notes_of_places(self) -> Iterator[tuple[int, Note]]:
        for name, key in sorted(self._places):
            place = ".".join(filter(None, (name, key)))
            is_held = self._holder.get(name) is not None  # its stage writes to the rest while others run
            for path, value in below(place, self._found_at(name, key)):
                if not (is_held and path not in self._paths) and (note := note_of(path, value)) is not None:
                    yield id(value), note

    def _found_at(self, name: str, key: str) -> Any:
        if name in self._modules:
            return vars(self._modules[name]).get(key)
        return self._beside[name].held.get(key) if key else self._beside[name]

    def _find_beside(self) -> None:
        self._beside = {each.name: each for each in beside_classes(self._root) if each.name not in self._modules}
        self._others = {each.name for each in beside(self._root)} - self._beside.keys() - self._modules.keys()

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
        known = self._modules.keys() | self._beside.keys()
        most = max(n for n in range(len(parts) + 1) if ".".join(parts[:n]) in known)
        return ".".join(parts[:most]), "".join(parts[most : most + 1])

    def _marks(self, stage: Stage, *, searching: bool) -> _Marks:
        """Marks of what a run may not change, as it isn't followed: large tensors, containers not seen to change.

        Compared in each action of each microbatch.
        """
        marks: _Marks = []
        for path, each in zip(self._exchanged, self._versions[stage].modules):
            if not searching:
                marks += [(path, key, held, len(held)) for key, held in each.containers.items()]
            if each.large and not self._keeps(stage, path):
                marks += [(path, key, tensor, tensor._version) for key, tensor in each.large.items()]
        return marks

    def _check(self, stage: Stage, marks: _Marks) -> None:
        """
        Raises:
            StepError: A run has changed what isn't followed, and isn't the stage's own.
        """
        now = ((each, each[2]._version if isinstance(each[2], Tensor) else len(each[2])) for each in marks)
        changed = [each for each, mark in now if mark != each[3] and id(each[2]) not in self._base]
        shared = self._containers_besides(stage) if changed else set()
        for path, key, held, _ in changed:
            if isinstance(held, Tensor) or id(held) in shared:
                raise _not_followed(path, key, len(self._stages))

    def _containers_besides(self, stage: Stage) -> set[int]:
        """Ids of the containers in other stages' versions; one that a stage's run has made is in its own only."""
        versions = (version for each, version in self._versions.items() if each is not stage)
        return {id(held) for version in versions for each in version.modules for held in each.containers.values()}

    def _keeps(self, stage: Stage, path: str) -> bool:
        """Whether a stage uses a module's own tensors, while other stages have clones."""
        return stage is (self._holder[path] or self._stages[-1])

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


def _exchanged(module: nn.Module) -> dict[str, Any]:
    held = attributes(module).items()
    return {key: value for key, value in held if key not in STAND_INS and not is_iterator(value)}


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() > LARGEST_COPY_BYTES


def _copied(value: Any) -> Any:
    is_plain = type(value) in (Tensor, nn.Buffer) and not value.requires_grad and not value.is_meta
    return value.clone() if is_plain and not _is_large(value) else value


def _not_followed(module: str, key: str, stages: int) -> StepError:
    path = ".".join(filter(None, (module, key)))
    return StepError(
        f"The step changes {path} in place. {stages} stages on this rank run it, and each needs a version of its own."
        f" None are kept of tensors over {LARGEST_COPY_BYTES >> 20} MiB, and of lists, dicts and sets that the first"
        " microbatch of these shapes didn't change: assign a new one instead, change it in on_train_batch_start or"
        ' on_train_batch_end, or use a schedule with one stage on each rank, such as schedule="1F1B".',
        breaks=6,
    )
