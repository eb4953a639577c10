"""All-gather a unit for calls of its parts between steps, and in evaluation steps for calls that data ranks differ in.

**Parts** (``self.net(x)`` in ``on_train_epoch_end``). The root unit, everything outside of blocks, is unsharded only
while a step runs. A part that is called outside of a step unshards it for its own call, and once more for a backward
through it; with several data ranks this is collective. With manual optimization the units are the networks below the
root, each unsharded during its own calls; a call of a network's part, such as ``self.vae.encoder(x)``, does likewise.
Nothing stays unsharded: later steps would take it for the present weights, whatever has changed the shards meanwhile.

**Lockstep** (generated text, skipped blocks). Each call of a sharded unit all-gathers its parameters from all data
ranks, so a rank that calls one more than the others would wait for them forever. Therefore all ranks make the same
all-gathers in the same order, in each evaluation step:

1. Those of the *expected* units: the ones that an earlier step gathered, each once, in its order. A rank that skips one
   takes part in its all-gather all the same. No message is needed.
2. All others are announced by a small all-reduce before each. Of the units that ranks call next, the first in the
   model's order is gathered; ranks that call another one, or whose step is over, take part, and announce theirs again.

A step that calls each unit once costs one small all-reduce, at its end; the first step, and one after the calls have
changed, costs one for each call more. With expert parallelism every call is announced: calls send tokens to other
ranks' experts, in which a rank that makes no such call can't take part, so unequal calls are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard.errors import StepError
from lightning_shard.parallel.containers import called_below, has_forward
from lightning_shard.parallel.fsdp.shard import is_gathered, join_all_gather, reshard
from lightning_shard.parallel.fsdp.units import (
    call_fsdp,
    class_name,
    gather_for_backward,
    groups_of,
    is_set_up,
    is_unit,
    set_up,
    state_of,
)
from lightning_shard.parallel.fsdp.unsharded import COPIED, unsharded_of
from lightning_shard.parallel.fsdp.watched_parameters import check_before_gather

_is_sharded = attrgetter("is_sharded")


def gather_for_calls(root: nn.Module, blocks: Collection[nn.Module], *, whole_steps: bool) -> None:
    """Make calls of modules below a unit, but not inside of ``blocks``, unshard what a call of the unit would.

    The unit is ``root`` with ``whole_steps``; otherwise each unit below it, but for the blocks.
    """
    for unit in [root] if whole_steps else called_below(root):
        if (unit in blocks and not whole_steps) or (unsharded_of(unit) is None and not is_unit(unit)):
            continue
        calls = _Calls(unit)
        for part in set(_called(unit, blocks)):
            calls.gather_for(part)
        if whole_steps:
            unit.register_forward_pre_hook(calls.enter_whole, prepend=True)
            unit.register_forward_hook(calls.leave_whole, always_call=True)


def refuse_calls(root: nn.Module, blocks: Collection[nn.Module], whole: Collection[nn.Module] = ()) -> None:
    """Make calls between steps of modules below a pipeline stage's ``root`` fail: other stages hold the rest.

    Args:
        whole: Modules that every stage holds, such as a frozen network beside the one that trains. Their calls gather.
    """
    calls = _Calls(root)
    for part in set(_called(root, blocks)):
        if part in whole:
            calls.gather_for(part)
        elif not is_unit(part):  # a unit all-gathers itself
            part.register_forward_pre_hook(calls.refuse, prepend=True)


def _called(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The modules below one, down to blocks, that are called and hold parameters: others, as metrics, may be copied."""
    for child in module.children():
        if has_forward(child) and next(child.parameters(), None) is not None:
            yield child
        if child not in blocks:
            yield from _called(child, blocks)


def _is_step(args: Any) -> bool:
    """Whether a call of the root runs a step, which is its one argument (plugin/steps/redirect.py)."""
    return len(args) == 1 and callable(args[0]) and not isinstance(args[0], Tensor)


