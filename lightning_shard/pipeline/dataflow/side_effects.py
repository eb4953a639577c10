"""Detects side effects of a block's call (arguments written to, attributes set); refuses those that can't be sent.

A block's state before the call is noted, and compared after it. Tensor arguments written to in place, attributes and
buffers that were set or changed (``kept.py``), and what was set in lists, dicts and objects among the arguments, can be
sent to other stages. Changes of globals, and of sets and the like that a block keeps, can't.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from types import BuiltinMethodType, CellType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.namespaces import Namespace
from lightning_shard.pipeline.dataflow.kept import OF_TORCH, Attributes
from lightning_shard.pipeline.dataflow.messages import Change, Held, Slot
from lightning_shard.pipeline.dataflow.objects import Noted, Path, is_object, objects, rebuilt
from lightning_shard.state.walk import LEAVES, below, beside_classes, entries
from lightning_shard.versions import version

_MOST = 1024
"""The most objects in one value, or in the globals of one Python module, whose changes are noticed."""
_MOST_GIVEN = 2**14
"""The same of a call's arguments."""
_IN_OBJECTS = "Blocks may set and add tensors and numbers there; or return what is new."
_CACHES = "transformers.cache_utils"
DEEPEST = 8
"""The longest path in a call's arguments to an object whose changes are noticed."""
_RETURN_IT = "return what it adds, or set an attribute to it anew, which they do."


@dataclass(frozen=True)
class _Outside:
    """Something whose changes other stages don't see: a set, a deque, an object with slots, globals.

    Attributes:
        what: Words for it.
        held: Its entries.
        of_gradients: Whether only what requires gradients may not be added. Other values, such as masks that are
            created once, are made on each stage.
    """

    what: str
    value: Any
    held: dict[Any, Any]
    of_gradients: bool

    def has_changed(self) -> bool:
        return not tree.same_entries([*self.held.values()], [*entries(self.value).values()])

    def check(self, name: str) -> None:
        """
        Raises:
            StepError: The block of this name has changed it.
        """
        now, known = entries(self.value), {*map(id, self.held.values())}
        added = (key for key, each in now.items() if id(each) not in known and _has_gradients(each))
        if (key := next(added, None)) is not None and isinstance(self.value, Namespace):
            raise StepError(
                f"{name} sets {self.value.name}.{key}, which the other pipeline stages don't see: {_RETURN_IT}",
                breaks=3,
            )
        if key is not None or (not self.of_gradients and self.has_changed()):
            raise StepError(
                f"{name} changes {self.what}, which the other pipeline stages don't see: {_RETURN_IT}", breaks=3
            )


