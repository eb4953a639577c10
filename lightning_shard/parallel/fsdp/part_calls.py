"""All-gather a unit for calls of its parts; FSDP2 does it for calls of whole units only.

Between steps, as of ``self.net(x)`` in ``on_train_epoch_end``: the root unit (everything outside of blocks) is
unsharded only while a step runs. A part that is called outside of a step unshards it for its own call, and once more
for a backward through it. With several data ranks this is collective, so all of them must make the call. With manual
optimization the units are the networks below the root, each unsharded during its own calls; a call of a network's part,
such as ``self.vae.encoder(x)``, does likewise.

In a step, as of ``self.blocks[0].norm.embed(t)``: hooks on all parts of blocks would cost time in each call, so the
first step of each kind finds those that are called by themselves, and only these keep hooks.

Nothing stays unsharded, after a call of the whole either: later steps would take it for the present weights, whatever
has changed the shards meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard.errors import StepError
from lightning_shard.parallel.compiled_blocks import is_compiled
from lightning_shard.parallel.containers import called_below, has_forward
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.fsdp.units import (
    call_fsdp,
    class_name,
    gather_for_backward,
    groups_of,
    is_set_up,
    is_unit,
    set_up,
    sharded_units,
    state_of,
)
from lightning_shard.parallel.fsdp.unsharded import COPIED, unsharded_of
from lightning_shard.parallel.fsdp.watched_parameters import check_before_gather

_is_sharded = attrgetter("is_sharded")
_FOUND: WeakSet[nn.Module] = WeakSet()
"""Parts of units that steps call by themselves: they have hooks."""


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
        elif _has_parameters(part) and not is_unit(part):  # a unit all-gathers itself
            part.register_forward_pre_hook(calls.refuse, prepend=True)


def _called(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if has_forward(child):
            yield child
        if child not in blocks:
            yield from _called(child, blocks)


def _has_parameters(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _is_step(args: Any) -> bool:
    """Whether a call of the root runs a step, which is its one argument (plugin/steps/redirect.py)."""
    return len(args) == 1 and callable(args[0]) and not isinstance(args[0], Tensor)


class _Uncopied:
    """A hook of a module without parameters, such as a metric, that may be copied: the copy has the same one."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __deepcopy__(self, _: Any) -> _Uncopied:
        return self


class _Calls:
    """Counts nested calls of parts outside of a call of ``root``: the outermost call unshards and reshards."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._depth = 0
        self._in_step = False

    def gather_for(self, part: nn.Module) -> None:
        holds = _has_parameters(part)
        part.register_forward_pre_hook(self.enter if holds else _Uncopied(self.enter), prepend=True)
        part.register_forward_hook(self.leave if holds else _Uncopied(self.leave), always_call=True)

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
                " stages only the ranks of one stage hold its parameters: call it in training_step, validation_step,"
                " test_step or predict_step, load a checkpoint into a new module on one process"
                " (load_from_checkpoint), or use pipeline_parallel_size=1.",
                breaks=10,
            )

    def leave(self, part: nn.Module, args: Any, output: Any) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._free(args, output)

    def _is_gathered(self) -> bool:
        """Whether the root unit is unsharded, or has nothing to all-gather."""
        state = state_of(self._root)
        if state is None:
            if (whole := unsharded_of(self._root)) is None:
                raise StepError(COPIED.format(kind=class_name(self._root)), breaks=9)
            return whole.is_gathered
        if state._is_root is None:  # a part may be called before the first step, such as in configure_optimizers
            set_up(self._root)
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


@contextmanager
def finding_calls_of_parts(root: nn.Module) -> Iterator[None]:
    """Context of a step: parts of units below ``root`` that are called by themselves will always gather their unit."""
    outermost: dict[nn.Module, nn.Module] = {}
    with ExitStack() as hooks:
        for unit in sharded_units(root):
            for module in unit.modules():
                outermost.setdefault(module, unit)
            if unit is not root:
                for part in _parts(unit):
                    found = partial(_gather_from_now_on, unit, outermost[part])
                    hooks.callback(part.register_forward_pre_hook(found, prepend=True).remove)
        yield


def _parts(unit: Any) -> Iterator[nn.Module]:
    """The modules in a unit that have parameters of it; not those of units in it, nor what is compiled."""
    for child in () if is_compiled(unit) else unit.children():
        if not is_unit(child) and any(True for _ in child.parameters()):
            yield child
            yield from _parts(child)


def _gather_from_now_on(unit: nn.Module, outermost: Any, part: nn.Module, args: Any) -> None:
    if part in _FOUND:
        return
    set_up(outermost)
    if any(map(_is_sharded, groups_of(unit))):
        _FOUND.add(part)
        calls = _Calls(unit)
        calls.gather_for(part)
        calls.enter()  # of this call, for which the new hook is too late
