"""Sends state that a step changes on modules after calling the network from the last stage to the earlier ones.

Only the last stage runs the code after the network, and the parts that it holds, such as a head. At the end of a batch
it broadcasts what has changed since the network's first block was called: new values, and changes inside of lists,
dicts and objects (``state/patch.py``). The other stages apply these: the next batch, hooks and callbacks find on every
stage what one process would. Within a batch an earlier stage can't have them: its next microbatch begins before
the last stage is done with this one. A step whose result depends on one is refused by the rehearsal of a first batch,
in which they are carried to the next microbatch. Of tensors that are too large the other stages know only the shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NoReturn

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard.arguments import few
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import REMEDY, Hollow, Origin, mark
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.steps.state.per_stage import StatesApart
from lightning_shard.state.patch import (
    LARGEST_SENT,
    Change,
    Outline,
    Unsendable,
    Unsent,
    change_since,
    has_contents,
    received,
    sent,
)
from lightning_shard.state.walk import (
    CONTAINERS,
    OF_RECURRENT_LAYERS,
    STAND_INS,
    OwnGenerator,
    hold_same,
)

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
class _Look:
    """What modules keep at one time.

    Attributes:
        held: Each module's attributes and buffers.
        outlines: What may change in place; of followed attributes with what is inside.
    """

    held: dict[str, dict[str, Any]]
    outlines: dict[Name, Outline]


class KeptState:
    """Tracks the state of modules around the blocks over the microbatches of a batch, on one stage.

    In a microbatch that searches for the values that cross between stages (``pipeline/dataflow/search.py``), all of it
    is followed. Afterwards only replaced attributes, versions of tensors, digests of arrays and lengths of containers
    are, and the contents of what was seen to change inside. That takes microseconds, but for large arrays.

    Args:
        root: Cut and sharded.
        stage: The stage.
        parts: Names of modules with parameters that run around the blocks and keep their state where they are held.
        hollow: Names of parameters for which received ones are substituted while a stage runs.
    """

    def __init__(self, root: nn.Module, stage: Stage, parts: Sequence[str], hollow: Collection[str]) -> None:
        within = tuple(f"{name}." for name in (*stage.blocks, *parts))
        self._modules = {
            path: module
            for path, module in root.named_modules()
            if not f"{path}.".startswith(within) and not isinstance(module, Metric)
        }
        self._elsewhere = {path: module for path, module in root.named_modules() if module in stage.elsewhere}
        self._hollow = {tuple(name.rpartition(".")[::2]) for name in hollow}
        self._in_step = self._searching = False
        self._before: _Look | None = None  # on the last stage, when the first block was called
        self._begun: dict[Name, Outline] | None = None  # at the start of the batch, of containers and objects
        self._warned_of: set[Name] = set()
        self._numbers: dict[Name, Any] | None = None
        self._marked: dict[Name, Any] = {}
        self._by_value: set[Name] = set()
        self._followed: set[Name] = set()
        self._changed: set[Name] = set()

    @contextmanager
    def step(self, *, searching: bool) -> Iterator[None]:
        """Track what the user's step, which runs inside on one microbatch as far as this stage runs it, changes.

        Inside of what the stage runs in: received parameters and other stages' modules are as the step sees them.

        Raises:
            StepError: It has set a number on a block of another stage.
        """
        self._in_step, self._searching, self._before, self._numbers = True, searching, None, None
        if self._begun is None:
            with torch._C.DisableTorchFunction():  # looks are none of the step's operations
                self._begun = self._outlines()
        try:
            yield
            self._check_numbers()
        finally:
            self._in_step = False
            if self._before is not None:
                with torch._C.DisableTorchFunction():
                    self._changed.update(self._since(self._before))

    def forget(self) -> None:
        """Forget what the batch has changed so far: all of it is known, or was put back."""
        self._changed, self._begun = set(), None

    def changes(self) -> dict[Name, Any]:
        """On the last stage, at the end of a batch: what has changed, to be sent to the others."""
        values = {}
        for path, name in sorted(self._changed):
            value = _attributes_and_buffers(self._modules[path]).get(name, _Deleted())
            values[path, name] = value if isinstance(value, _Deleted) else self._sent((path, name), value)
        self.forget()
        return values

    def _sent(self, key: Name, value: Any) -> Any:
        """The change of a container or an object that the batch has found there, else the value itself."""
        begun = (self._begun or {}).get(key)
        try:
            return sent(value) if begun is None or begun.value is not value else change_since(begun, value)
        except Unsendable:
            return _Elsewhere()

    def take(self, changes: Mapping[Name, Any], device: torch.device) -> None:
        """On another stage, at the end of a batch: take over the last stage's values."""
        begun = self._begun or {}
        self.forget()
        for key, value in changes.items():
            if key[0] not in self._modules:
                continue
            held, outline = self._held(key), begun.get(key)
            receive = partial(received, partial(_placed, key, device))
            if isinstance(value, _Elsewhere) or (isinstance(value, Change) and not value.fits(held)):
                self._warn(key)
            elif isinstance(value, Change):
                value.apply(held, outline if outline is not None and outline.value is held else None, receive)
            elif isinstance(value, _Deleted):
                _delete(self._modules[key[0]], key[1])
            else:
                _set(self._modules[key[0]], key[1], receive(value))
            if isinstance(value, (Change, _Elsewhere)):
                self._followed.add(key)

    def _warn(self, key: Name) -> None:
        if key not in self._warned_of:
            self._warned_of.add(key)
            warnings.warn(
                f"A step changes {path_of(key)} after calling the network, to what can't be sent to other pipeline"
                " stages: their steps, hooks and callbacks find it as it was. Numbers, texts, tensors, and lists,"
                " dicts and plain objects of these are sent (sentence 6 of the contract).",
                stacklevel=2,
            )

    def _outlines(self) -> dict[Name, Outline]:
        """Of what the batch may change inside: all containers and objects, deeply what was seen to or in a search."""
        if self._searching:
            return {key: Outline.of(held) for key in self._all_marked() if has_contents(held := self._held(key))}
        marked = {key: Outline.of(value, 1) for key, value in self._marked.items() if has_contents(value)}
        return marked | {key: Outline.of(held) for key in self._followed if has_contents(held := self._held(key))}

    def network_begins(self) -> None:
        """On the last stage: the first of the step's blocks is called."""
        if self._in_step and self._before is None:
            self._before = self._look()

    def block_ends(self) -> None:
        """On the last stage, in a search: a block returns, maybe the last one."""
        if self._in_step:
            self._numbers = self._numbers_elsewhere()

    def _numbers_elsewhere(self) -> dict[Name, Any]:
        return {
            (path, name): value
            for path, module in self._elsewhere.items()
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str)
        }

    def _check_numbers(self) -> None:
        """
        Raises:
            StepError: After all blocks have run, a search has set a number on a block of another stage. Not checked in
                other runs, since there may be many modules.
        """
        noted, self._numbers = self._numbers or {}, None
        now = self._numbers_elsewhere() if noted else {}
        for (path, name), before in noted.items():
            if now.get((path, name), before) != before:
                raise StepError(
                    f"A step changes {name} of {path} after calling the network, and the pipeline stage that holds"
                    f" {path} doesn't see it: change it before the network is called, or in on_train_batch_end, or use"
                    " pipeline_parallel_size=1.",
                    breaks=6,
                )

    def _all_marked(self) -> set[Name]:
        """In a search, all attributes; what may change in place is looked at in later runs too."""
        own = {(path, name): value for path, module in self._modules.items() for name, value in _own(module)}
        own = {key: value for key, value in own.items() if key not in self._hollow}
        marked = (Tensor, np.ndarray, *CONTAINERS)
        self._marked = {key: value for key, value in own.items() if isinstance(value, marked)}
        return set(own)

    def _look(self) -> _Look:
        followed = self._all_marked() if self._searching else self._followed
        held = {path: _attributes_and_buffers(module) for path, module in self._modules.items()}
        outlines = {key: self._outline(key, value, 0) for key, value in self._marked.items() if key not in followed}
        outlines |= {key: self._outline(key, held[key[0]].get(key[1])) for key in followed}
        return _Look(held, outlines)

    def _outline(self, key: Name, value: Any, *depth: int) -> Outline:
        return Outline.of(value, *depth, by_value=self._searching or key in self._by_value)

    def _since(self, before: _Look) -> set[Name]:
        """The names of what has changed."""
        exchanged = {
            (path, name)
            for path, held in before.held.items()
            if not hold_same(held, now := _attributes_and_buffers(self._modules[path]))
            for name, value in (held | now).items()
            if (held.get(name, held) is not value or name not in now) and _is_own(name, value)
        }
        changed = set()
        for key, outline in before.outlines.items():
            is_followed = key in self._followed or self._searching
            later = self._outline(key, self._held(key)) if is_followed else self._outline(key, outline.value, 0)
            if outline.is_as(later):
                continue
            changed.add(key)
            if key in self._marked and outline.mark == later.mark and outline.content != later.content:
                self._by_value.add(key)
        self._followed.update(changed - exchanged)
        return exchanged | changed

    def _held(self, key: Name) -> Any:
        return _attributes_and_buffers(self._modules[key[0]]).get(key[1])


