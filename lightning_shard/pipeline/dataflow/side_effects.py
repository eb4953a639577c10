"""Detects side effects of a block's call (arguments written to, attributes set); refuses those that can't be sent.

A block's state before the call is noted, and compared after it. Tensor arguments written to in place, attributes and
buffers that were set or changed (``kept.py``), and what was set in lists, dicts and objects among the arguments, can be
sent to other stages. Changes of globals, and of sets and the like that a block keeps, can't.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.namespaces import namespaces
from lightning_shard.pipeline.dataflow.kept import OF_TORCH, Attributes
from lightning_shard.pipeline.dataflow.messages import Change, Held, Slot
from lightning_shard.pipeline.dataflow.objects import (
    Path,
    held_by,
    is_object,
    may_be_changed,
    objects,
    rebuilt,
    snapshot,
)
from lightning_shard.pipeline.dataflow.objects import entries as entries_of
from lightning_shard.versions import version

_GIVEN = "a dataclass with slots that it is given"
_LISTS = (list, dict, set, deque)
_OTHER_LISTS = (set, deque)
"""Those of them that aren't sent."""
_IN_OBJECTS = "Blocks may set and add tensors and numbers there; or return what is new."
_CACHES = "transformers.cache_utils"
_SLOTTED = {"builtins", "torch", "numpy", "datetime", "decimal", "fractions", "pathlib", "uuid"}
"""Modules whose classes with slots hold no values of a user's."""
DEEPEST = 8
"""The longest path in a call's arguments to an object whose changes are noticed."""
_RETURN_IT = "return what it adds, or set an attribute to it anew, which they do."


