"""Sends state that a step changes on modules after calling the network from the last stage to the earlier ones.

Only the last stage runs the code after the network, and the parts that it holds, such as a head. At the end of a batch
it broadcasts what has changed since the network's first block was called: new values, and changes inside of lists,
dicts and objects (``contents.py``). The other stages apply these, so that the next batch, hooks and callbacks find on
every stage what one process would. Within a batch an earlier stage can't have them: its next microbatch begins before
the last stage is done with this one. So a step is refused if a stage has read such an attribute in a batch of several
microbatches, or has read one that can't be sent. Of tensors that are too large the other stages know only the shape.
What a part of the last stage reads while it returns unknown tensors only, such as a BatchNorm's statistics, decides
nothing here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NoReturn

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule
from torchmetrics import Metric

from lightning_shard import tree
from lightning_shard.dense import have_equal_values
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.kept import OF_RECURRENT_LAYERS
from lightning_shard.pipeline.dataflow.taint import REMEDY, Hollow, Origin, Unknown, mark
from lightning_shard.plugin.steps.randomness import OwnGenerator
from lightning_shard.plugin.steps.state.attribute_changes import (
    attributes_and_buffers,
    change_mark,
    differ,
    identities,
    is_simple,
    simple_fields,
)
from lightning_shard.plugin.steps.state.attribute_reads import Watched
from lightning_shard.plugin.steps.state.contents import (
    LARGEST_SENT,
    Change,
    Outline,
    Unsendable,
    Unsent,
    change_since,
    has_contents,
    is_plain_object,
    received,
    sent,
)
from lightning_shard.plugin.steps.state.python_state import (
    CONTAINERS,
    STAND_INS,
    attributes,
    hold_same,
)
from lightning_shard.scripted import after_calls, before_calls
from lightning_shard.versions import content

Name = tuple[str, str]
"""A module's path and an attribute's name."""

_NOT_OWN = (
    frozenset(vars(pl.LightningModule())) | STAND_INS | {*OF_RECURRENT_LAYERS, "_hparams_initial", "_hparams_name"}
)
"""Attributes that every LightningModule has, those that shadow methods while a step runs, and lists of parameters."""


class _Elsewhere:
    """Stands for a value that isn't sent."""


class _Deleted:
    """Stands for the value of an attribute that was deleted."""


@dataclass(frozen=True)
class _Fields:
    """Simple attributes of an object that isn't sent itself: set by the first microbatch and not changed by others.

    Example: a transformers model notes its problem type in its config.
    """

    values: dict[str, Any]


@dataclass(frozen=True)
class _Look:
    """A snapshot of what modules keep.

    Attributes:
        held: Each module's attributes and buffers.
        marks: Versions of tensors, digests of arrays and lengths of containers, which show changes in place.
        contents: Digests of tensors, which show changes past their version, as through ``.data``.
        inside: The contents of followed attributes.
        fields: The attributes of followed objects.
    """

    held: dict[str, dict[str, Any]]
    marks: list[int]
    contents: dict[Name, int]
    inside: dict[Name, list[Any]]
    fields: dict[Name, dict[str, Any]]


