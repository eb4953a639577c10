"""Replaces the forward of a block that another stage holds, for the user's code around it.

The stand-in of a later block ends the stage's part of the step. The stand-in of an earlier block reproduces its call:
it returns the block's output, and repeats its side effects. Values that weren't sent are unknown (``taint.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow import kept
from lightning_shard.pipeline.dataflow.crossing import StageEnd, called_now, out_of_order, switched_off
from lightning_shard.pipeline.dataflow.messages import BlockCall, End, Held, Kept, KeptNumber, Key, Slot
from lightning_shard.pipeline.dataflow.objects import at, rebuilt, set_entry
from lightning_shard.pipeline.dataflow.taint import Origin, base_of, mark
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.state.walk import entries
from lightning_shard.torch_private import saves_by_hooks
from lightning_shard.user_hooks import forward_hooks

_NOTHING = object()
"""In place of an attribute that isn't there."""


@dataclass(eq=False)
class StandIn:
    """The replacement forward.

    Attributes:
        own: The block's own forward, if this stage runs it too, at other places.
        _set: By place, submodule and name, the attributes that were set: what the block's own stage told, what they
            were set to here, and its leaves.
    """

    stage: Stage
    name: str
    block: nn.Module
    own: Callable[..., Any] | None = None
    _set: dict[tuple[int, str, str], tuple[Any, Any, list[Any]]] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage, running = self.stage.passage, self.stage.running_places
        index = running[-1] if running else None
        if self.own is not None and (not passage.active or index is None or index in self.stage.owned):
            return self.own(*args, **kwargs)
        if not passage.active and self.stage.in_backward:
            raise StepError(
                f"Activation checkpointing recomputes {self.name} together with blocks or other code of another"
                " pipeline stage: checkpoint each block by itself, place the blocks that are checkpointed together"
                " on one stage (placement=[…]), or use pipeline_parallel_size=1.",
                breaks=3,
            )
        if not passage.active and self.stage.in_step:
            raise StepError(
                f"{self.name} was called by a step that calls the network several times, and not by the network: with"
                " several pipeline stages the parts of an encoder–decoder, or the like, can't be called one by one, as"
                " transformers' generate does. Call the whole network in a loop, or use pipeline_parallel_size=1.",
                breaks=2,
            )
        if not passage.active:
            raise StepError(
                "The network was called outside a step; with several pipeline stages no process holds all of it. Call"
                " it in training_step, validation_step, test_step or predict_step, load a checkpoint into a new module"
                " on one process (load_from_checkpoint), or use pipeline_parallel_size=1.",
                breaks=10,
            )
        if index is None:
            raise StepError(
                f"{self.name} runs within another block, or without its __call__, and a pipeline cuts between blocks:"
                " name others by pipeline_blocks, or use pipeline_parallel_size=1.",
                breaks=3,
            )
        if torch.is_grad_enabled() != passage.differentiates:
            raise switched_off(self.name)
        if index >= self.stage.owned.stop:
            passage.until = End(index)
            raise StageEnd
        if self.own is not None and passage.differentiates and saves_by_hooks():
            raise StepError(
                f"{self.name} runs on several stages, and here within a torch.utils.checkpoint, whose recomputation"
                " runs the block itself where a stage has what it returned elsewhere: use activation_checkpointing=True"
                " in its place, place all of its calls on one stage (placement=[…]), or use pipeline_parallel_size=1.",
                breaks=3,
            )
        done = passage.blocks.get(index)
        if done is None:
            if before := [self.stage.blocks[place] for place in self.stage.places_run if place > index]:
                raise StepError(out_of_order(self.stage.method, self.name, before), breaks=3)
            if passage.entered_after is not None:
                raise StepError(passage.entered_after.why or called_now(self.name), breaks=1)
            raise StepError(
                f"Stage {self.stage.index} calls {self.name}, and the stage that holds it didn't: which blocks run may"
                " depend on a batch, not on random numbers. Or use pipeline_parallel_size=1.",
                breaks=1,
            )
        passage.in_hooks = True
        for call, (path, with_gradients, slots) in enumerate(done.inside):
            seen = self._fill_slots(slots, ("inside", index, call), f"what {self.name}.{path} computes")
            with torch.set_grad_enabled(with_gradients and torch.is_grad_enabled()):
                self._run_hooks(path, seen)
        passage.in_hooks = False
        if done.kept:
            self._keep(done, index)
        if done.objects and passage.follows(index):
            self._change_objects(done, index, (args, kwargs))
        arguments = partial(tree.leaves, (args, kwargs))
        for place in done.changed:
            self._reproduce_write(arguments()[place], ("changed", index, place))
        given = self._fill_slots(done.output, ("block", index), f"the output of {self.name}", arguments)
        if done.returned_containers:
            given = _into_arguments(given, done.returned_containers, [*tree.containers((args, kwargs))])
        self.stage.given[index], passage.in_hooks = given, True
        return given

    def _keep(self, done: BlockCall, index: int) -> None:
        """Set the attributes and buffers that submodules of the block set on its own stage, or change containers.

        What isn't received is unknown, as it was set in the search.
        """
        passage = self.stage.passage
        arrives = {key[2:4] for key in passage.received if key[:2] == ("kept", index)}
        for each in done.kept:
            module, name = self.block.get_submodule(each.module), (each.module, each.name)
            held = getattr(module, each.name, _NOTHING)
            if not passage.searching and name not in arrives and self._is_as_set(index, each, held):
                continue
            filled = self._fill_slots(each.value, ("kept", index, *name), f"what {self.name} keeps as {each.name}")
            if not (each.in_place and kept.put_into(held, filled)):
                self.stage.keep(module, each.name, held := filled)
            self._set[index, *name] = (each.value, held, kept.leaves(held))

    def _is_as_set(self, index: int, each: Kept, held: Any) -> bool:
        """Whether an attribute still is what it was last set to, for a microbatch like this one."""
        told, was_set_to, leaves = self._set.get((index, each.module, each.name), (None, _NOTHING, []))
        return held is was_set_to and told == each.value and tree.same_entries(leaves, kept.leaves(held))

    def _change_objects(self, done: BlockCall, index: int, arguments: Any) -> None:
        """Change objects among the arguments as the block did on its own stage.

        Raises:
            StepError: This stage's code passes other objects.
        """
        numbers = count()

        def heard(value: Any, *, in_cache: bool) -> Any:
            if not isinstance(value, Slot):
                return rebuilt(value, partial(heard, in_cache=in_cache), "")
            key: Key = ("object", index, next(numbers))
            return self._fill(value, key, f"what {self.name} sets in an object that it is given", tuple, in_cache)

        for change in done.objects:
            try:
                held = at(arguments, change.path)
                for key, value in change.entries.items():
                    if key in change.written:
                        self._reproduce_write(entries(held)[key], ("object", index, next(numbers)))
                    else:
                        set_entry(held, key, heard(value, in_cache=change.is_cache))
            except (LookupError, TypeError) as error:
                path = ".".join(map(str, change.path[1:]))
                raise StepError(
                    f"On stage {self.stage.index} {self.name} isn't given the object ({path}) that it is given, and"
                    " changes, on its own: what a network passes to its blocks may depend on a batch's shapes only. Or"
                    " use pipeline_parallel_size=1.",
                    breaks=1,
                ) from error

    def _reproduce_write(self, tensor: Tensor, key: Key) -> None:
        """Reproduce that the block wrote to one of its arguments: the received value, or unknown."""
        passage = self.stage.passage
        origin = Origin(f"what {self.name} writes to its arguments, on an earlier stage,", passage.on_missing)
        base = base_of(tensor)
        for written in (tensor,) if base is None else (tensor, base):
            mark(written, origin)
        passage.produced(key, tensor, written=True)

    def _fill_slots(self, values: Any, name: Key, text: str, arguments: Callable[[], Sequence[Any]] = tuple) -> Any:
        """Fill the slots of a nested value: with received values, arguments that the block returned, or unknowns."""
        passage = self.stage.passage
        if passage.ledger is not None:  # code with numbers runs no operations, where code with tensors does
            numbered = enumerate(tree.leaves(values))
            passage.ledger.receive([(*name, n) for n, leaf in numbered if isinstance(leaf, KeptNumber)], text)

        if isinstance(values, Slot):
            return self._fill(values, (*name, 0), text, arguments)
        places = count()
        return tree.map_leaves(lambda leaf: self._fill(leaf, (*name, next(places)), text, arguments), values)

    def _fill(
        self, leaf: Any, key: Key, text: str, arguments: Callable[[], Sequence[Any]], without_memory: bool = False
    ) -> Any:
        passage = self.stage.passage
        if isinstance(leaf, Held):
            return _Absent(leaf.kind, text) if leaf.argument is None else arguments()[leaf.argument]
        if isinstance(leaf, KeptNumber) and key in passage.received:
            return leaf.kind(passage.produced(key, passage.received[key]).item())
        if isinstance(leaf, KeptNumber):
            leaf = leaf.slot
        if not isinstance(leaf, Slot):
            return leaf
        if leaf.argument is not None and isinstance(argument := arguments()[leaf.argument], Tensor):
            return passage.produced(key, argument, written=True)
        if key in passage.received:
            return passage.produced(key, passage.received[key])
        text = f"{text}, on an earlier stage,"
        tensor = passage.unknown(leaf, text, self.stage.device, without_memory=without_memory)
        return passage.produced(key, tensor) if passage.searching else tensor

    def _run_hooks(self, path: str, seen: tuple[Any, Any, Any]) -> None:
        """Call the forward hooks of a submodule, on what the first of them saw on the block's own stage."""
        module = self.block.get_submodule(path)
        args, kwargs, output = seen
        for number, hook in forward_hooks(module).items():
            given = (args, kwargs) if number in module._forward_hooks_with_kwargs else (args,)
            result = hook(module, *given, output)
            output = output if result is None else result


