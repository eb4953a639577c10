"""Forward hooks on the parts around one stage's blocks, which follow their calls where operations are counted.

A call of a part counts as one operation, and what it returns and keeps may cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard.errors import StepError
from lightning_shard.layout import TENSOR_AXIS
from lightning_shard.pipeline.dataflow.backward_hooks import refuse_hooks, refuse_pre_hooks
from lightning_shard.pipeline.dataflow.kept import Attributes, leaves
from lightning_shard.pipeline.dataflow.messages import Kept
from lightning_shard.pipeline.dataflow.taint import Hollow, Unknown, refuse

if TYPE_CHECKING:
    from lightning_shard.pipeline.stages.stage import Stage


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
                self._before.append(Attributes.of(part.named_modules()))
            stage.trace.begins((args, kwargs, hollow), name, is_own=is_own)

    def _leave(self, name: str, part: nn.Module, _args: Any, output: Any) -> Any:
        stage = self._stage
        if stage.trace is None or not stage.is_shown or not stage.in_step:
            return output
        changed = self._before.pop().changed() if stage.passage.searching else None
        if changed and name in stage.earlier_parts and self._has_come_to_own_code():
            self._refuse_lost_state(name, part, changed)
        kept = None if changed is None else [(each.module, each.name) for each in changed]
        result = stage.trace.ends(name, output, part=part, kept=kept)
        if result is not output:
            refuse_hooks(name, part)  # the output was received from another stage
            refuse_pre_hooks(name, part)
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
