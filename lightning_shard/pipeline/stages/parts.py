"""Parts around the blocks, such as a vision tower: skipped on stages that don't hold them, followed in traced steps.

What a part computes from hollow parameters is unknown in any case, so only the shapes of its output matter. The part
runs once for arguments of a kind; later calls return unknown values of the same shapes without running it.

A part with side effects runs in every call: if it draws random numbers (code after it must draw the same ones as on
other stages), sets attributes, writes to its arguments, or has hooks on submodules. So does one inside an activation
checkpoint, whose backward calls it again: the recomputation needs its parameters, not its output. And one whose
parameters cross, as where a block calls it.

Where operations are counted, a call of a part counts as one operation, and what it returns may cross.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.layout import TENSOR_AXIS
from lightning_shard.pipeline.dataflow.backward_hooks import refuse_hooks
from lightning_shard.pipeline.dataflow.crossing import Passage
from lightning_shard.pipeline.dataflow.kept import Attributes, leaves
from lightning_shard.pipeline.dataflow.messages import Kept, Slot
from lightning_shard.pipeline.dataflow.side_effects import Before
from lightning_shard.pipeline.dataflow.taint import Hollow, Unknown, refuse
from lightning_shard.torch_private import saves_by_hooks

if TYPE_CHECKING:
    from lightning_shard.pipeline.stages.stage import Stage

_SMALL = 1024
"""The most elements of an integer argument whose values are compared: they may decide shapes, as image sizes do."""


@dataclass(eq=False)
class ForeignPart:
    """Replaces the forward of a part that another stage holds.

    Attributes:
        forward: The part's own forward.
        returned: Its output, as slots, by kind of arguments and of its own attributes; ``None`` if it must run.
    """

    stage: Stage
    name: str
    part: nn.Module
    forward: Callable[..., Any]
    returned: dict[Hashable, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.stage.passage
        kind = self._kind((args, kwargs)) if passage.active else None
        runs = passage.in_block or self._has_parameters(passage)
        if kind is None or runs or self._has_hooks_inside() or saves_by_hooks():
            return self.forward(*args, **kwargs)
        if kind not in self.returned:
            return self._run(kind, args, kwargs)
        if self.returned[kind] is None:
            return self.forward(*args, **kwargs)
        return tree.map_leaves(_once_each(self._unknown), self.returned[kind])

    def _unknown(self, slot: Slot) -> Tensor:
        text = f"what is computed from {self.name}, which an earlier stage holds,"
        return self.stage.passage.unknown(slot, text, self.stage.device)

    def _run(self, kind: Hashable, args: Any, kwargs: Any) -> Any:
        before, drawn = Before(self.part, (args, kwargs), deeply=True), _generators()
        output = self.forward(*args, **kwargs)
        given = {id(leaf) for _, leaf in tree.walk((args, kwargs))}
        is_new = all(isinstance(leaf, Unknown) and id(leaf) not in given for _, leaf in tree.walk(output))
        returns_only = is_new and drawn == _generators() and not _changes(before, self.name)
        self.returned[kind] = tree.map_leaves(_once_each(Slot.of), output) if returns_only else None
        return output

    def _has_parameters(self, passage: Passage) -> bool:
        """Whether parameters of it were received."""
        return any(key[0] == "parameter" and key[1].startswith(f"{self.name}.") for key in passage.received)

    def _has_hooks_inside(self) -> bool:
        inside = (module for module in self.part.modules() if module is not self.part)
        return any(module._forward_hooks or module._forward_pre_hooks for module in inside)

    def _kind(self, arguments: Any) -> Hashable | None:
        """A key of what its output's shapes depend on; ``None`` if that can't be determined."""
        device = self.stage.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        kinds: list[Hashable] = [torch.is_grad_enabled(), autocast]
        kinds += [
            (path, key, value)
            for path, module in self.part.named_modules()
            for key, value in vars(module).items()
            if type(value) in (bool, int, float, str)  # such as ``training``, or a rate that a schedule changes
        ]
        for path, leaf in tree.walk(arguments):
            if isinstance(leaf, Tensor):
                values: Any = None
                if not leaf.is_floating_point() and not leaf.is_complex() and not isinstance(leaf, Unknown):
                    if leaf.numel() > _SMALL:
                        return None
                    values = tuple(leaf.flatten().tolist())
                kinds.append((path, tuple(leaf.shape), leaf.dtype, leaf.requires_grad, values))
            elif isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device, type(None))):
                kinds.append((path, leaf))
            else:
                return None
        return tuple(kinds)


def _once_each(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, with one result for one object: a tensor that is returned twice is one on all stages."""
    results: dict[int, Any] = {}

    def of(leaf: Any) -> Any:
        if id(leaf) not in results:
            results[id(leaf)] = function(leaf)
        return results[id(leaf)]

    return of


