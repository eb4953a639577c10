"""Several stages on one rank, as views of one module; one stage runs at a time.

While a stage runs, the module looks as it would on a rank that holds this stage alone. So which values a stage knows,
misses and requests doesn't depend on the rank's other stages (its siblings). In its view, hollow parameters shadow its
siblings' parameters, and stand-ins replace the forwards of their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import Hollow, Unknown, said_of_hook
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.user_hooks import is_of_fsdp

_ABSENT = object()


@dataclass
class View:
    """Entries of dicts, such as attributes of modules, that differ while a stage runs; they are swapped in and out.

    A parameter is in its module's ``_parameters``, where FSDP replaces it; an entry of ``__dict__`` is found before it.
    FSDP's lazy initialisation reads attributes too, so a view is in place only within a call of FSDP's root.

    Attributes:
        entries: A dict, a key and the value there.
        foreign: The numbers of entries that the stage has set on modules of blocks that no stage of the rank holds.
        is_foreign: Whether a module is of these.
    """

    entries: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)
    is_foreign: Callable[[nn.Module], bool] = lambda module: False
    _before: list[Any] = field(default_factory=list)

    def add(self, holder: dict[Any, Any], key: Any, value: Any) -> None:
        self.entries.append((holder, key, value))

    def keep(self, module: nn.Module, key: str, value: Any) -> None:
        """Set an attribute or buffer, now and whenever this stage runs again. Called while the stage runs."""
        holder = module._buffers if key in module._buffers else module.__dict__
        place = next((i for i, entry in enumerate(self.entries) if entry[0] is holder and entry[1] == key), None)
        if place is None:
            if self.is_foreign(module):
                self.foreign.append(len(self.entries))
            self.add(holder, key, value)
            self._before.append(holder.get(key, _ABSENT))
        else:
            self.entries[place] = (holder, key, value)
        holder[key] = value

    def leave_foreign(self) -> None:
        """Let hooks between steps see what the stage knows of blocks on other ranks, not what they kept at first."""
        for number in self.foreign:
            holder, key, value = self.entries[number]
            holder[key] = value

    def put(self) -> None:
        self._before = [holder.get(key, _ABSENT) for holder, key, _ in self.entries]
        for holder, key, value in self.entries:
            holder[key] = value

    def take_out(self) -> None:
        for (holder, key, _), value in zip(self.entries, self._before):
            if value is _ABSENT:
                holder.pop(key, None)
            else:
                holder[key] = value


@dataclass(eq=False)
class Stages(Sequence[Stage]):
    """This rank's stages of a model that was cut in place, in the order of the network.

    Attributes:
        held: The stages.
        views: The view of each stage; empty if the rank has a single stage, which needs none.
        incomplete: By name, every module with parameters that only other ranks hold.
        foreign_buffers: Names of buffers that are kept for code around the blocks, but belong to another rank's state.
        shared_buffers: Names of buffers of modules that several stages hold.
        current: The stage that runs; if the rank has a single stage, always that one.
    """

    held: tuple[Stage, ...]
    views: dict[Stage, View] = field(default_factory=dict)
    incomplete: dict[str, nn.Module] = field(default_factory=dict)
    foreign_buffers: set[str] = field(default_factory=set)
    shared_buffers: set[str] = field(default_factory=set)
    current: Stage | None = None

    def __post_init__(self) -> None:
        if len(self.held) == 1:
            self.current = self.held[0]
            return
        for stage in self.held:
            stage.is_shown = False
            stage.shown = partial(self._showing, stage)
            view = self.views[stage] = View()
            stage.keep = view.keep

    def __getitem__(self, place: Any) -> Any:
        return self.held[place]

    def __len__(self) -> int:
        return len(self.held)

    @property
    def is_last(self) -> bool:
        """Whether the network's last stage is here."""
        return self.held[-1].is_last

    @property
    def in_step(self) -> bool:
        """Whether the user's code runs."""
        return any(stage.in_step for stage in self.held)

    def join(self, root: nn.Module) -> None:
        """Register the stages' hooks, after ``root`` was sharded; each view disables FSDP's on siblings' modules."""
        for stage in self.held:
            stage.join(root)
        blocks = {name for stage in self.held for name in stage.blocks}
        own = {stage.blocks[place] for stage in self.held for place in stage.owned}
        foreign = {each for name in blocks - own for each in root.get_submodule(name).modules()}
        for stage, view in self.views.items():
            view.is_foreign = foreign.__contains__
            hollow = {id(holder) for holder, _, value in view.entries if isinstance(value, Hollow)}
            for module in stage.elsewhere:
                if any(p is not None for p in module._parameters.values()) and id(module.__dict__) not in hollow:
                    continue  # its weight is tied to one of this stage, and sharded with it
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    for number, hook in hooks.items():
                        if is_of_fsdp(hook):
                            view.add(hooks, number, _nothing)

    def on_missing(self, values: Sequence[Unknown], sentence: str) -> None:
        if not self.in_step or self.current is None:
            raise StepError(said_of_hook(sentence), breaks=1)
        self.current.on_missing(values, sentence)

    def leave_foreign(self) -> None:
        """End a batch: outside of steps, blocks on other ranks look as they do to the last stage here."""
        for view in self.views.values():
            view.leave_foreign()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context within a running stage that takes its view out, so that each stage may run in turn."""
        stage = self.current
        if stage is None or not self.views:
            yield
            return
        self.views[stage].take_out()
        self.current, stage.is_shown = None, False
        try:
            yield
        finally:
            self.current, stage.is_shown = stage, True
            self.views[stage].put()

    @contextmanager
    def _showing(self, stage: Stage) -> Iterator[None]:
        self.current, stage.is_shown = stage, True
        self.views[stage].put()
        try:
            yield
        finally:
            self.views[stage].take_out()
            self.current, stage.is_shown = None, False


def _nothing(*_: Any) -> None:
    """A hook that does nothing, in place of a disabled one."""
