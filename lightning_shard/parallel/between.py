"""Parts of a model that are called by themselves between steps, as ``self.net(x)`` in ``on_train_epoch_end``.

What isn't in a block is gathered for as long as a step runs. A part that is called outside of one has it gathered for
its own call: on data ranks that is a collective call, so all of them must make it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard.errors import StepError
from lightning_shard.parallel.units import groups_of, is_set_up, look_before_gathering
from lightning_shard.parallel.whole import COPIED, whole_of


def gather_for_calls(root: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Have calls of what is below ``root`` gather what ``root``'s own call would; of ``blocks`` as wholes only."""
    if whole_of(root) is None and not isinstance(root, FSDPModule):
        return
    calls = _Calls(root)
    for part in set(_called(root, blocks)):
        part.register_forward_pre_hook(calls.enter, prepend=True)
        part.register_forward_hook(calls.leave, always_call=True)


def refuse_calls(root: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Have calls between steps of what is below a stage's ``root`` fail by name: other stages hold the rest."""
    calls = _Calls(root)
    for part in set(_called(root, blocks)):
        if not isinstance(part, FSDPModule):  # which gathers itself
            part.register_forward_pre_hook(calls.refuse, prepend=True)


def _called(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).forward is not nn.Module.forward:
            yield child
        if child not in blocks:
            yield from _called(child, blocks)


class _Calls:
    """The calls of parts that are under way outside of a call of ``root``."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._depth = 0

    def enter(self, *_: Any) -> None:
        if self._depth or not self._is_gathered():
            self._depth += 1
            if self._depth == 1:
                self._gather()

    def refuse(self, part: nn.Module, _: Any) -> None:
        whole = whole_of(self._root)  # asked of each part in each step
        is_gathered = self._is_gathered() if whole is None else whole.is_gathered
        if not is_gathered and any(isinstance(parameter, DTensor) for parameter in part.parameters()):
            raise StepError(
                f"A part of the network, a {type(part).__name__}, was called outside a step. With several pipeline"
                " stages only some ranks hold it, and a part of it each: call it in training_step, validation_step,"
                " test_step or predict_step, load a checkpoint into a new module on one process"
                " (load_from_checkpoint), or use pipeline_parallel_size=1."
            )

    def leave(self, *_: Any) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._free()

    def _is_gathered(self) -> bool:
        """Or has nothing to gather, or can't yet."""
        if (whole := whole_of(self._root)) is not None:
            return whole.is_gathered
        if not isinstance(self._root, FSDPModule):
            raise StepError(COPIED.format(kind=type(self._root).__name__))
        return not is_set_up(self._root) or not any(group.is_sharded for group in groups_of(self._root))

    def _gather(self) -> None:
        if (whole := whole_of(self._root)) is not None:
            whole.gather(self._root)
        elif isinstance(self._root, FSDPModule):
            look_before_gathering(self._root)
            self._root.unshard()

    def _free(self) -> None:
        if (whole := whole_of(self._root)) is not None:
            whole.free()
        elif isinstance(self._root, FSDPModule) and not torch.is_grad_enabled():  # else a backward may need them
            self._root.reshard()