class Before:
    """A snapshot of what a block could change, taken before its call.

    Args:
        deeply: Whether to include attributes of submodules, and globals and attributes of classes and functions, which
            takes longer.

    Attributes:
        objects: All mutable objects among the arguments, by path.
        attributes: Those of its submodules.
    """

    def __init__(self, block: nn.Module, arguments: Any, *, deeply: bool = False) -> None:
        self._arguments = [(leaf, version(leaf)) for leaf in tree.leaves(arguments)]
        self._containers = [*tree.containers(arguments)]
        self.objects = {path: Noted(each) for path, each in objects(arguments, deepest=DEEPEST)}
        self.attributes = Attributes(block.named_modules() if deeply else (), looks_into_objects=True)
        self._outside = [*_among(arguments, {id(each.value) for each in self.objects.values()})]
        for path, module in block.named_modules():
            for key, value in vars(module).items():
                is_compared = deeply and not tree.is_node(value)
                if key not in OF_TORCH and (isinstance(value, (set, deque)) or is_compared):
                    self._outside += _all_in(f"its {type(value).__name__} {path}{'.' * bool(path)}{key}", value)
        for each in beside_classes(block) if deeply else ():
            self._outside += _all_in("", each)

    def slot(self, name: str, leaf: Any) -> Any:
        """What stands for a leaf of the output, with the argument's index if it is an argument.

        Raises:
            StepError: It is an object with tensors, a module or a function, and no argument.
        """
        place, before = next(
            ((place, before) for place, (argument, before) in enumerate(self._arguments) if argument is leaf),
            (None, 0),
        )
        if place is not None and is_object(leaf):
            return Held(type(leaf).__name__, place)
        slot = Slot.of(leaf)
        if isinstance(leaf, Tensor) and leaf.requires_grad and version(leaf) == before:
            return slot  # for another microbatch the block may compute it (stochastic depth)
        if isinstance(slot, Held) and place is None:
            raise StepError(_unsendable(name, leaf), breaks=3)
        return replace(slot, argument=place) if isinstance(slot, (Slot, Held)) else slot

    def returned_containers(self, output: Any) -> tuple[tuple[int | None, int], ...]:
        """The argument containers that a block returns: index in a returned tuple (else ``None``), and theirs."""
        places = {id(each): place for place, each in enumerate(self._containers)}
        if id(output) in places:
            return ((None, places[id(output)]),)
        returned = output if type(output) is tuple else ()
        return tuple((number, places[id(each)]) for number, each in enumerate(returned) if id(each) in places)

    def changed(self, name: str, output: Any) -> list[tuple[int, Tensor]]:
        """The tensors among the arguments that were written to in place, with their indices.

        Args:
            name: The block's name.
            output: What it returned. A container among the arguments may be changed if it is also returned.

        Raises:
            StepError: The block changed an argument whose changes aren't followed; or it added values that require
                gradients to a set, a deque or an object of its own or to a global. Other values in globals, such as
                masks that are created once, are allowed.
        """
        returned = {id(each) for each in tree.containers(output)}
        for holder in self._outside:
            if id(holder.value) not in returned:
                holder.check(name)
        places = enumerate(self._arguments)
        return [(p, leaf) for p, (leaf, before) in places if isinstance(leaf, Tensor) and version(leaf) != before]

    def changed_objects(self, name: str, output: Any) -> tuple[tuple[Change, ...], list[Tensor]]:
        """The changes of objects among the arguments, and the tensors that their slots stand for, in order.

        Without containers that the block returned: its output has their entries.

        Raises:
            StepError: The block took an entry out of an object, or left a module, a function, or one object twice
                there.
        """
        changes: list[Change] = []
        tensors: list[Tensor] = []
        placed = {id(each.value) for each in self.objects.values()}

        def told(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
                return Slot.of(value)
            if is_object(value):
                if id(value) in placed:  # other stages would have two of it
                    raise StepError(
                        f"{name} puts one {type(value).__name__} into two places of what it is given, which the other"
                        f" pipeline stages can't. {_IN_OBJECTS}",
                        breaks=3,
                    )
                placed.add(id(value))
            return rebuilt(value, told, _IN_OBJECTS)

        returned = {id(each) for each in tree.containers(output)}
        inside = {path for path, noted in self.objects.items() if id(noted.value) in returned}
        for path, noted in self.objects.items():
            if any(path[:length] in inside for length in range(len(path) + 1)):
                continue
            if noted.held.keys() - entries(noted.value).keys():
                raise StepError(
                    f"{name} takes entries out of a {type(noted.value).__name__} that it is given, which the other"
                    f" pipeline stages don't see. {_IN_OBJECTS}",
                    breaks=3,
                )
            if changed := noted.changed():
                written = frozenset(key for key in noted.written() if changed[key] is noted.held[key])
                told_of = {key: told(each) for key, each in changed.items()}
                changes.append(Change(path, told_of, written, self._is_in_cache(path)))
        return tuple(changes), tensors

    def _is_in_cache(self, path: Path) -> bool:
        """Whether the object is a cache of transformers, or in one."""
        above = (self.objects[path[:length]].value for length in range(len(path) + 1) if path[:length] in self.objects)
        return any(kind.__module__ == _CACHES for value in above for kind in type(value).__mro__)

    def changes_elsewhere(self) -> bool:
        """Whether anything in globals, or in objects that it was given or holds, is another one than before."""
        return any(each.has_changed() for each in self._outside)


def check_sendable(name: str, output: Any) -> None:
    """Check that a block's output can be sent: dense tensors, and values that are equal for each microbatch.

    Raises:
        StepError: It holds an iterator, or tensors that aren't dense.
    """
    for _, leaf in tree.walk(output):
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
            raise StepError(
                f"{name} returns a {'nested tensor' if leaf.is_nested else f'tensor of layout {leaf.layout}'}, which"
                " can't be sent to another pipeline stage: return dense ones, padded, and make it of them where it is"
                " used (a torch.nn.TransformerEncoder does with enable_nested_tensor=False); or use"
                " pipeline_parallel_size=1.",
                breaks=3,
            )
        if isinstance(leaf, Iterator):
            raise StepError(_unsendable(name, leaf), breaks=3)


def _unsendable(name: str, leaf: Any) -> str:
    return (
        f"{name} returns a {type(leaf).__name__}, which can't be sent to another pipeline stage: return tensors, or"
        " tuples, lists, dicts or dataclasses of these; or use pipeline_parallel_size=1."
    )


def _has_gradients(value: Any) -> bool:
    if isinstance(value, nn.Parameter):  # sharding replaces these
        return False
    return any(isinstance(each, Tensor) and each.requires_grad for _, each in below("", value, _MOST))


def _all_in(what: str, value: Any) -> Iterator[_Outside]:
    """A value, and the objects that it holds; without words for it, by their types and paths."""
    for path, each in below(value.name if isinstance(value, Namespace) else "", value, _MOST):
        if not isinstance(each, LEAVES):
            yield _Outside(what or f"the {type(each).__name__} {path}", each, entries(each), of_gradients=True)


def _among(arguments: Any, followed: Collection[int]) -> Iterator[_Outside]:
    """What a call's arguments lead to, but for objects of these ids: sets, deques, objects with slots, closures."""
    words: dict[str, str] = {}
    owners = [each.__self__ for each in tree.leaves(arguments, BuiltinMethodType)]  # such as of ``[].append``
    for path, each in below("", (arguments, *owners), _MOST_GIVEN):
        if id(each) not in followed and not isinstance(each, LEAVES):
            words[path] = words.get(path.rpartition(".")[0], f"a {type(each).__name__} that it is given")
            of_function = isinstance(each, CellType) or "cell" in path.split(".")
            yield _Outside(words[path], each, entries(each), of_gradients=of_function)
