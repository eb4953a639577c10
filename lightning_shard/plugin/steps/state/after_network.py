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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    DEPTH,
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


class _Deleted:
    """Stands for the value of an attribute that was deleted."""


class LateState:
    """Tracks the state of modules around the blocks over the microbatches of a batch, on one rank.

    Of several stages it tracks the rank's last one. In a microbatch that searches for the values that cross between
    stages (``pipeline/dataflow/search.py``), all of it is followed. Afterwards only replaced attributes, versions of
    tensors, digests of arrays and lengths of containers are, and the contents of what was seen to change inside. That
    takes microseconds, but for large arrays. It has many attributes, for what either way has noted.

    Args:
        root: Cut and sharded.
        stages: This rank's.
        apart: The stages' versions of the module's state.
    """

    def __init__(self, root: nn.Module, stages: Stages, apart: StatesApart) -> None:
        self._stage: Stage = stages[-1]
        self._apart = apart
        # parts with parameters run around the blocks and keep their state where they are held
        network = self._stage.network
        parts = [part for part, holder in network.parts.items() if holder != network.stages - 1]
        within = tuple(f"{name}." for name in (*self._stage.blocks, *parts))
        self._modules = {
            path: module
            for path, module in root.named_modules()
            if not f"{path}.".startswith(within) and not isinstance(module, Metric)
        }
        self._elsewhere = {path: module for path, module in root.named_modules() if module in self._stage.elsewhere}
        self._hollow = {tuple(name.rpartition(".")[::2]) for stage in stages for name in stage.hollow}
        self._in_step = self._searching = False
        # on the last stage, when the first block was called: attributes and buffers; and what may change in place
        self._before: tuple[dict[str, dict[str, Any]], dict[Name, Outline]] | None = None
        self._begun: dict[Name, Outline] | None = None  # at the start of the batch, of containers and objects
        self._warned_of: set[Name] = set()
        self._numbers: dict[Name, Any] = {}
        self._depths: dict[Name, int] = {}  # of what may change in place: how deep it is looked into
        self._by_value: set[Name] = set()
        self._changed: set[Name] = set()
        if self._stage.is_last:
            self._stage.network_begins, self._stage.network_ends = self._network_begins, self._network_ends

    @contextmanager
    def step(self, stage: Stage, *, searching: bool) -> Iterator[None]:
        """Track what the user's step, which runs inside on one microbatch as far as a stage runs it, changes.

        Inside of what the stage runs in: received parameters and other stages' modules are as the step sees them.

        Raises:
            StepError: It has set a number on a block of another stage.
        """
        if stage is not self._stage:
            yield
            return
        self._in_step, self._searching, self._before, self._numbers = True, searching, None, {}
        if self._begun is None:
            with torch._C.DisableTorchFunction():
                self._begun = self._outlines()
        try:
            yield
            self._check_numbers()
        finally:
            self._in_step = False
            if self._before is not None:
                with torch._C.DisableTorchFunction():
                    self._changed.update(self._since(*self._before))

    def forget(self) -> None:
        """Forget what the batch has changed so far: all of it is known, or was put back."""
        self._changed, self._begun = set(), None

    def changes(self) -> dict[Name, Any]:
        """On the last stage's rank, at the end of a batch: what has changed, to be sent to the others."""
        self._apart.show(self._stage)
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
            return Unsendable()  # without the traceback, which holds the value

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
        self._apart.settle()
        outlines = self._begun or {}
        self.forget()
        for key, value in changes.items():
            if key[0] in self._modules and not self._stage.is_last:
                self._apply(key, value, outlines.get(key), device)

    def _apply(self, key: Name, value: Any, begun: Outline | None, device: torch.device) -> None:
        held, receive = self._held(key), partial(received, partial(_placed, key, device))
        if isinstance(value, (Change, Unsendable)):
            self._depths[key] = DEPTH
        if isinstance(value, Unsendable) or (isinstance(value, Change) and not value.fits(held)):
            self._warn(key)
        elif isinstance(value, Change):
            value.apply(held, begun if begun is not None and begun.value is held else None, receive)
        elif isinstance(value, _Deleted):
            if key[1] in _attributes_and_buffers(self._modules[key[0]]):
                delattr(self._modules[key[0]], key[1])
        else:
            _set(self._modules[key[0]], key[1], receive(value))

    def _warn(self, key: Name) -> None:
        if key not in self._warned_of:
            self._warned_of.add(key)
            warnings.warn(
                f"A step changes {path_of(key)} after calling the network, to what can't be sent to other pipeline"
                " stages: their steps, hooks and callbacks find it as it was. Numbers, texts, tensors, and lists,"
                " dicts and plain objects of these are sent (sentence 6 of the contract).",
                stacklevel=2,
            )

    def carry(self, broadcast: Callable[[Any], Any], device: torch.device) -> bool:
        """Take over the last stage's values for a microbatch that begins when the one before has ended on all stages.

        A collective call over the pipeline.

        Args:
            broadcast: Gives the last stage's value on all stages.

        Returns:
            Whether there were any.
        """
        changes = broadcast(self.changes() if self._stage.is_last else None)
        self.take(changes, device)
        self._apart.begin()
        return bool(changes)

    def _network_begins(self) -> None:
        """The first of the step's blocks is called."""
        if self._in_step and self._before is None:
            with torch._C.DisableTorchFunction():  # looks are none of the step's operations
                held = {path: _attributes_and_buffers(module) for path, module in self._modules.items()}
                self._before = held, self._look_inside()

    def _network_ends(self) -> None:
        """In a search: the network's last block returns."""
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
        now = self._numbers_elsewhere() if self._numbers else {}
        for (path, name), before in self._numbers.items():
            if now.get((path, name), before) != before:
                raise StepError(
                    f"A step changes {name} of {path} after calling the network, and the pipeline stage that holds"
                    f" {path} doesn't see it: change it before the network is called, or in on_train_batch_end, or use"
                    " pipeline_parallel_size=1.",
                    breaks=6,
                )

    def _all_deeply(self) -> dict[Name, int]:
        """In a search all attributes are looked into; what may change in place is in later runs too."""
        own = {
            (path, name): value
            for path, module in self._modules.items()
            for name, value in _attributes_and_buffers(module).items()
            if _is_own(name, value)
        }
        marked = (Tensor, np.ndarray, *CONTAINERS)
        for key in own.keys() - self._hollow:
            if isinstance(own[key], marked):
                self._depths.setdefault(key, 0)
        return dict.fromkeys(own.keys() - self._hollow, DEPTH)

    def _outlines(self) -> dict[Name, Outline]:
        """Of containers and objects that the batch may change inside."""
        depths = self._all_deeply() if self._searching else self._depths
        held = {key: (self._held(key), depth) for key, depth in depths.items()}
        return {key: Outline.of(value, max(depth, 1)) for key, (value, depth) in held.items() if has_contents(value)}

    def _look_inside(self) -> dict[Name, Outline]:
        """Of what may change in place."""
        depths = self._all_deeply() if self._searching else self._depths
        return {
            key: Outline.of(self._held(key), depth, by_value=self._searching or key in self._by_value)
            for key, depth in depths.items()
        }

    def _since(self, before: dict[str, dict[str, Any]], outlines: dict[Name, Outline]) -> set[Name]:
        """The names of what has changed."""
        now = self._look_inside() if outlines else {}
        exchanged = {
            (path, name)
            for path, held in before.items()
            if not hold_same(held, later := _attributes_and_buffers(self._modules[path]))
            for name, value in (held | later).items()
            if (held.get(name, held) is not value or name not in later) and _is_own(name, value)
        }
        changed = set()
        for key, outline in outlines.items():
            look = now.get(key)  # not of what was removed
            if key in exchanged or look is None or outline.is_as(look):
                continue
            changed.add(key)
            self._depths[key] = DEPTH
            if outline.mark == look.mark and outline.content != look.content:
                self._by_value.add(key)
        return exchanged | changed

    def _held(self, key: Name) -> Any:
        module = self._modules[key[0]]
        return module._buffers.get(key[1], vars(module).get(key[1]))


def _attributes_and_buffers(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._buffers}


def _is_own(name: str, value: Any) -> bool:
    return name not in _NOT_OWN and not isinstance(value, (Hollow, OwnGenerator))


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