@dataclass(frozen=True)
class Before:
    """A snapshot of what a block could change, taken before its call.

    Attributes:
        arguments: The leaves of its arguments, with the versions of tensors.
        lists: Lists, dicts and dataclasses among the arguments, sets and deques of its own, and lists, dicts, sets and
            deques in globals that it could add to: a description, the container, and its entries.
        objects: All mutable objects among the arguments, by path, each with a copy of its entries and the versions of
            the tensors among these.
        attributes: Those of its submodules.
        unfollowed: Deques, sets, objects with slots, callable objects and bound methods among the arguments, and
            objects that its submodules hold: a description, the value, what it held, and whether only what has
            gradients matters.
        globals_before: What its code keeps in globals and in attributes of classes and functions, by name; ``None`` if
            these aren't compared.
    """

    block: nn.Module
    arguments: list[tuple[Any, int]]
    lists: list[tuple[str, Any, list[Any]]]
    objects: dict[Path, tuple[Any, dict[Any, Any], dict[Any, int]]]
    attributes: Attributes
    unfollowed: list[tuple[str, Any, list[Any], bool]]
    globals_before: dict[str, Any] | None

    @classmethod
    def of(cls, block: nn.Module, arguments: Any, *, compares_globals: bool = False) -> Before:
        """
        Args:
            compares_globals: Whether to include globals and attributes of classes and functions, which takes longer.
        """
        noted = [(leaf, version(leaf)) for _, leaf in tree.walk(arguments)]
        given = [(_GIVEN, each, _entries(each)) for each in tree.containers(arguments)]
        held = {path: (each, *snapshot(each)) for path, each in objects(arguments, deepest=DEEPEST)}
        own: list[tuple[str, Any, list[Any]]] = [
            (f"its {type(value).__name__} {path}{'.' * bool(path)}{key}", value, _entries(value))
            for path, module in block.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, _OTHER_LISTS) and key not in OF_TORCH
        ]
        outside = _globals_of(block) if compares_globals else None
        own += [(f"the {type(v).__name__} {n}", v, _entries(v)) for n, v in outside or () if isinstance(v, _LISTS)]
        attributes = Attributes.of(block, looks_into_objects=compares_globals)
        unfollowed = [*_unfollowed(arguments, held)]
        if compares_globals:
            unfollowed += [
                (f"its {type(value).__name__} {path}{'.' * bool(path)}{key}", value, held_by(value), True)
                for path, module in block.named_modules()
                for key, value in vars(module).items()
                if key not in OF_TORCH and may_be_changed(value) and not tree.is_node(value)
            ]
        globals_before = None if outside is None else dict(outside)
        return cls(block, noted, [*given, *own], held, attributes, unfollowed, globals_before)

    def slot(self, name: str, leaf: Any) -> Any:
        """What stands for a leaf of the output, with the argument's index if it is an argument.

        Raises:
            StepError: It is an object with tensors, a module or a function, and no argument.
        """
        place, before = next(
            ((place, before) for place, (argument, before) in enumerate(self.arguments) if argument is leaf),
            (None, 0),
        )
        if place is not None and is_object(leaf):
            return Held(type(leaf).__name__, place)
        slot = Slot.of(leaf)
        if isinstance(leaf, Tensor) and leaf.requires_grad and version(leaf) == before:
            return slot  # for another microbatch the block may compute it (stochastic depth)
        if isinstance(slot, Held) and place is None:
            raise StepError(_unsendable(name, leaf))
        return replace(slot, argument=place) if isinstance(slot, (Slot, Held)) else slot

    def returned_containers(self, output: Any) -> tuple[tuple[int | None, int], ...]:
        """The argument containers that a block returns: index in a returned tuple (else ``None``), and in ``lists``."""
        places = {id(each): place for place, (what, each, _) in enumerate(self.lists) if what == _GIVEN}
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
            StepError: The block changed a dataclass with slots that it doesn't return, or another argument whose
                changes aren't followed; or it added values that require gradients to a set, a deque or an object of its
                own or to a global. Other values in globals, such as masks that are created once, are allowed.
        """
        returned = {id(each) for each in tree.containers(output)}
        for what, each, entries in self.lists:
            now = _entries(each)
            known = set(map(id, entries))
            is_changed = (
                id(each) not in returned and not is_object(each) and not tree.same_entries(entries, now)
                if what == _GIVEN
                else _has_gradients([entry for entry in now if id(entry) not in known])
            )
            if is_changed:
                raise StepError(f"{name} changes {what}, which the other pipeline stages don't see: {_RETURN_IT}")
        for what, each, entries, of_gradients in self.unfollowed:
            now = held_by(each)
            known = set(map(id, entries))
            new = [entry for entry in now if id(entry) not in known]
            if _has_gradients(new) or not (of_gradients or tree.same_entries(entries, now)):
                raise StepError(f"{name} changes {what}, which the other pipeline stages don't see: {_RETURN_IT}")
        for key, value in _globals_of(self.block) if self.globals_before is not None else ():
            if value is not (self.globals_before or {}).get(key) and _has_gradients([value]):
                raise StepError(f"{name} sets {key}, which the other pipeline stages don't see: {_RETURN_IT}")
        places = enumerate(self.arguments)
        return [(p, leaf) for p, (leaf, before) in places if isinstance(leaf, Tensor) and version(leaf) != before]

    def changed_objects(
        self, name: str, output: Any, follows: Callable[[Any], bool] | None = None
    ) -> tuple[tuple[Change, ...], list[Tensor]]:
        """The changes of objects among the arguments, and the tensors that their slots stand for, in order.

        Without containers that the block returned: its output has their entries.

        Args:
            follows: Which objects to look at; ``None``: all.

        Raises:
            StepError: The block took an entry out of an object, or left a module, a function, or one object twice
                there.
        """
        changes: list[Change] = []
        tensors: list[Tensor] = []
        placed = {id(each) for each, *_ in self.objects.values()}

        def told(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
                return Slot.of(value)
            if is_object(value):
                if id(value) in placed:  # other stages would have two of it
                    raise StepError(
                        f"{name} puts one {type(value).__name__} into two places of what it is given, which the other"
                        f" pipeline stages can't. {_IN_OBJECTS}"
                    )
                placed.add(id(value))
            return rebuilt(value, told, _IN_OBJECTS)

        returned = {id(each) for each in tree.containers(output)}
        inside = {path for path, (each, *_) in self.objects.items() if id(each) in returned}
        for path, (each, before, versions) in self.objects.items():
            is_returned = any(path[:length] in inside for length in range(len(path) + 1))
            if is_returned or (follows is not None and not follows(each)):
                continue
            now = entries_of(each)
            if before.keys() - now.keys():
                raise StepError(
                    f"{name} takes entries out of a {type(each).__name__} that it is given, which the other pipeline"
                    f" stages don't see. {_IN_OBJECTS}"
                )
            new = {key: v for key, v in now.items() if key not in before or not tree.same_entries([before[key]], [v])}
            written = {key for key, version in versions.items() if key not in new and now[key]._version != version}
            if new or written:
                entries = {key: told(now[key]) for key in (*new, *written)}
                changes.append(Change(path, entries, frozenset(written), self._is_cache(path)))
        return tuple(changes), tensors

    def written_in(self, changes: Iterable[Change]) -> list[Tensor]:
        """The tensors that the changes wrote to in place."""
        return [self.objects[change.path][1][key] for change in changes for key in change.written]

    def _is_cache(self, path: Path) -> bool:
        above = (self.objects[path[:length]][0] for length in range(len(path) + 1) if path[:length] in self.objects)
        return any(map(is_cache, above))

    def changes_elsewhere(self) -> bool:
        """Whether anything in globals, or in objects that it was given or holds, is another one than before."""
        before = self.globals_before or {}
        return (
            any(value is not before.get(key) for key, value in _globals_of(self.block))
            or any(not tree.same_entries(entries, _entries(each)) for _, each, entries in self.lists)
            or any(not tree.same_entries(entries, held_by(each)) for _, each, entries, _ in self.unfollowed)
        )


def is_cache(value: Any) -> bool:
    """Whether it is a cache of transformers, or a layer of one."""
    return any(kind.__module__ == _CACHES for kind in type(value).__mro__)


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
                " pipeline_parallel_size=1."
            )
        if isinstance(leaf, Iterator):
            raise StepError(_unsendable(name, leaf))


def _unsendable(name: str, leaf: Any) -> str:
    return (
        f"{name} returns a {type(leaf).__name__}, which can't be sent to another pipeline stage: return tensors, or"
        " tuples, lists, dicts or dataclasses of these; or use pipeline_parallel_size=1."
    )


def _globals_of(block: nn.Module) -> list[tuple[str, Any]]:
    """Globals and attributes of classes and functions that the block's code uses, and attributes of objects there."""
    kinds: dict[Any, None] = dict.fromkeys(type(module) for module in block.modules())
    found = {f"{each.name}.{key}": v for each in namespaces(*kinds) for key, v in each.held.items()}
    objects = {name: value for name, value in found.items() if may_be_changed(value)}
    return [*found.items(), *((f"{n}.{key}", v) for n, value in objects.items() for key, v in vars(value).items())]