class KeptStates:
    """Tracks it for all stages of one rank: the last stage by itself, those before it together.

    Args:
        root: Cut and sharded.
        stages: This rank's.
        apart: The stages' versions of the module's state.
    """

    def __init__(self, root: nn.Module, stages: Stages, apart: StatesApart) -> None:
        hollow = {name for stage in stages for name in stage.hollow}

        def kept(stage: Stage) -> KeptState:
            # a rank that holds the last stage has the state of its parts
            of_all = stage.last_parts if stage.is_last or not stages.is_last else ()
            parts = [part for part in stage.parts if part not in of_all]
            return KeptState(root, stage, parts, hollow)

        self._stages = stages
        self._apart = apart
        self._early = [stage for stage in stages if not stage.is_last]
        self._of_early = kept(self._early[-1]) if self._early else None
        self._of_last = kept(stages[-1]) if stages.is_last else None
        if self._of_last is not None:
            stages[-1].network_begins, stages[-1].block_ends = self._of_last.network_begins, self._of_last.block_ends

    def step(self, stage: Stage, *, searching: bool) -> AbstractContextManager[None]:
        kept = self._of_last if stage.is_last else self._of_early
        assert kept is not None
        return kept.step(searching=searching)

    def forget(self) -> None:
        """Forget what the batch has changed so far, since it was put back."""
        for kept in (self._of_early, self._of_last):
            if kept is not None:
                kept.forget()

    def changes(self) -> dict[Name, Any]:
        """On the last stage's rank, at the end of a batch: what has changed, to be sent to the others."""
        assert self._of_last is not None
        self._apart.show(self._stages[-1])
        return self._of_last.changes()

    def take(self, changes: Mapping[Name, Any], device: torch.device, *, begun: int = 0) -> None:
        """On every rank, at the end of a batch: take over the last stage's values.

        Args:
            begun: How many batches this rank has begun since.
        """
        if changes and begun:
            warnings.warn(
                f"An evaluation step changes {few([*map(path_of, changes)])} after calling the network, and didn't in"
                f" its first batch: earlier pipeline stages have begun {begun} more with what was there before. Set it"
                " in the first batch too (sentence 6 of the contract).",
                stacklevel=2,
            )
        if self._of_early is not None:
            if self._of_last is None:
                self._apart.settle()
            else:
                self._apart.show(self._early[-1])
            self._of_early.take(changes, device)
            if changes:
                self._apart.changed()
        if self._of_last is not None:
            self._apart.settle()

    def carry(self, broadcast: Callable[[Any], Any], device: torch.device) -> bool:
        """Take over the last stage's values for a microbatch that begins when the one before has ended on all stages.

        A collective call over the pipeline.

        Args:
            broadcast: Gives the last stage's value on all stages.

        Returns:
            Whether there were any.
        """
        changes = broadcast(self.changes() if self._of_last is not None else None)
        self.take(changes, device)
        self._apart.begin()
        return bool(changes)


