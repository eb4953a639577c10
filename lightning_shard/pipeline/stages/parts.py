"""Parts around the blocks whose parameters another stage holds, such as a vision tower: they run there only.

What a part computes from hollow parameters is unknown, whatever it does: of its forward only the shapes count. It runs
for the first arguments of a kind, and later calls are given values of those shapes without running it. A part that does
more than return something runs each time: one that draws random numbers, which code after it would draw otherwise, sets
attributes, writes to its arguments, or has hooks inside. So does one within an activation checkpoint, whose backward
calls it again: there its parameters are needed, and not what it returned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.checkpoint_calls import checkpoints
from lightning_shard.pipeline.dataflow.crossing import Slot
from lightning_shard.pipeline.dataflow.side_effects import Before
from lightning_shard.pipeline.dataflow.taint import Unknown
from lightning_shard.pipeline.stages.stage import Stage

_SMALL = 1024
"""Elements of an integer argument whose values may decide on shapes, as the sizes of images do."""


@dataclass(eq=False)
class ForeignPart:
    """The forward of a part that another stage holds.

    Attributes:
        forward: Its own.
        returned: What it returned, as slots, by kind of arguments; ``None`` where it must run.
    """

    stage: Stage
    name: str
    part: nn.Module
    forward: Callable[..., Any]
    returned: dict[Hashable, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.stage.passage
        kind = self._kind((args, kwargs)) if passage.active else None
        if kind is None or self._has_hooks_inside() or any(True for _ in checkpoints()):
            return self.forward(*args, **kwargs)
        if kind not in self.returned:
            return self._run(kind, args, kwargs)
        if self.returned[kind] is None:
            return self.forward(*args, **kwargs)
        return tree.map_leaves(self._unknown, self.returned[kind])

    def _unknown(self, slot: Slot) -> Tensor:
        text = f"what is computed from {self.name}, which an earlier stage holds,"
        return self.stage.passage.unknown(slot, ("part", self.name), text, self.stage.device)

    def _run(self, kind: Hashable, args: Any, kwargs: Any) -> Any:
        before, drawn = Before.of(self.part, (args, kwargs)), _generators()
        output = self.forward(*args, **kwargs)
        given = {id(leaf) for _, leaf in tree.walk((args, kwargs))}
        is_new = all(
            isinstance(leaf, Unknown) and not leaf.requires_grad and id(leaf) not in given
            for _, leaf in tree.walk(output)
        )
        returns_only = is_new and drawn == _generators() and not _changes(before, self.name, output)
        self.returned[kind] = tree.map_leaves(Slot.of, output) if returns_only else None
        return output

    def _has_hooks_inside(self) -> bool:
        inside = (module for module in self.part.modules() if module is not self.part)
        return any(module._forward_hooks or module._forward_pre_hooks for module in inside)

    def _kind(self, arguments: Any) -> Hashable | None:
        """What the shapes of its output depend on; ``None`` where that isn't known."""
        kinds: list[Hashable] = [self.part.training, torch.is_grad_enabled(), torch.is_autocast_enabled()]
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


def runs_elsewhere(part: nn.Module, stage: Stage, name: str) -> bool:
    """Whether a part has modules inside, with parameters, and none of these is the stage's."""
    hollow = {fqn for fqn in stage.hollow if fqn.startswith(f"{name}.")}
    here = {fqn for fqn, _ in part.named_parameters(prefix=name)}
    return bool(hollow) and here <= hollow and any(True for _ in part.children())


def _changes(before: Before, name: str, output: Any) -> bool:
    try:
        return bool(before.changed(name, output) or before.kept())
    except StepError:  # a list or dict: what it does there it does on each stage
        return True


def _generators() -> tuple[bytes, ...]:
    """Where all generators stand."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return (*(state.numpy().tobytes() for state in states), repr((random.getstate(), np.random.get_state())).encode())