class KeptState:
    """Tracks the state of modules around the blocks over the microbatches of a batch, on one stage.

    In a microbatch that searches for the values that cross between stages (``pipeline/dataflow/search.py``), all of it
    is followed. Afterwards only replaced attributes, versions of tensors, digests of arrays and lengths of containers
    are, and the contents of what was seen to change inside. That takes microseconds, but for large arrays.

    Args:
        root: Cut and sharded.
        blocks: Names of all blocks, in running order.
        parts: Names of modules with parameters that run around the blocks and keep their state where they are held.
        is_last: Whether this is the last stage.
        elsewhere: The modules whose parameters other stages hold.
        hollow: Names of parameters for which other tensors are substituted while a stage runs: received ones, if any.
        last_parts: Names of the last stage's parts, which earlier stages may run, too.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[str],
        parts: Collection[str],
        *,
        is_last: bool,
        elsewhere: Collection[nn.Module],
        hollow: Collection[str] = (),
        last_parts: Collection[str] = (),
    ) -> None:
        within = tuple(f"{name}." for name in (*blocks, *parts))
        self._modules = {
            path: module
            for path, module in root.named_modules()
            if not f"{path}.".startswith(within) and not isinstance(module, (Metric, ScriptModule))
        }
        self._elsewhere = {path: module for path, module in root.named_modules() if module in elsewhere}
        self._hollow = {tuple(name.rpartition(".")[::2]) for name in hollow}
        self._is_last = is_last
        self._in_step = self._searching = False
        self._before: _Look | None = None  # at the start of the step; on the last stage, of the first block's call
        self._begun: dict[Name, Outline] | None = None  # at the start of the batch, of containers and objects
        self._warned_of: set[Name] = set()
        self._numbers: dict[Name, Any] | None = None
        self._marked: list[tuple[Name, Any]] = []
        self._by_value: set[Name] = set()
        self._followed: set[Name] = set()
        self._changed: set[Name] = set()
        self._set_once: dict[Name, set[str]] = {}
        self._read: set[Name] = set()
        self._read_before: list[set[Name]] = []  # each call of a part that runs now
        self._written: set[Name] = set()  # in this microbatch, which then reads its own value
        self._stale: set[Name] = set()
        self._names: dict[str, set[str]] = {}
        """Of attributes that are watched in steps, by module: until a first batch shows which change late, all."""
        self._watched: list[Watched] | None = None if not is_last else []
        if is_last:
            for block in map(root.get_submodule, dict.fromkeys(blocks)):  # a step may leave out the first or the last
                before_calls(block, self._network_begins, prepend=True)
                after_calls(block, self._network_ends)
        for part in () if is_last else filter(None, map(self._modules.get, last_parts)):
            before_calls(part, self._part_begins)
            after_calls(part, self._part_ends)

    @contextmanager
    def step(self, *, searching: bool) -> Iterator[None]:
        """Track what the user's step, which runs inside on one microbatch as far as this stage runs it, changes."""
        self._in_step, self._searching, self._numbers = True, searching, None
        self._written.clear()
        self._read_before.clear()
        if self._watched is None:
            self._watch({path: {name for name, _ in _own(module)} for path, module in self._modules.items()})
        if self._begun is None:
            self._begun = self._outlines()
        self._before = None if self._is_last else self._look()
        watched = self._watched or []
        try:
            for each in watched:
                each.begin()
            yield
        finally:
            for each in watched:
                each.end()
            self._in_step = False
            if self._before is not None:
                self._changed.update(self._since(self._before))
            self._before = None

    def remember(self) -> Callable[[], None]:
        """Snapshot what is known of the batch; returns a function that restores it."""
        sets = (self._followed, self._changed, self._read, self._stale)
        before, set_once = [set(each) for each in sets], {key: set(names) for key, names in self._set_once.items()}

        def forget() -> None:
            for each, noted in zip(sets, before):
                each.clear()
                each.update(noted)
            self._set_once = {key: set(names) for key, names in set_once.items()}

        return forget

    def changes(self) -> dict[Name, Any]:
        """On the last stage, at the end of a batch: what has changed, to be sent to the others."""
        values = {}
        for path, name in sorted(self._changed):
            value = attributes_and_buffers(self._modules[path]).get(name, _Deleted())
            fields = {key: attributes(value)[key] for key in self._set_once.get((path, name), ())}
            is_whole = fields or isinstance(value, _Deleted)
            values[path, name] = (_Fields(fields) if fields else value) if is_whole else self._sent((path, name), value)
        self._changed.clear()
        self._set_once.clear()
        self._begun = None
        return values

    def _sent(self, key: Name, value: Any) -> Any:
        """The change of a container or an object that the batch has found there, else the value itself."""
        begun = (self._begun or {}).get(key)
        try:
            return sent(value) if begun is None or begun.value is not value else change_since(begun, value)
        except Unsendable:
            return _Elsewhere()

    def take(self, changes: Mapping[Name, Any], microbatches: int, device: torch.device) -> None:
        """On another stage, at the end of a batch: take over the last stage's values.

        Raises:
            StepError: This stage has read one before, with another value than a single process would have.
        """
        changes = {
            key: value if self._can_set(key, value) else _Elsewhere()
            for key, value in changes.items()
            if key[0] in self._modules
        }
        own, read, begun = set(self._changed), set(self._read), self._begun or {}
        self._changed.clear()
        self._read.clear()
        self._begun = None
        stale = [key for key, value in changes.items() if self._is_stale(key, value, key in own)]
        for key in stale:
            value = changes[key]
            is_elsewhere = isinstance(value, _Elsewhere)
            if isinstance(value, _Fields):
                vars(self._held(key)).update(value.values)
                continue
            adds_to_it = isinstance(value, Change) and key in own  # as code before the network does, on every stage
            if key in read and not adds_to_it and (microbatches > 1 or is_elsewhere):
                raise _too_late(key, microbatches, is_elsewhere)
            place = partial(_in_place_of_large, key)
            if isinstance(value, Change):
                value.apply(self._held(key), begun.get(key) if key in own else None, partial(received, device, place))
            elif is_elsewhere:
                self._warn(key)
            elif isinstance(value, _Deleted):
                delattr(self._modules[key[0]], key[1])
            else:
                _set(self._modules[key[0]], key[1], received(device, place, value))
        self._stale.update(key for key in stale if not isinstance(changes[key], _Fields))
        self._followed.update(key for key, value in changes.items() if isinstance(value, (Change, _Elsewhere)))
        self._watch({path: {name for place, name in self._stale if place == path} for path, _ in self._stale})

    def _watch(self, names: dict[str, set[str]]) -> None:
        """In steps from now on; by module, the attributes."""
        if self._watched is None or names != self._names:
            self._names = names
            watched = ((path, of_module) for path, of_module in names.items() if of_module)
            self._watched = [Watched(self._modules[path], each, *self._observers(path)) for path, each in watched]

    def _can_set(self, key: Name, value: Any) -> bool:
        if isinstance(value, Change):
            return value.fits(self._held(key))
        return not isinstance(value, _Fields) or is_plain_object(self._held(key))

    def _warn(self, key: Name) -> None:
        if key not in self._warned_of:
            self._warned_of.add(key)
            warnings.warn(
                f"A step changes {_path(key)} after calling the network, to what can't be sent to other pipeline"
                " stages: hooks and callbacks there find it as it was. Numbers, texts, tensors, and lists, dicts and"
                " plain objects of these are sent.",
                stacklevel=2,
            )

    def _is_stale(self, key: Name, value: Any, changed_here: bool) -> bool:
        held = attributes_and_buffers(self._modules[key[0]])
        if isinstance(value, _Elsewhere):
            return not changed_here
        if isinstance(value, _Deleted):
            return key[1] in held
        if isinstance(value, _Fields):
            own = attributes(held[key[1]])
            return any(name not in own or not _equal(own[name], each) for name, each in value.values.items())
        return key[1] not in held or not _equal(held[key[1]], value)

    def _outlines(self) -> dict[Name, Outline]:
        """Of what the batch may change inside: all containers and objects, or deeply what was seen to."""
        if self._searching:
            own = ((path, name) for path, module in self._modules.items() for name, _ in _own(module))
            return {key: Outline.of(held) for key in own if has_contents(held := self._held(key))}
        marked = {key: Outline.of(value, 1) for key, value in self._marked if has_contents(value)}
        return marked | {key: Outline.of(held) for key in self._followed if has_contents(held := self._held(key))}

    def _network_begins(self, *_: Any) -> None:
        if self._in_step and self._before is None:
            self._before = self._look()

    def _network_ends(self, *_: Any) -> None:
        if self._in_step and self._searching:
            self._numbers = self._numbers_elsewhere()

    def _part_begins(self, *_: Any) -> None:
        if self._in_step:
            self._read_before.append(set(self._read))

    def _part_ends(self, _part: nn.Module, _args: Any, output: Any) -> None:
        if not self._in_step:
            return
        before, returned = self._read_before.pop(), tree.tensors(output)
        if returned and all(isinstance(tensor, Unknown) for tensor in returned):
            self._read.intersection_update(before)

    def _numbers_elsewhere(self) -> dict[Name, Any]:
        return {
            (path, name): value
            for path, module in self._elsewhere.items()
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str)
        }

    def check_numbers(self) -> None:
        """At a step's end, where modules of other stages still look as they do to this one.

        Raises:
            StepError: After all blocks have run, it has set a number on a block of another stage. Checked only while
                searching, since there may be many modules.
        """
        noted, self._numbers = self._numbers or {}, None
        now = self._numbers_elsewhere() if noted else {}
        for (path, name), before in noted.items():
            if now.get((path, name), before) != before:
                raise StepError(
                    f"A step changes {name} of {path} after calling the network, and the pipeline stage that holds"
                    f" {path} doesn't see it: change it before the network is called, or in on_train_batch_end, or use"
                    " pipeline_parallel_size=1."
                )

    def _look(self) -> _Look:
        followed = self._followed
        if self._searching:
            own = {
                (path, name): value
                for path, module in self._modules.items()
                for name, value in _own(module)
                if (path, name) not in self._hollow
            }
            self._marked = [
                (key, value) for key, value in own.items() if isinstance(value, (Tensor, np.ndarray, *CONTAINERS))
            ]
            followed = set(own)
        modules = (
            self._modules if self._is_last or self._searching else {path: self._modules[path] for path, _ in followed}
        )
        return _Look(
            {path: attributes_and_buffers(module) for path, module in modules.items()},
            [change_mark(value) for _, value in self._marked],
            {key: content(value) for key, value in self._marked if self._searching or key in self._by_value},
            {key: [*identities(self._held(key), 2)] for key in followed},
            {key: dict(attributes(self._held(key))) for key in followed if is_plain_object(self._held(key))},
        )

    def _since(self, before: _Look) -> set[Name]:
        """The names of what has changed."""
        exchanged = {
            (path, name)
            for path, held in before.held.items()
            if not hold_same(held, now := attributes_and_buffers(self._modules[path]))
            for name, value in (held | now).items()
            if (held.get(name, held) is not value or name not in now) and _is_own(name, value)
        }
        changed = {key for (key, value), mark in zip(self._marked, before.marks) if change_mark(value) != mark}
        others = {key: value for key, value in self._marked if key in before.contents and key not in changed}
        past_versions = {key for key, value in others.items() if content(value) != before.contents[key]}
        self._by_value |= past_versions
        changed |= past_versions
        changed.update(key for key, held in before.inside.items() if differ(held, [*identities(self._held(key), 2)]))
        self._followed.update(changed - exchanged)
        for key in changed - exchanged:
            fields = simple_fields(before.fields.get(key), before.inside.get(key), self._held(key))
            if fields and self._searching:
                self._set_once.setdefault(key, set()).update(fields)
            else:
                self._set_once.pop(key, None)
        return exchanged | changed

    def _held(self, key: Name) -> Any:
        return attributes_and_buffers(self._modules[key[0]]).get(key[1])

    def _observers(self, path: str) -> tuple[Callable[[str], None], Callable[[str], None]]:
        """What is called when code reads and sets an attribute of a module."""

        def read(name: str) -> None:
            if self._in_step and (path, name) not in self._written:
                self._read.add((path, name))

        def written(name: str) -> None:
            if self._in_step:
                self._written.add((path, name))

        return read, written


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own attributes and buffers, by name."""
    return (named for named in attributes_and_buffers(module).items() if _is_own(*named))


def _is_own(name: str, value: Any) -> bool:
    return name not in _NOT_OWN and not isinstance(value, (Hollow, OwnGenerator))


def _equal(held: Any, value: Any) -> bool:
    """Whether a stage has a value that was sent; of nestings this isn't asked."""
    if isinstance(held, (Unknown, DTensor)):
        return False
    if isinstance(value, Tensor):
        if not isinstance(held, Tensor) or (held.shape, held.dtype) != (value.shape, value.dtype):
            return False
        return have_equal_values(held.detach(), value.to(held.device))
    if isinstance(value, tuple):
        return isinstance(held, tuple) and len(held) == len(value) and all(map(_equal, held, value))
    return is_simple(value) and type(held) is type(value) and held == value