class _Absent:
    """Given to hooks, and kept as an attribute, in place of an object that holds tensors on another stage.

    It may be reset, which changes nothing: on its own stage the same code resets it.

    Raises:
        StepError: Code uses it otherwise.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.__dict__["_what"] = f"a {kind} of {text}, on an earlier stage"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StepError(
            f"The step uses {self.__dict__['_what']}, and such an object isn't sent to other pipeline stages:"
            " collect tensors and numbers themselves, keep them as attributes, or use pipeline_parallel_size=1.",
            breaks=3,
        )

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):  # Python's protocols: copying, inspection
            raise AttributeError(name)
        if name in ("reset", "clear"):
            return _reset
        self._refuse()

    __call__ = __setattr__ = __delattr__ = _refuse
    __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse


def _reset(*_: Any, **__: Any) -> None:
    """What resets an object that isn't there."""


def _into_arguments(
    output: Any, returned_containers: Sequence[tuple[int | None, int]], arguments: Sequence[Any]
) -> Any:
    """An output whose containers are those that the block was given, updated in place to the output's entries."""
    for number, place in returned_containers:
        held, new = arguments[place], output if number is None else output[number]
        kept.put_into(held, new)
        output = held if number is None else (*output[:number], held, *output[number + 1 :])
    return output
