"""Mutable objects among the arguments of a call of the network, and of its blocks, such as caches and lists of losses.

Each stage runs its part of the call on the objects as they were before it, and follows what blocks of earlier stages
have set in them, as in a step that calls the network once (``own_call.py``, ``stand_in.py``). So the last stage, whose
run is the only whole one, knows all changes. After the call it tells them, and all ranks make the same: numbers and
small tensors by value; of other tensors the shape, and the name that they have on all stages (``messages.Key``). A rank
that has a tensor of this name, as a stage has what its own blocks leave in a cache, uses it. On others it is an unknown
value (``taint.py``), which takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.fetching import Ledger
from lightning_shard.pipeline.dataflow.messages import Key, Slot
from lightning_shard.pipeline.dataflow.objects import Noted, Path, objects, rebuilt
from lightning_shard.pipeline.dataflow.taint import Unknown, fill
from lightning_shard.state.walk import below, entries, put_entries
from lightning_shard.versions import version

_SHORT, _SHORT_FLOATS = 1024, 64
"""The most elements of an integer tensor that is told by value (lengths and positions, of which masks are computed);
the same of other tensors, such as losses."""
_WITHOUT_CACHE = "Generate without a cache (use_cache=False), or use pipeline_parallel_size=1."

Place = Callable[[Any], Tensor]
"""Gives the local tensor for a told tensor, or an unknown one for a slot."""


@dataclass(frozen=True)
class _Named(tree.Leaf):
    """Stands for a tensor that isn't told by value, and has this name."""

    slot: Slot
    key: Key


@dataclass(frozen=True)
class _At(tree.Leaf):
    """Stands for an object that the network is given at this path."""

    path: Path


@dataclass(frozen=True)
class _Changed:
    """What a call has changed in an object.

    Attributes:
        keys: All that it holds now, in order.
        entries: The new entries, as they are told.
        written: The values of short tensors that were there before.
    """

    keys: list[Any]
    entries: dict[Any, Any]
    written: dict[Any, Tensor]


class _Given:
    """An object in a call.

    Attributes:
        before: It before the call.
        values: Copies of short tensors that it held then.
        begun: It when the current stage's run began.
    """

    def __init__(self, value: Any) -> None:
        self.before = self.begun = Noted(value, _version)
        self.values = {key: each.detach().clone() for key, each in self.before.held.items() if _is_told(each)}

    @property
    def value(self) -> Any:
        return self.before.value

    def put_back(self, place: Place) -> None:
        """Restore it for another stage. What one has written to stays its own: large tensors are unknown to others."""
        held = dict(self.begun.held)
        for key in self.begun.written():
            held[key] = self.values[key].clone() if key in self.values else place(Slot.of(held[key]))
        put_entries(self.value, held)
        self.begun = Noted(self.value, _version)


