"""Cut a model to one stage, in place, and join it to its neighbours at the blocks.

The stage keeps its range of blocks, and of what runs around blocks the parts whose place is in that range. Names of
parameters never change. Everything else stays the object that it is, so that the user's own code runs unmodified, but
its parameters are :class:`Hollow`: right shape and dtype, no memory, and what is computed from them is unknown
(``taint.py``). Of the blocks that other stages hold, the forward is stood in for:

* **Earlier blocks** hand out what their stage sent, in the nesting of their own output; what it didn't send is unknown.
* The first **later block** ends the stage's part: it leaves the user's step by :class:`StageEnd`.

Code around the blocks runs on every stage (masks, rotary tables and other arguments are recomputed from the same
batch). What of it crosses between stages is found by ``crossing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.errors import StepError
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.crossing import (
    Crossing,
    Delivery,
    Key,
    Passage,
    Slot,
    StageEnd,
    Trace,
    parameters_crossing,
    unknown_states,
)
from lightning_shard.pipeline.taint import Hollow, Origin, Unknown, base_of, mark, refuse


@dataclass(eq=False)
class Stage:
    """This rank's stage of a model that was cut in place.

    Attributes:
        index: Its place in the pipeline, of ``count``.
        blocks: Names of all blocks, in the order in which they run.
        owned: Which of them it holds.
        parts: Names of the modules and parameters around them.
        network: The name of the module that a step calls; ``""`` where it is the root itself.
        foreign_buffers: Names of buffers that stay here for code around the blocks but are another stage's state.
        incomplete: By name, every module of which another stage holds parameters.
        hollow: The parameters that other stages hold, by name.
        draws: Seeds the generators for an owned block, by its place, and returns what puts them back. It is asked in a
            forward, and in the backward of the same microbatch: there a block may run again, to recompute what
            activation checkpointing didn't keep.
    """

    index: int
    count: int
    blocks: Sequence[str]
    owned: range
    parts: Collection[str]
    network: str
    device: torch.device
    foreign_buffers: set[str] = field(default_factory=set)
    incomplete: dict[str, nn.Module] = field(default_factory=dict)
    hollow: dict[str, Hollow] = field(default_factory=dict)
    draws: Callable[[int], Callable[[], None]] | None = None

    def __post_init__(self) -> None:
        self.passage = Passage(self.index, self.hollow)
        self._trace: Trace | None = None
        self._elsewhere: set[nn.Module] = set()
        self._in_step = False
        self._drawn: dict[int, Callable[[], None]] = {}
        self._given: dict[int, Any] = {}
        self._before: _Before | None = None
        self._inside: list[RemovableHandle] = []

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @contextmanager
    def microbatch(
        self, received: Mapping[Key, Tensor], crossing: Crossing, *, searching: bool = False
    ) -> Iterator[Passage]:
        """Run one microbatch's forward inside, the user's code in :meth:`running`; yields its :class:`Passage`.

        Args:
            received: What the stage before sent.
            searching: Whether what crosses is yet to be found.
        """
        passage = self.passage = Passage(
            self.index,
            self.hollow,
            searching,
            dict(received),
            {**crossing.incoming.outputs, **(crossing.outgoing.outputs if crossing.outgoing else {})},
            {**crossing.incoming.inside, **(crossing.outgoing.inside if crossing.outgoing else {})},
            {**crossing.incoming.kept, **(crossing.outgoing.kept if crossing.outgoing else {})},
            {**crossing.incoming.changed, **(crossing.outgoing.changed if crossing.outgoing else {})},
            crossing.incoming.unavailable,
            frozenset(crossing.asked),
            active=True,
            differentiates=torch.is_grad_enabled(),
        )
        self._trace = Trace(passage) if searching or crossing.is_traced() else None
        try:
            yield passage
        finally:
            passage.active, self._trace = False, None
            while self._inside:
                self._inside.pop().remove()

    @contextmanager
    def running(self, root: nn.Module) -> Iterator[None]:
        """The user's step runs inside, its parameters gathered."""
        with ExitStack() as stack:
            stack.enter_context(parameters_crossing(root, self.passage))
            if self._trace is not None:
                stack.enter_context(self._trace.running())
            self._in_step = True
            stack.callback(setattr, self, "_in_step", False)
            yield
            if self.passage.searching and self.is_last:
                refuse(unknown_states(m for m in root.modules() if m not in self._elsewhere), "A step's own state")

    def join(self, root: nn.Module) -> None:
        """Watch the blocks, once ``root`` was sharded: between these hooks runs no code of the network."""
        for index, name in enumerate(self.blocks):
            block = root.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter, index), prepend=True, with_kwargs=True)
            block.register_forward_hook(partial(self._leave, index))
        for name in self.parts:
            part = _attribute(root, name)
            if isinstance(part, nn.Module):
                hollow = [tensor for fqn, tensor in self.hollow.items() if fqn.startswith(f"{name}.")]
                part.register_forward_pre_hook(partial(self._enter_part, hollow), prepend=True, with_kwargs=True)
                part.register_forward_hook(partial(self._leave_part, name))
        # The step itself runs inside a call of root, so that one is a second call only if it is the third of root.
        root.get_submodule(self.network).register_forward_pre_hook(
            partial(self._count_calls, 1 if self.network else 2), prepend=True
        )

    def delivery(self, passage: Passage, crossing: Crossing) -> Delivery:
        """What goes out of a microbatch."""
        slots = {key: Slot.of(tensor) for key, tensor in passage.sent.items()}
        unavailable = frozenset(crossing.unavailable)
        return Delivery(
            slots,
            dict(passage.outputs),
            dict(passage.inside),
            dict(passage.kept),
            dict(passage.changed),
            unavailable,
            passage.counted,
        )

    def on_missing(self, values: Sequence[Unknown], sentence: str) -> NoReturn:
        self.passage.on_missing(values, sentence)

    # Hooks

    def _enter_part(self, hollow: Sequence[Hollow], _part: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_step and self._trace is not None:
            self._trace.begins((args, kwargs, hollow))

    def _leave_part(self, name: str, _part: nn.Module, _args: Any, output: Any) -> Any:
        return self._trace.ends(name, output) if self._in_step and self._trace is not None else output

    def _count_calls(self, allowed: int, *_: Any) -> None:
        if self.passage.active:
            self.passage.calls += 1
            if self.passage.calls > allowed:
                raise StepError(
                    "The network was called a second time within one step, and a pipeline runs it once: call it once"
                    " on the concatenated inputs, or use pipeline_parallel_size=1."
                )

    def _enter(self, index: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        passage = self.passage
        if index in self.owned and self.draws is not None:
            self._drawn[index] = self.draws(index)
        if not passage.active:
            return  # recomputation under activation checkpointing
        if self._trace is not None:
            self._trace.suspend()
        if index not in self.owned:
            return
        if index == self.owned.start:
            if passage.entered:
                raise StepError(
                    "The network's blocks ran a second time within one step, and a pipeline runs them once: use"
                    " pipeline_parallel_size=1."
                )
            passage.entered_at = passage.counted
        refuse((args, kwargs), self.blocks[index])
        if passage.searching or any(key[:2] == ("inside", index) for key in passage.wanted):
            self._watch_inside(index, block)
        self._before = _Before.of(block, (args, kwargs)) if self._leaves_traces(index) else None

    def _leaves_traces(self, index: int) -> bool:
        """Whether it is to be seen what a block changes beside what it returns."""
        passage = self.passage
        if self.is_last:
            return False
        return passage.searching or any(key[:2] in (("kept", index), ("changed", index)) for key in passage.wanted)

    def _watch_inside(self, index: int, block: nn.Module) -> None:
        """Note what hooks inside of a block see, for the stages where its forward is stood in for."""
        seen: list[tuple[str, Any]] = []
        for path, module in block.named_modules():
            if path and module._forward_hooks:
                note = partial(self._note_inside, index, path, seen)
                self._inside.append(module.register_forward_hook(note, with_kwargs=True))
        if self._inside and self.passage.searching:
            self.passage.inside[index] = seen

    def _note_inside(
        self,
        index: int,
        path: str,
        seen: list[tuple[str, Any]],
        _module: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        for place, (_, leaf) in enumerate(tree.walk((args, kwargs, output))):
            key: Key = ("inside", index, len(seen), place)
            if self.passage.searching:
                self.passage.known[key] = None
            if key in self.passage.wanted:
                if type(leaf) is not Tensor:
                    raise StepError(
                        f"A forward hook of {self.blocks[index]}.{path} collects a {type(leaf).__name__}, which can't"
                        " be sent to the pipeline stage that uses it: collect what the block returns."
                    )
                self.passage.sent[key] = leaf.clone()
        seen.append((path, tree.map_leaves(Slot.of, (args, kwargs, output))))

    def _leave(self, index: int, _block: nn.Module, _args: Any, output: Any) -> Any:
        passage = self.passage
        if index in self._drawn:
            self._drawn.pop(index)()
        if not passage.active:
            return None
        if index in self.owned:
            while self._inside:
                self._inside.pop().remove()
            _check_differentiates(passage)
            if index == self.owned[-1]:
                passage.finished = True
            if not self.is_last:
                self._note(index, output)
            if self._before is not None:
                self._note_traces(index, self._before)
                self._before = None
        if self._trace is not None:
            self._trace.resume()
        if index not in self.owned:
            return self._given.pop(index, output)  # what hooks return was sent already
        return None

    def _note_traces(self, index: int, before: _Before) -> None:
        passage = self.passage
        changed, kept = before.changed(self.blocks[index]), before.kept()
        if passage.searching:
            passage.changed[index] = tuple(place for place, _ in changed)
            passage.kept[index] = [(path, key, _slots(value)) for path, key, value in kept]
        for place, tensor in changed:
            passage.produced(("changed", index, place), tensor, written=True)
        for number, (_, _, value) in enumerate(kept):
            for place, (_, leaf) in enumerate(tree.walk(value)):
                if isinstance(leaf, Tensor):
                    passage.produced(("kept", index, number, place), leaf)

    def _note(self, index: int, output: Any) -> None:
        passage = self.passage
        is_handed_on = index == self.owned[-1]
        for place, (_, leaf) in enumerate(tree.walk(output)):
            key: Key = ("block", index, place)
            if passage.searching:
                passage.known[key] = None
            if isinstance(leaf, Tensor) and (is_handed_on or key in passage.wanted):
                passage.sent[key] = leaf.clone()  # code may change it in place
        if passage.searching:
            assert self._before is not None
            passage.outputs[index] = tree.map_leaves(self._before.slot, output)
        elif (is_handed_on or tree.is_node(output)) and (slots := tree.map_leaves(Slot.of, output)) != passage.outputs[
            index
        ]:
            raise StepError(
                f"Stage {self.index} hands on {slots}, and handed on {passage.outputs[index]} for an earlier microbatch"
                " of the same shapes: a hidden state's shapes may depend on those of the batch, not on its values (pad"
                " them), and what needs gradients can't change in mid-run (unfreeze from the start). Or use"
                " pipeline_parallel_size=1."
            )


@dataclass(eq=False)
class _StandIn:
    """In place of the forward of a block that another stage holds."""

    stage: Stage
    index: int
    name: str
    block: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.stage.passage
        if not passage.active:
            raise StepError(
                "The network was called outside a step; with several pipeline stages no process holds all of it. Call"
                " it in training_step, validation_step, test_step or predict_step, or use pipeline_parallel_size=1."
            )
        _check_differentiates(passage)
        if self.index >= self.stage.owned.stop:
            raise StageEnd
        if self.index not in passage.outputs:
            raise StepError(
                f"Stage {self.stage.index} calls {self.name}, and the stage that holds it didn't: which blocks run may"
                " depend on a batch, not on random numbers. Or use pipeline_parallel_size=1."
            )
        for call, (path, seen) in enumerate(passage.inside.get(self.index, ())):
            self._run_hooks(path, self._filled(seen, ("inside", self.index, call), f"what {self.name}.{path} computes"))
        for number, (path, key, value) in enumerate(passage.kept.get(self.index, ())):
            text = f"what {self.name} keeps as {key}"
            scalar = Slot((), torch.get_default_dtype(), False)
            filled = self._filled(scalar if value is None else value, ("kept", self.index, number), text)
            self.block.get_submodule(path).__dict__[key] = filled
        tensors = [leaf for _, leaf in tree.walk((args, kwargs))]
        for place in passage.changed.get(self.index, ()):
            self._change(tensors[place], ("changed", self.index, place))
        given = self._filled(passage.outputs[self.index], ("block", self.index), f"the output of {self.name}", tensors)
        self.stage._given[self.index] = given
        return given

    def _change(self, tensor: Tensor, key: Key) -> None:
        """What the block has written to one of its arguments."""
        passage = self.stage.passage
        origin = Origin(f"what {self.name} writes to its arguments, on an earlier stage,", passage.on_missing)
        base = base_of(tensor)
        for written in (tensor,) if base is None else (tensor, base):
            mark(written, origin)
        passage.produced(key, tensor, written=True)

    def _filled(self, values: Any, name: Key, text: str, arguments: Sequence[Any] = ()) -> Any:
        """Values of the stage that holds the block, in their nesting; what wasn't sent is unknown."""
        passage = self.stage.passage
        places = count()

        def fill(leaf: Any) -> Any:
            key = (*name, next(places))
            if not isinstance(leaf, Slot):
                return leaf
            if leaf.argument is not None and isinstance(arguments[leaf.argument], Tensor):
                return passage.produced(key, arguments[leaf.argument], written=True)
            if key in passage.received:
                return passage.produced(key, passage.received[key])
            tensor = passage.unknown(leaf, key, f"{text}, on an earlier stage,", self.stage.device)
            return passage.produced(key, tensor)

        return tree.map_leaves(fill, values)

    def _run_hooks(self, path: str, seen: tuple[Any, Any, Any]) -> None:
        """The forward hooks of a module inside the block, on what they saw where it ran."""
        module = self.block.get_submodule(path)
        args, kwargs, output = seen
        for number, hook in list(module._forward_hooks.items()):
            if number in module._forward_hooks_with_kwargs:
                hook(module, args, kwargs, output)
            else:
                hook(module, args, output)


@dataclass
class _Before:
    """What a block could change beside what it returns, as it was before its call."""

    arguments: list[tuple[Any, int]]
    attributes: list[tuple[str, nn.Module, dict[str, Any]]]

    @classmethod
    def of(cls, block: nn.Module, arguments: Any) -> _Before:
        noted = [(leaf, leaf._version if isinstance(leaf, Tensor) else 0) for _, leaf in tree.walk(arguments)]
        return cls(noted, [(path, module, dict(vars(module))) for path, module in block.named_modules()]).with_sizes(
            arguments
        )

    def with_sizes(self, arguments: Any) -> _Before:
        self._containers = [(each, len(each)) for each in _containers(arguments)]
        return self

    def slot(self, leaf: Any) -> Any:
        """An output's; it may be an argument, handed on."""
        place = next((place for place, (argument, _) in enumerate(self.arguments) if argument is leaf), None)
        return replace(Slot.of(leaf), argument=place) if isinstance(leaf, Tensor) else leaf

    def changed(self, name: str) -> list[tuple[int, Tensor]]:
        """The tensors among the arguments that were written to, by their place.

        Raises:
            StepError: A list or dict among them has other entries.
        """
        if any(len(each) != size for each, size in self._containers):
            raise StepError(
                f"{name} changes a list or dict that it is given, which the other pipeline stages don't see: return"
                " what it adds."
            )
        places = enumerate(self.arguments)
        return [(p, leaf) for p, (leaf, version) in places if isinstance(leaf, Tensor) and leaf._version != version]

    def kept(self) -> list[tuple[str, str, Any]]:
        """The attributes that modules of the block have set."""
        return [
            (path, key, value)
            for path, module, before in self.attributes
            for key, value in vars(module).items()
            if not key.startswith("_") and key != "training" and before.get(key, before) is not value
        ]


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        yield value
    for _, child in tree.children(value):
        yield from _containers(child)


def _slots(value: Any) -> Any:
    return tree.map_leaves(Slot.of, value) if tree.tensors(value) else None


def cut(
    root: nn.Module,
    blocks: Sequence[str],
    owned: range,
    *,
    network: str,
    index: int,
    count: int,
    parts: Mapping[str, int],
    holder_of: Sequence[int],
    kept: Collection[str],
    device: torch.device,
) -> Stage:
    """Keep stage ``index`` of ``count`` of ``root``, in place.

    Args:
        root: The LightningModule.
        blocks: Names of all blocks, in the order in which they run.
        owned: Which of them this stage holds.
        network: The name of the module that a step calls; ``""`` where it is ``root`` itself.
        parts: Names of the modules and parameters around the blocks, and the stage that holds each.
        holder_of: The stage that holds each block.
        kept: Names of tied parameters that this stage holds, wherever they are used.
        device: Where stand-ins live.
    """
    stage = Stage(index, count, blocks, owned, [*parts], network, device)
    for part, holder in parts.items():
        if holder != index:
            stage.foreign_buffers.update(_hollow(root, part, holder, stage, kept))
    for i, name in enumerate(blocks):
        if i not in owned:
            _hollow(root, name, holder_of[i], stage)
            root.get_submodule(name).__dict__["forward"] = _StandIn(stage, i, name, root.get_submodule(name))
    stage.incomplete = _incomplete(root, stage.hollow)
    for name, module in stage.incomplete.items():
        module.__dict__["named_parameters"] = partial(_whole_only, stage, name, module.named_parameters)
    return stage


def _attribute(root: nn.Module, name: str) -> Any:
    parent, _, key = name.rpartition(".")
    return getattr(root.get_submodule(parent), key)


def _incomplete(root: nn.Module, hollow: Iterable[str]) -> dict[str, nn.Module]:
    names = {""} if hollow else set()
    for name in hollow:
        parts = name.split(".")[:-1]
        names.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return {name: root.get_submodule(name) for name in sorted(names)}


def _hollow(root: nn.Module, name: str, holder: int, stage: Stage, kept: Collection[str] = ()) -> list[str]:
    """Take a foreign part's parameters out of the model, leaving hollow tensors in their places.

    Returns:
        The names of its persistent buffers: they stay, and are no state of this stage.
    """
    parent, _, key = name.rpartition(".")
    owner = root.get_submodule(parent)
    if key in owner._parameters:
        if name not in kept:
            _hollow_parameter(owner, key, name, holder, stage)
        return []
    buffers = []
    for inner, module in owner.get_submodule(key).named_modules():
        path = f"{name}.{inner}" if inner else name
        stage._elsewhere.add(module)
        for parameter in [k for k, p in module._parameters.items() if p is not None and f"{path}.{k}" not in kept]:
            _hollow_parameter(module, parameter, f"{path}.{parameter}", holder, stage)
        for buffer in [k for k, b in module._buffers.items() if b is not None]:
            if buffer not in module._non_persistent_buffers_set:
                module._non_persistent_buffers_set.add(buffer)
                buffers.append(f"{path}.{buffer}")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            module.register_state_dict_post_hook(_without_extra_state)
    return buffers


def _without_extra_state(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state.pop(f"{prefix}_extra_state", None)


def _hollow_parameter(module: nn.Module, key: str, name: str, holder: int, stage: Stage) -> None:
    parameter = module._parameters.pop(key)
    assert parameter is not None
    hollow = Hollow.of(parameter, stage.device, name, holder, stage.on_missing)
    # Into __dict__: nn.Module.__setattr__ would take a tensor for an attempt to replace the parameter.
    module.__dict__[key] = stage.hollow[name] = hollow


def _whole_only(stage: Stage, name: str, whole: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """A module's ``named_parameters``: within a step its first, then it raises, since this stage hasn't all of them."""
    if not stage._in_step:
        yield from whole(*args, **kwargs)
        return
    yield from islice(whole(*args, **kwargs), 1)
    raise StepError(
        f"The step goes over all parameters of {name or 'the LightningModule'}, and with several pipeline stages no"
        " process has all: use the optimizer's weight_decay for a penalty, or pipeline_parallel_size=1."
    )


def _check_differentiates(passage: Passage) -> None:
    if torch.is_grad_enabled() != passage.differentiates:
        raise StepError(
            "The blocks run with gradients switched off within a step that needs them, so no gradient would cross the"
            " stages: with activation checkpointing, use use_reentrant=False."
        )