def is_foreign(part: nn.Module, stage: Stage, name: str) -> bool:
    """Whether a part has submodules and parameters, and the stage holds none of these parameters."""
    hollow = {fqn for fqn in stage.hollow if fqn.startswith(f"{name}.")}
    here = {fqn for fqn, _ in part.named_parameters(prefix=name)}
    return bool(hollow) and here <= hollow and any(True for _ in part.children())


def _changes(before: Before, name: str) -> bool:
    try:
        written = before.changed(name, None) or before.changed_objects(name, None)[0]
        return bool(written or before.attributes.changed() or before.changes_elsewhere())
    except StepError:  # it changes what can't be sent: it must do so on each stage
        return True


def _generators() -> tuple[bytes, ...]:
    """The states of torch's, Python's and numpy's global generators."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return (*(state.numpy().tobytes() for state in states), repr((random.getstate(), np.random.get_state())).encode())


class PartCalls:
    """The calls of the parts in a microbatch's step on one stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._before: list[Attributes] = []  # in a search: of parts that are being called

    def join(self, root: nn.Module) -> None:
        """Register the hooks, after ``root`` was sharded."""
        stage = self._stage
        for name in stage.parts:
            part = part_of(root, name)
            if isinstance(part, nn.Module):
                hollow = [tensor for fqn, tensor in stage.hollow.items() if fqn.startswith(f"{name}.")]
                is_own = any(fqn.startswith(f"{name}.") for fqn in stage.alone)
                enter = partial(self._enter, name, hollow, is_own)
                part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                if _is_on_tensor_axis(part):
                    part.register_forward_pre_hook(partial(self._enter_split, name), prepend=True, with_kwargs=True)
                part.register_forward_hook(partial(self._leave, name))

    def clear(self) -> None:
        """The step has ended, maybe within a part."""
        self._before.clear()

    def _enter_split(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        stage = self._stage
        if stage.trace is not None and stage.is_shown and stage.in_step:
            refuse((args, kwargs), name)  # what DTensor computes of unknown values isn't marked

    def _enter(
        self, name: str, hollow: Sequence[Hollow], is_own: bool, part: nn.Module, args: Any, kwargs: Any
    ) -> None:
        stage = self._stage
        if stage.trace is not None and stage.is_shown and stage.in_step:
            if stage.passage.searching:
                self._before.append(Attributes(part.named_modules()))
            stage.trace.begins((args, kwargs, hollow), name, is_own=is_own)

    def _leave(self, name: str, part: nn.Module, _args: Any, output: Any) -> Any:
        stage = self._stage
        if stage.trace is None or not stage.is_shown or not stage.in_step:
            return output
        changed = self._before.pop().changed() if stage.passage.searching else None
        if changed and stage.network.parts[name] < stage.index and self._has_come_to_own_code():
            self._refuse_lost_state(name, part, changed)
        result = stage.trace.ends(name, output)
        if result is not output:
            refuse_hooks(name, part)  # the output was received from another stage
        return result

    def _has_come_to_own_code(self) -> bool:
        """Whether no earlier stage runs the code that runs now: these leave the step where this one's blocks begin."""
        last = self._stage.passage.last_block
        return last is not None and last >= self._stage.owned.start

    def _refuse_lost_state(self, name: str, part: nn.Module, changed: Sequence[Kept]) -> None:
        """Refuse that a part changes buffers here, of which another stage's are saved and are as they were."""
        stage = self._stage
        of_others = stage.saved_elsewhere
        for each in changed:
            module = part.get_submodule(each.module)
            is_saved = each.name in module._buffers and (
                each.name not in module._non_persistent_buffers_set or each.name in of_others.get(module, ())
            )
            if is_saved and not any(isinstance(leaf, Unknown) for leaf in leaves(each.value)):
                path = ".".join(filter(None, (name, each.module, each.name)))
                raise StepError(
                    f"{stage.method} changes the buffer {path} on pipeline stage {stage.index}, and another stage,"
                    f" which doesn't see it, holds and saves {name}: by the network's code it seemed to run before"
                    " other blocks than it does. Give the LightningModule an example_input_array, by which the order is"
                    f" seen, name {name} among pipeline_blocks where it runs, or use pipeline_parallel_size=1.",
                    breaks=6,
                )


def part_of(root: nn.Module, name: str) -> Any:
    """The module or parameter of this name."""
    parent, _, key = name.rpartition(".")
    return getattr(root.get_submodule(parent), key)


def _is_on_tensor_axis(part: nn.Module) -> bool:
    names = (each.device_mesh.mesh_dim_names for each in part.parameters() if isinstance(each, DTensor))
    return any(TENSOR_AXIS in (axes or ()) for axes in names)