def _entries(container: Any) -> list[Any]:
    """A container's entries, without parameters: sharding replaces these, also in lists.

    For a dict, the builtin's own methods are called: those of transformers' mappings of all models import each model.
    """
    if dataclasses.is_dataclass(container):
        return [value for _, value in tree.children(container)]
    entries = [*dict.keys(container), *dict.values(container)] if isinstance(container, dict) else list(container)
    return [entry for entry in entries if not isinstance(entry, nn.Parameter)]


def _has_gradients(values: list[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in tree.walk(values))


def _unfollowed(
    arguments: Any, objects: Mapping[Path, tuple[Any, dict[Any, Any], Any]]
) -> Iterator[tuple[str, Any, list[Any], bool]]:
    """Arguments, and entries of objects among these, that hold values and aren't objects that are followed."""
    entries = chain.from_iterable(before.values() for _, before, _ in objects.values())
    for value in {id(each): each for each in chain(tree.leaves(arguments), entries)}.values():
        owner = getattr(value, "__self__", None) if inspect.isroutine(value) else None
        if isinstance(value, (nn.Module, Tensor, type)) or isinstance(owner, (nn.Module, Tensor, type, ModuleType)):
            continue
        what = f"a {type(value).__name__} that it is given"
        has_slots = not hasattr(value, "__dict__") and any(hasattr(kind, "__slots__") for kind in type(value).__mro__)
        if isinstance(value, (deque, set)) or (has_slots and type(value).__module__ not in _SLOTTED):
            yield what, value, held_by(value), False
        elif owner is not None:
            yield f"the {type(owner).__name__} of a method that it is given", owner, held_by(owner), False
        elif callable(value) and not is_object(value) and not inspect.isroutine(value) and hasattr(value, "__dict__"):
            yield what, value, held_by(value), True