def _set(module: nn.Module, name: str, value: Any) -> None:
    held: Any = attributes_and_buffers(module).get(name)
    is_plain = type(value) is Tensor and type(held) is Tensor
    if is_plain and held.shape == value.shape and held.dtype == value.dtype and not held.requires_grad:
        held.copy_(value)
    elif name in module._buffers:
        module._buffers[name] = value
    else:
        vars(module)[name] = value


def _in_place_of_large(key: Name, sent: Unsent, device: torch.device) -> Tensor:
    def missing(_: Any, sentence: str) -> NoReturn:
        raise StepError(
            f"{sentence.removesuffix(REMEDY)}It has {prod(sent.shape)} elements, and only tensors of up to"
            f" {LARGEST_SENT} are sent to other stages. Keep less (a metric, or predictions), or use"
            " pipeline_parallel_size=1."
        )

    empty = torch.full((), torch.nan, device=device).to(sent.dtype).expand(sent.shape)
    return mark(empty, Origin(f"what {_path(key)} holds, which the last stage has kept,", missing))


def _too_late(key: Name, microbatches: int, elsewhere: bool) -> StepError:
    name = _path(key)
    reason, ways = (
        ("it can't be sent there (numbers, texts, tensors, and lists, dicts and plain objects of these could be)", "")
        if elsewhere
        else (f"each of the {microbatches} microbatches would begin with an old value", " microbatches=1 or")
    )
    return StepError(
        f"A step changes {name} after calling the network, and reads it before. Only the last pipeline stage gets to"
        f" the change, and {reason}: change it before the network is called, or in on_train_batch_end, or use{ways}"
        " pipeline_parallel_size=1."
    )


def _path(key: Name) -> str:
    return ".".join(part for part in ("self", *key) if part)
