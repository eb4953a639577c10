"""One pipeline stage: forward hooks on blocks and parts follow a microbatch's step, and take the values to be sent.

Code around the blocks runs on every stage: masks, rotary tables and other arguments are recomputed from the same batch.
``crossing.py`` finds which of its values must be sent between stages, and ``own_call.py`` follows the blocks' calls.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.backward_hooks import HOOKS_OF_ALL, refuse_hooks
from lightning_shard.pipeline.dataflow.crossing import (
    Crossing,
    LateValue,
    Passage,
    StageEnd,
    none_called,
    parameters_crossing,
    parameters_in_place,
    switched_off,
    unknown_states,
)
from lightning_shard.pipeline.dataflow.fetching import Ask, Ledger
from lightning_shard.pipeline.dataflow.kept import Found, keep
from lightning_shard.pipeline.dataflow.masks import masks_made_as_given
from lightning_shard.pipeline.dataflow.messages import Counted, Delivery, Key, Slot
from lightning_shard.pipeline.dataflow.taint import Hollow, Unknown, refuse
from lightning_shard.pipeline.dataflow.trace import Trace
from lightning_shard.pipeline.stages.compiled_functions import CompiledFunctions
from lightning_shard.pipeline.stages.own_call import OwnCall
from lightning_shard.pipeline.stages.parts import PartCalls, part_of

if TYPE_CHECKING:
    from lightning_shard.pipeline.runtime.network_calls import Calls

_OPERATIONS_OF_A_CALL = 2**24
"""The offset between the operation numbers of two calls of the network: more operations than a network has."""


@dataclass(frozen=True)
class Network:
    """A network that was cut into stages.

    Attributes:
        path: The name of the module that a step calls; ``""`` if it is the root itself.
        blocks: The names of all blocks, in running order; a block that runs several times is listed as often. A block's
            *place* is an index in this list.
        holders: The stage that runs each place.
        parts: The names of the modules and parameters around the blocks, and the stage that holds each.
        stages: Their number.
    """

    path: str
    blocks: Sequence[str]
    holders: Sequence[int]
    parts: Mapping[str, int]
    stages: int


class Stage:
    """A stage of this rank, of a model that was cut in place.

    It has many attributes, since the user's code meets it in many places (hooks, stand-ins, parts, hollow parameters),
    and all of these ask what it holds and where it stands.

    Args:
        index: The stage's number.
        network: What was cut; ``blocks`` and ``parts`` are its.
        device: Of unknown values.

    Attributes:
        owned: The places that it runs.
        places: The places of each block, by name.
        own_parts: The parts that this stage holds.
        alone: The names of this stage's parameters that no earlier stage has.
        hollow: The parameters that other stages hold, by name.
        elsewhere: The modules whose parameters other stages hold.
        saved_elsewhere: Names of buffers, by module, that other ranks save.
        entrances: The modules that contain all blocks: a step runs the network by calling one of them.
        keep: Sets an attribute of a module that another stage holds.
        apart: Context with this stage's own plain-Python state, if the rank has several stages.
        shown: Context in which the model looks as if the rank held this stage alone, if it has several.
        is_shown: Whether the model looks so now.
        in_step: Whether the user's code runs.
        in_backward: Whether a backward runs.
        method: The name of the step that runs, for messages.
        calls: The calls of the network, during a step that runs call by call.
        passage: The microbatch that runs.
        trace: Of its operations, if they are counted.
        running_places: Of the blocks that are being called, outermost first; ``None`` for one that another block calls.
        given: The values that stand-ins returned, by place.
        seed: The microbatch's.
        draws: Seeds the random generators for a place of the microbatch with this seed, and returns a function that
            restores them. It is called in the forward, and in the backward of the same microbatch, where activation
            checkpointing may rerun the block. Recomputation doesn't know which place it reruns a block of several
            places for. So such a block draws from the generators of the code around it, and these are reseeded after
            each place, on every stage: a checkpoint restores the generators before it recomputes.
        network_begins: Called when the first block of a step is called; ``None``: nothing is.
        network_ends: The same when the network's last block returns, in a search.
    """

    def __init__(self, index: int, network: Network, device: torch.device) -> None:
        self.index, self.network, self.device = index, network, device
        self.owned = range(bisect_left(network.holders, index), bisect_right(network.holders, index))
        self.blocks, self.parts = network.blocks, [*network.parts]
        self.is_first, self.is_last = index == 0, index == network.stages - 1
        self.places: dict[str, list[int]] = {}
        for place, name in enumerate(self.blocks):
            self.places.setdefault(name, []).append(place)
        self.own_parts = [name for name, holder in network.parts.items() if holder == index]
        self.alone: Collection[str] = ()
        self.hollow: dict[str, Hollow] = {}
        self.elsewhere: set[nn.Module] = set()
        self.saved_elsewhere: dict[nn.Module, list[str]] = {}
        self.entrances: list[nn.Module] = []

        self.keep: Callable[[nn.Module, str, Any], None] = keep
        self.apart: Callable[[], AbstractContextManager[None]] = nullcontext
        self.shown: Callable[[], AbstractContextManager[None]] = nullcontext
        self.draws: Callable[[int], Callable[[], None] | None] | None = None
        self.network_begins: Callable[[], None] | None = None
        self.network_ends: Callable[[], None] | None = None

        self.is_shown = True
        self.in_step = self.in_backward = False
        self.method = "The step"
        self.calls: Calls | None = None
        self.passage = Passage(index, self.hollow)
        self.trace: Trace | None = None
        self.running_places: list[int | None] = []
        self.given: dict[int, Any] = {}
        self.seed = 0

        self._root: nn.Module | None = None
        self._times_run: defaultdict[str, int] = defaultdict(int)
        self._part_calls = PartCalls(self)
        self._found: defaultdict[int, Found] = defaultdict(Found)
        self._own_call: OwnCall | None = None
        self._drawn: dict[int, Callable[[], None] | None] = {}
        self._compiled = CompiledFunctions()
        self._shared: set[str] = set()

    @property
    def places_run(self) -> list[int]:
        """The places called so far in this microbatch's step."""
        return [place for name, times in self._times_run.items() for place in self.places[name][:times]]

    @contextmanager
    def microbatch(
        self,
        received: Mapping[Key, Tensor],
        crossing: Crossing,
        *,
        ask: Ask | None = None,
    ) -> Iterator[Passage]:
        """Context of one microbatch's forward, whose user code runs in :meth:`running`; yields its :class:`Passage`.

        Args:
            received: Values from the previous stage.
            crossing: The values that cross, as far as known.
            ask: Asks the previous stage for values, where the run searches for those that cross.
        """
        counted = Counted(_OPERATIONS_OF_A_CALL * self.calls.count) if self.calls is not None else Counted()
        passage = self.passage = Passage(
            self.index,
            self.hollow,
            crossing,
            dict(received),
            counted,
            in_step=lambda: self.in_step,
            searching=ask is not None,
            active=True,
        )
        if ask is not None:
            assert self._root is not None
            passage.ledger = Ledger(passage, ask, self.alone, self._root, crossing.incoming.aliased)
        self._times_run.clear()
        self.running_places.clear()
        self.trace = Trace(passage) if ask is not None or crossing.is_traced() else None
        try:
            with self.apart():
                yield passage
        finally:
            passage.active, self.trace = False, None
            passage.in_place_of.clear()
            self._part_calls.clear()
            if self._own_call is not None:  # the step ended within a block
                self._own_call.remove_hooks()
                self._own_call = None

    @contextmanager
    def backward(self, received: Mapping[Key, Tensor]) -> Iterator[None]:
        """Context of a microbatch's backward: received parameters are in place, for code that it recomputes."""
        assert self._root is not None
        self.in_backward = True
        try:
            with self.apart(), self.shown(), parameters_in_place(self._root, received):
                yield
        finally:
            self.in_backward = False

    @contextmanager
    def running(self, root: nn.Module) -> Iterator[None]:
        """Context of the user's step, while ``root``'s own parameters are unsharded."""
        traced = self.trace.running() if self.trace is not None else nullcontext()
        masks = masks_made_as_given(causal_too=self.trace is not None)
        with self.shown(), parameters_crossing(root, self.passage), masks, traced:
            before, self.in_step = self.in_step, True
            self._compiled.run_as_written()
            try:
                yield
            except StageEnd:
                self.passage.check_hooks()
                raise
            else:
                self.passage.check_hooks()
                if self.passage.searching and self.is_last:
                    refuse(unknown_states(m for m in root.modules() if m not in self.elsewhere), "A step's own state")
            finally:
                self._compiled.run_compiled()
                self.in_step = before

    @contextmanager
    def calling(self, calls: Calls) -> Iterator[None]:
        """Context of a step that runs call by call, where each call is a :meth:`microbatch` of its own."""
        self.calls, self.passage = calls, Passage(self.index, self.hollow)
        try:
            yield
        finally:
            self.calls, self.passage = None, Passage(self.index, self.hollow)

    def join(self, root: nn.Module) -> None:
        """Register the hooks, after ``root`` was sharded: they enclose FSDP's, with no code of the network between."""
        self._root, self.entrances = root, [root.get_submodule(name) for name in _around_all(self.blocks)]
        for name in self.places:
            block = root.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True)
            block.register_forward_hook(partial(self._leave, name))
        for name in _around_any(self.blocks):
            root.get_submodule(name).register_forward_pre_hook(partial(self._enter_around, name))
        self._part_calls.join(root)
        # The step itself runs inside a call of root. So if the network is root, only root's third call is a second one.
        root.get_submodule(self.network.path).register_forward_pre_hook(
            partial(self._count_calls, 1 if self.network.path else 2), prepend=True
        )

    def delivery(self, passage: Passage, crossing: Crossing) -> Delivery:
        """The delivery that announces a microbatch's sent values to the next stage."""
        slots = {key: Slot.of(tensor) for key, tensor in passage.sent.items()}
        aliased = passage.ledger.memory.aliased() if passage.ledger is not None else crossing.incoming.aliased
        return Delivery(slots, dict(passage.blocks), passage.counted, passage.until, aliased)

    def on_missing(self, values: Sequence[Unknown], sentence: str) -> None:
        if self.calls is not None and not self.passage.active:
            self.calls.on_missing(sentence)
        try:
            self.passage.request(values, sentence)
        except LateValue as late:
            of_blocks = [name for name in late.parameters if name.startswith(tuple(f"{b}." for b in self.places))]
            if of_blocks and self.passage.last_block is None and not self.running_places:
                raise StepError(none_called(self.method, self.blocks), breaks=3) from None
            raise StepError(str(late), breaks=1) from None

    # Hooks

    def _count_calls(self, allowed: int, *_: Any) -> None:
        """Notice a second call where it begins: its code before the blocks may need what can't be had."""
        if self.passage.active:
            self.passage.calls += 1
            if self.passage.calls > allowed:
                name = self.network.path or "the LightningModule"
                self._on_second_call(
                    f"The network ({name}) was called a second time within one step,"
                    " and a pipeline runs it once: call it once on the concatenated inputs, name blocks of what is"
                    " called once by pipeline_blocks, or use pipeline_parallel_size=1."
                )

    def _on_second_call(self, sentence: str) -> NoReturn:
        """The blocks are about to run a second time: have an evaluation step run call by call.

        Raises:
            StepError: With this sentence, if it is a training step, or a single call reruns the blocks. Or an
                evaluation step's first batch of this kind and shapes called the network once.
        """
        if self.passage.differentiates or self.calls is not None:
            raise StepError(sentence, breaks=2)
        if not self.passage.searching:
            raise StepError(
                "The network was called a second time within one step, and was called once in the first batch of this"
                " kind and these shapes. Whether an evaluation step calls it several times, as generating text does,"
                " is found in the first batch: call it several times there too (batch_idx == 0), or use"
                " pipeline_parallel_size=1.",
                breaks=2,
            )
        self.passage.failed = True
        raise StageEnd

    def _enter(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.is_shown:
            return
        passage, places = self.passage, self.places[name]
        if len(places) == 1 and self.draws is not None:
            self._drawn[places[0]] = self.draws(places[0])
        if not passage.active:
            return  # recomputation under activation checkpointing
        if self.network_begins is not None and not self._times_run:
            self.network_begins()
        if self.running_places:  # another block calls it
            index = None
        elif (before := self._times_run[name]) < len(places):
            self._times_run[name], index = before + 1, places[before]
        else:
            self._on_second_call(
                f"{name} ran {before + 1} times within one step, and a pipeline expects it {before}×: give the"
                " LightningModule an example_input_array, by which calls are counted, name blocks by pipeline_blocks"
                " in running order and as often as they run, or use pipeline_parallel_size=1."
            )
        self.running_places.append(index)
        hooks = block._backward_hooks, block._backward_pre_hooks, *HOOKS_OF_ALL
        if any(hooks) and index is not None and passage.differentiates:
            refuse_hooks(name, block)
        if self.trace is not None:
            self.trace.suspend()
        if self.calls is not None and index is not None:
            self.calls.objects.block_begins(index, args, kwargs)
        if index is None or index not in self.owned:
            return
        if passage.entered_at is None:
            passage.enter()
        if self.trace is not None:
            self.trace.mark_written_aliases((args, kwargs))
        passage.in_block = True
        if kwargs or {*map(type, args)} != {Tensor}:  # else they are known
            refuse((args, kwargs), name)
        self._compiled.run_compiled()
        if passage.searching or not self.is_last:
            self._own_call = OwnCall(self, index, block, self._found[index], (args, kwargs))

    def warn_if_shared(self, path: str, value: Any) -> None:
        """Warn of what a block changes in place, and code around this stage's blocks may read by another name."""
        assert self._root is not None
        within = tuple(f"{self.blocks[place]}." for place in self.owned)
        others = ((path, each) for path, each in self._root.named_modules() if not f"{path}.".startswith(within))
        held = ((path, chain(vars(each).items(), each._buffers.items())) for path, each in others)
        other = next((f"{path}.{key}".lstrip(".") for path, own in held for key, each in own if each is value), None)
        if other is not None and other not in self._shared:
            self._shared.add(other)
            warnings.warn(
                f"{path} is one {type(value).__name__} with {other}, and changed in place in its block. Each pipeline"
                " stage has its own, and other stages don't see there what this one's blocks have changed: give each"
                " block its own, or have the network return what it is changed by.",
                stacklevel=2,
            )

    def check_asked(self, keys: Iterable[Key]) -> None:
        """Refuse hooks of parts whose output a later stage has asked for: they would see a part of the gradient."""
        assert self._root is not None
        for key in keys if self.passage.differentiates else ():
            if key[0] == "operation" and key[3] in self.parts:
                refuse_hooks(key[3], part_of(self._root, key[3]))

    def _enter_around(self, name: str, module: nn.Module, _: Any) -> None:
        if self.is_shown and self.passage.active and self.passage.differentiates:
            refuse_hooks(name, module)

    def _leave(self, name: str, _block: nn.Module, _args: Any, output: Any) -> Any:
        if not self.is_shown:
            return None
        passage, places = self.passage, self.places[name]
        if (put_back := self._drawn.pop(places[0], None)) is not None:
            put_back()
        if not passage.active:
            return None
        index = self.running_places.pop()
        if self.network_ends is not None and passage.searching and index == len(self.blocks) - 1:
            self.network_ends()
        if index is not None and len(places) > 1 and self.draws is not None:
            self.draws(index)
        if index is not None and index in self.owned:
            if torch.is_grad_enabled() != passage.differentiates:
                raise switched_off(name)
            if self._own_call is not None:
                own_call, self._own_call = self._own_call, None
                own_call.end(output)
            passage.in_block = False
            if self.trace is not None or index != len(self.blocks) - 1:
                self._compiled.run_as_written()
        if self.trace is not None:
            self.trace.resume()
        if index is None:
            return None
        passage.in_hooks = False
        passage.last_block, passage.counted_at_last_block = index, passage.counted
        if passage.entered_after is not None and index == passage.entered_after.place:
            passage.enter()
        if passage.leaves_after is not None and index == passage.leaves_after.place:
            self.given.pop(index, None)
            passage.until = passage.leaves_after
            raise StageEnd
        if index in self.owned:
            return None
        return self.given.pop(index, output)  # discards what hooks return here: the received output includes it


def modules_of(root: nn.Module, stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a stage's blocks and parts, by name."""
    modules = dict(root.named_modules(remove_duplicate=False))
    for name in dict.fromkeys([*(stage.blocks[place] for place in stage.owned), *stage.own_parts]):
        if name in modules:
            yield from modules[name].named_modules(prefix=name)


def _around_all(blocks: Sequence[str]) -> list[str]:
    """The names of the modules that contain all blocks, beginning with the root."""
    return ["", *(path for path in _around_any(blocks) if all(name.startswith(f"{path}.") for name in blocks))]


def _around_any(blocks: Sequence[str]) -> list[str]:
    """The names of the modules that contain at least one block, without the root."""
    paths = [name.split(".") for name in blocks]
    return [*dict.fromkeys(".".join(path[:length]) for path in paths for length in range(1, len(path)))]