class GivenObjects:
    """Of one rank, in one step.

    Args:
        place: Makes what this rank has of a tensor, or a slot, that another rank's object holds.

    Attributes:
        told: What the call has changed, on the last stage's rank; on others nothing.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._given: list[tuple[Tensor, Any]] = []
        self._of_network: dict[Path, _Given] = {}
        self._noted: dict[Path, _Given] = {}  # also of the blocks of the current, or last, stage
        self._known: dict[Key, Tensor] = {}
        self.told: dict[Path, _Changed] = {}

    def call_begins(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._note((), args, kwargs, self._of_network)
        held = (each for noted in self._of_network.values() for each in noted.before.held.values())
        tensors = (*tree.tensors((args, kwargs)), *(each for each in held if isinstance(each, Tensor)))
        self._given = [(each, _version(each)) for each in tensors]

    def call_ends(self) -> None:
        for each in (self._given, self._of_network, self._noted, self._known, self.told):
            each.clear()

    def stage_begins(self) -> None:
        """A stage begins its part of the call, with the network's arguments as they were at the call."""
        for noted in self._noted.values():
            noted.put_back(self._place)
        self._noted = dict(self._of_network)

    def fetch(self, ledger: Ledger) -> None:
        """On the last stage, at the end of the call: get those of the values to be told that it lacks."""
        written = [(noted.begun, key) for noted in self._noted.values() for key in noted.begun.written()]
        ledger.fetch_if_possible([each for each in self._tensors() if _is_short(each)])
        for begun, key in written:
            begun.versions[key] = None  # values that were fetched have the version of those that they replace

    def stage_ends(self, ledger: Ledger, *, is_last: bool) -> None:
        """A stage has run its part of the call.

        Args:
            ledger: What it has computed, by name.
        """
        self._known |= ledger.known([*self._tensors()])
        if is_last:
            self.told = dict(self._changes())

    def block_begins(self, block: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A block is called: note objects in its arguments that weren't noted yet."""
        self._note(("block", block), args, kwargs, self._noted)

    def ids(self) -> set[int]:
        """The ids of the objects noted so far in this call, and of the tensors in them."""
        tensors = (each for n in self._noted.values() for each in n.before.held.values() if isinstance(each, Tensor))
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
                f"The network returns an object ({'.'.join(map(str, path))}) that a pipeline stage didn't get to."
                f" {_WITHOUT_CACHE}",
                breaks=3,
            )
        return self._noted[path].value

    def __contains__(self, path: Path) -> bool:
        return path in self._noted

    def take(self, told: Mapping[Path, _Changed]) -> None:
        """Change the objects as on the last stage, without those that only later stages get to."""
        self._known |= self._as_given()
        for path in told.keys() & self._noted.keys():
            noted, changed = self._noted[path], told[path]
            held = noted.before.held | {key: self._heard(each) for key, each in changed.entries.items()}
            for key, values in changed.written.items():
                if isinstance(held[key], Unknown):
                    held[key] = self._place(values)
                else:
                    fill(held[key], values.to(held[key].device))
            put_entries(noted.value, {key: held[key] for key in changed.keys})

    def _as_given(self) -> dict[Key, Tensor]:
        """By name, the tensors that the network was given and no stage of this rank has written to."""
        numbered = enumerate(self._given)
        return {("given", number): each for number, (each, before) in numbered if _version(each) == before}

    def _tensors(self) -> Iterator[Tensor]:
        """Those that the stage's run has set or written to."""
        for noted in self._noted.values():
            for value in noted.begun.changed().values():
                yield from (each for _, each in below("", value) if isinstance(each, Tensor))

    def _changes(self) -> Iterator[tuple[Path, _Changed]]:
        paths = {id(noted.value): path for path, noted in self._of_network.items()}
        names = {id(tensor): key for key, tensor in (self._known | self._as_given()).items()}
        for path, noted in self._noted.items():
            changed, keys = noted.begun.changed(), [*entries(noted.value)]
            written = [key for key, each in changed.items() if noted.begun.held.get(key) is each and _is_told(each)]
            values = {key: changed.pop(key).detach().cpu().clone() for key in written}
            if changed or values or keys != [*noted.before.held]:
                yield path, _Changed(keys, {k: self._tell(paths, names, v) for k, v in changed.items()}, values)

    def _tell(self, paths: Mapping[int, Path], names: Mapping[int, Key], value: Any) -> Any:
        if id(value) in paths:
            return _At(paths[id(value)])
        if not isinstance(value, Tensor):
            return rebuilt(value, partial(self._tell, paths, names), _WITHOUT_CACHE)
        if _is_told(value):
            return value.detach().cpu().clone()
        key = value.key if isinstance(value, Unknown) else names.get(id(value))
        if key is None:  # what a block of the last stage has computed; or an unknown value without a name
            key = ("last", len(self._known))
            self._known[key] = value
        return _Named(Slot.of(value), key)

    def _heard(self, value: Any) -> Any:
        if isinstance(value, _At):
            return self.at(value.path)
        if isinstance(value, _Named):
            known = self._known.get(value.key)
            return self._place(value.slot) if known is None or isinstance(known, Unknown) else known
        return self._place(value) if isinstance(value, Tensor) else rebuilt(value, self._heard, _WITHOUT_CACHE)

    def _note(self, prefix: Path, args: Sequence[Any], kwargs: Mapping[str, Any], into: dict[Path, _Given]) -> None:
        """Note objects among arguments that weren't noted before."""
        seen = {id(noted.value) for noted in into.values()}
        for key, argument in [*enumerate(args), *kwargs.items()]:
            for path, value in objects(argument, (*prefix, key), seen):
                into[path] = _Given(value)


def _version(tensor: Tensor) -> Any:
    return tensor.key if isinstance(tensor, Unknown) else version(tensor)


def _is_short(tensor: Tensor) -> bool:
    return tensor.numel() <= (_SHORT_FLOATS if tensor.is_floating_point() or tensor.is_complex() else _SHORT)


def _is_told(value: Any) -> bool:
    """Whether it is a tensor that is told by value."""
    return isinstance(value, Tensor) and _is_short(value) and not isinstance(value, Unknown)