def _attributes_and_buffers(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._buffers}


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own attributes and buffers, by name."""
    return (named for named in _attributes_and_buffers(module).items() if _is_own(*named))


def _is_own(name: str, value: Any) -> bool:
    return name not in _NOT_OWN and not isinstance(value, (Hollow, OwnGenerator))


def _delete(module: nn.Module, name: str) -> None:
    if name in _attributes_and_buffers(module):
        delattr(module, name)


def _set(module: nn.Module, name: str, value: Any) -> None:
    held: Any = _attributes_and_buffers(module).get(name)
    is_plain = type(value) is Tensor and type(held) is Tensor
    if is_plain and held.shape == value.shape and held.dtype == value.dtype and not held.requires_grad:
        held.copy_(value)
    elif name in module._buffers:
        module._buffers[name] = value
    else:
        vars(module)[name] = value


def _placed(key: Name, device: torch.device, sent: Tensor | Unsent) -> Tensor:
    """A tensor that was sent; in place of a large one, what refuses to be computed with."""
    if isinstance(sent, Tensor):
        return sent.to(device)

    def missing(_: Any, sentence: str) -> NoReturn:
        raise StepError(
            f"{sentence.removesuffix(REMEDY)}It has {prod(sent.shape)} elements, and only tensors of up to"
            f" {LARGEST_SENT} are sent to other stages. Keep less (a metric, or predictions), or use"
            " pipeline_parallel_size=1.",
            breaks=6,
        )

    empty = torch.full((), torch.nan, device=device).to(sent.dtype).expand(sent.shape)
    return mark(empty, Origin(f"what {path_of(key)} holds, which the last stage has kept,", missing))


def path_of(key: Name) -> str:
    return ".".join(part for part in ("self", *key) if part)
