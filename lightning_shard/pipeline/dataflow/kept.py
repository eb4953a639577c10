"""What the submodules of a block or part keep: attributes and buffers that a call sets, and containers it changes."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard import tree
from lightning_shard.pipeline.dataflow.messages import Held, Kept, KeptNumber, Slot
from lightning_shard.pipeline.dataflow.objects import held_by, may_be_changed
from lightning_shard.scripted import is_scripted
from lightning_shard.versions import content, version

OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes of every module, such as its hooks, and ``forward``, which a stand-in replaces."""
OF_RECURRENT_LAYERS = ("_flat_weights", "_flat_weight_refs")
"""In which nn.LSTM and others keep their parameters, which sharding replaces in a forward."""
_OTHERS = (deque, set)
"""Containers that aren't nodes of trees."""
_AS_THEY_ARE = (str, bytes, type(None), torch.dtype, torch.device)

Name = tuple[str, str]
"""The path of a submodule, and an attribute's or a buffer's name."""


@dataclass(frozen=True)
class _Noted:
    """A value, and what it held: keys and entries of lists, dicts and tuples, versions and digests of tensors.

    A version tells of a write of equal values, which may be others in the next microbatch; a digest of one that leaves
    the version as it was.
    """

    value: Any
    keys: list[Any]
    held: list[Any]
    contents: list[tuple[int, int]]

    @classmethod
    def of(cls, value: Any, *, looks_into_objects: bool) -> _Noted:
        if isinstance(value, _OTHERS):
            return cls(value, [], [*value], [])
        is_looked_into = looks_into_objects and may_be_changed(value) and _items(value) is None
        found = ((None, each) for each in held_by(value)) if is_looked_into else _entries(value, {})
        entries = [(key, each) for key, each in found if not isinstance(each, nn.Parameter)]
        keys, held = [key for key, _ in entries], [each for _, each in entries]
        return cls(value, keys, held, [(version(each), content(each)) for each in held])

    def holds_as(self, other: _Noted) -> bool:
        return self.keys == other.keys and self.contents == other.contents and tree.same_entries(self.held, other.held)


@dataclass(frozen=True)
class Attributes:
    """A snapshot of the attributes and buffers of a module's submodules, without metrics and scripted ones."""

    noted: list[tuple[str, nn.Module, dict[str, _Noted]]]
    looks_into_objects: bool

    @classmethod
    def of(cls, module: nn.Module, *, looks_into_objects: bool = False) -> Attributes:
        """
        Args:
            looks_into_objects: Whether tensors in objects of other classes are noted, too, which takes longer.
        """
        return cls.of_each(module.named_modules(), looks_into_objects=looks_into_objects)

    @classmethod
    def of_each(cls, named: Iterable[tuple[str, nn.Module]], *, looks_into_objects: bool = False) -> Attributes:
        """The same of these modules, without those in them."""
        return cls(
            [
                (path, each, dict(_noted(each, looks_into_objects)))
                for path, each in named
                if not is_scripted(each)  # whose buffers stages can't exchange
                if not isinstance(each, Metric)  # the stage that updates it shares what it computes
            ],
            looks_into_objects,
        )

    def changed(self, also: Collection[Name] = ()) -> list[Kept]:
        """What was set, written to or changed since, and the attributes ``also``."""
        return [
            Kept(path, key, now.value, before is not None and before.value is now.value)
            for path, module, noted in self.noted
            for key, now in _noted(module, self.looks_into_objects)
            if (before := noted.get(key)) is None
            or before.value is not now.value
            or not before.holds_as(now)
            or (path, key) in also
        ]


def _entries(value: Any, seen: dict[int, Any]) -> Iterator[tuple[Any, Any]]:
    """What nested lists, tuples, dicts and dataclasses hold, with its keys; of other values themselves."""
    if id(value) in seen:
        return
    inside = _items(value)
    if inside is None:
        yield None, value
        return
    seen[id(value)] = value
    yield len(inside), None
    for key, each in inside:
        yield key, None
        yield from _entries(each, seen)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """The keys and values of a container; ``None`` for other values.

    Transformers' configs, which are dataclasses, aren't entered: they have fields that may not be read.
    """
    if isinstance(value, (dict, UserDict)):
        return [*dict.items(value.data if isinstance(value, UserDict) else value)]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [*enumerate(value)]
    if not dataclasses.is_dataclass(value) or not tree.is_node(value):
        return None
    kinds: Any = type(value).__mro__
    if any(kind.__module__.startswith("transformers.") for kind in kinds):
        return None
    return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value) if hasattr(value, each.name)]