class _Calls:
    """Counts nested calls of parts outside of a call of ``root``: the outermost call unshards and reshards."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._depth = 0
        self._in_step = False

    def gather_for(self, part: nn.Module) -> None:
        part.register_forward_pre_hook(self.enter, prepend=True)
        part.register_forward_hook(self.leave, always_call=True)

    def enter(self, *_: Any) -> None:
        if self._depth or not self._is_gathered():
            self._depth += 1
            if self._depth == 1:
                self._gather()

    def enter_whole(self, root: nn.Module, args: Any) -> None:
        self._in_step = self._in_step or _is_step(args)

    def leave_whole(self, root: nn.Module, args: Any, output: Any) -> None:
        if _is_step(args):
            self._in_step = False
        elif not self._in_step:
            reshard(root)

    def refuse(self, part: nn.Module, _: Any) -> None:
        whole = unsharded_of(self._root)  # asked of each part in each step
        if whole is None and is_unit(self._root) and not is_set_up(self._root):
            return
        is_gathered = self._is_gathered() if whole is None else whole.is_gathered
        if not is_gathered and any(isinstance(parameter, DTensor) for parameter in part.parameters()):
            raise StepError(
                f"A part of the network, a {type(part).__name__}, was called outside a step. With several pipeline"
                " stages only the ranks of one stage hold its parameters: call it in a step, or load a checkpoint into"
                " a new module on one process (load_from_checkpoint).",
                breaks=10,
            )

    def leave(self, part: nn.Module, args: Any, output: Any) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._free(args, output)

    def _is_gathered(self) -> bool:
        """Whether the root unit is unsharded, or has nothing to all-gather."""
        if state_of(self._root) is None:
            if (whole := unsharded_of(self._root)) is None:
                raise StepError(COPIED.format(kind=class_name(self._root)), breaks=9)
            return whole.is_gathered
        set_up(self._root)  # a part may be called before the first step, such as in configure_optimizers
        return not any(map(_is_sharded, groups_of(self._root)))

    def _gather(self) -> None:
        if (whole := unsharded_of(self._root)) is not None:
            whole.gather(self._root)
        elif is_unit(self._root):
            check_before_gather(self._root)
            call_fsdp(self._root, FSDPModule.unshard)

    def _free(self, args: Any, output: Any) -> None:
        if (whole := unsharded_of(self._root)) is not None:
            whole.free()
        elif is_unit(self._root):
            gather_for_backward(self._root, args, output)
            call_fsdp(self._root, FSDPModule.reshard)


class Lockstep:
    """Makes all ranks take part in each all-gather of an evaluation step.

    Args:
        units: All units, in the same order on all ranks.
        group: A CPU group of all ranks.
        deals_experts: Whether there is expert parallelism.
    """

    def __init__(self, units: Sequence[nn.Module], group: dist.ProcessGroup, *, deals_experts: bool = False) -> None:
        self._units = units
        self._over = len(units)  # announced in place of a unit's index
        self._group = group
        self._deals_experts = deals_experts
        self._expected: list[int] | None = None  # equal on all ranks; None: to be found by the next step
        self._still_expected: list[int] = []
        self._called: set[int] = set()
        self._announced: list[int] = []  # equal on all ranks
        self._in_step = self._announces = False
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._before_call, index), prepend=True)  # type: ignore[attr-defined]

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of an evaluation step. Collective over all ranks.

        Raises:
            StepError: On all ranks: with expert parallelism, they call different units.
        """
        expected, self._expected = self._expected, None
        self._announces = expected is None
        self._still_expected = list(expected or ())
        self._called.clear()
        self._announced.clear()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        self._gather_expected()
        all_skip_some = self._announce(self._over, skips=not self._called.issuperset(expected or ()))
        if not self._deals_experts:
            if expected is None:
                self._expected = list(dict.fromkeys(self._announced))
            elif not all_skip_some and set(self._announced).issubset(expected):
                self._expected = expected

    def _before_call(self, index: int, *_: Any) -> None:
        if not self._in_step:
            return
        self._called.add(index)
        if is_gathered(self._units[index]) and not self._deals_experts:
            return  # on the other ranks too, since all of them have made the same all-gathers
        if not self._announces:
            if index in self._still_expected:
                self._gather_expected(before=index)
                return
            self._gather_expected()
            self._announces = True
        self._announce(index)

    def _gather_expected(self, before: int | None = None) -> None:
        """Take part in the all-gathers of expected units that this rank doesn't call."""
        while self._still_expected:
            index = self._still_expected.pop(0)
            if index == before:
                return
            join_all_gather(self._units[index])

    def _announce(self, index: int, *, skips: bool = False) -> bool:
        """Return when all ranks are about to gather this unit, or to end the step; gathers earlier ones along.

        Returns:
            Whether all ranks have passed ``skips``.

        Raises:
            StepError: On all ranks: with expert parallelism, they call different units.
        """
        while True:
            announced = torch.tensor([index, -index, skips])
            dist.all_reduce(announced, op=dist.ReduceOp.MIN, group=self._group)
            first, last, all_skip = int(announced[0]), -int(announced[1]), bool(announced[2])
            if first != last and self._deals_experts:
                raise StepError(
                    "Data ranks call different parts of the network, or call it different numbers of times, in an"
                    " evaluation step, and its experts are dealt to all of them: make equal calls on all (generate as"
                    " many tokens), or use expert_parallel_size=1."
                )
            if first != self._over:
                self._announced.append(first)
            if first == index:
                return all_skip
            join_all_gather(self._units[first])