def _noted(module: nn.Module, looks_into_objects: bool) -> Iterator[tuple[str, _Noted]]:
    for key, value in chain(vars(module).items(), module._buffers.items()):
        if key not in OF_TORCH and key not in OF_RECURRENT_LAYERS and not isinstance(value, nn.Module):
            yield key, _Noted.of(value, looks_into_objects=looks_into_objects)


@dataclass
class Found:
    """What searches have found that a block keeps.

    Attributes:
        names: What its submodules have kept in any search.
        unset: Their attributes that were ``None`` after the last one, each with all attributes of its submodule.
    """

    names: dict[Name, None] = field(default_factory=dict)
    unset: dict[Name, dict[str, Any]] = field(default_factory=dict)

    def add(self, kept: Collection[Kept], block: nn.Module) -> None:
        """After a call of the block that was searched."""
        self.names.update({(each.module, each.name): None for each in kept})
        self.unset = {
            (path, key): vars(module)
            for path, module in block.named_modules()
            for key, value in vars(module).items()
            if value is None and key not in OF_TORCH and (path, key) not in self.names
        }

    def still_unset(self) -> list[Name]:
        """Those of :attr:`unset` that are ``None`` now. Asked for in each call, as there are few."""
        return [name for name, held in self.unset.items() if held.get(name[1], held) is None]


def keep(module: nn.Module, key: str, value: Any) -> None:
    """Set an attribute or buffer that the module's code set on another stage."""
    (module._buffers if key in module._buffers else module.__dict__)[key] = value


def leaves(value: Any) -> list[Any]:
    """The leaves of a kept value, in the order of the slots that stand for them."""
    return tree.leaves(tree.map_leaves(_without_sizes, value))


def slots(value: Any) -> Any:
    """What stands in a message for a kept value: slots for its tensors, and so on for each leaf."""
    return tree.map_leaves(_slot, tree.map_leaves(_without_sizes, value))


def as_tensor(leaf: Any, device: torch.device) -> Tensor | None:
    """What is sent for a leaf: a tensor or a number; ``None`` for others."""
    if isinstance(leaf, Tensor):
        return leaf
    return torch.tensor(leaf, dtype=KeptNumber(type(leaf)).slot.dtype, device=device) if _is_number(leaf) else None


def is_told_otherwise(agreed: Any, value: Any) -> bool:
    """Whether a text or ``None``, which other stages read without asking for it, has changed since it was told them."""
    if not tree.is_node(agreed):
        return isinstance(agreed, _AS_THEY_ARE) and not _is_same(agreed, value)
    told = {path: leaf for path, leaf in tree.walk(agreed) if isinstance(leaf, _AS_THEY_ARE)}
    now = tree.walk(tree.map_leaves(_without_sizes, value)) if told else ()
    return any(path in told and not _is_same(told[path], leaf) for path, leaf in now)


def put_into(container: Any, filled: Any) -> bool:
    """Give a list, dict or dataclass the entries of another one of its type; returns whether it has them now."""
    if type(container) is not type(filled) and not (isinstance(container, dict) and isinstance(filled, dict)):
        return False
    if isinstance(container, MutableMapping):
        container.clear()
        container.update(filled)
    elif isinstance(container, list):
        container[:] = filled
    elif tree.is_node(container) and not isinstance(container, tuple):
        for key, value in tree.children(filled):
            object.__setattr__(container, key, value)
    else:
        return False
    return True


def with_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A kept value with ``function(leaf)`` for every leaf, in its own containers: other modules may hold them too."""
    if not tree.is_node(value):
        return function(value)
    held = [child for _, child in tree.children(value)]
    now = [with_leaves(function, child) for child in held]
    if all(new is old for new, old in zip(now, held)):
        return value
    filled = tree.rebuild(value, now)
    return value if put_into(value, filled) else filled


def _is_same(told: Any, now: Any) -> bool:
    return type(told) is type(now) and bool(told == now)


def _slot(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Slot.of(leaf)
    if _is_number(leaf):
        return KeptNumber(type(leaf))
    return leaf if isinstance(leaf, _AS_THEY_ARE) else Held(type(leaf).__name__)


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (bool, float) or (type(leaf) is int and -(2**63) <= leaf < 2**63)


def _without_sizes(leaf: Any) -> Any:
    return tuple(leaf) if isinstance(leaf, torch.Size) else leaf
