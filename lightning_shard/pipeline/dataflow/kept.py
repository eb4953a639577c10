"""What the submodules of a block or part keep: attributes and buffers that a call sets, and containers it changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard import tree
from lightning_shard.namespaces import is_machinery
from lightning_shard.pipeline.dataflow.messages import Held, Kept, KeptNumber, Slot
from lightning_shard.pipeline.dataflow.objects import held_by, is_opaque
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
        if looks_into_objects and is_opaque(value) and not is_machinery(value):
            return cls(value, [], [each for each in held_by(value) if isinstance(each, Tensor)], [])
        entries = [(key, each) for key, each in _entries(value) if not isinstance(each, nn.Parameter)]
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
        return cls(
            [
                (path, each, dict(_noted(each, looks_into_objects)))
                for path, each in module.named_modules()
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


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """What nested lists, tuples and dicts hold, with its keys; of other values themselves.

    Dataclasses aren't entered: those of transformers' configs have fields that may not be read.
    """
    if isinstance(value, dict):
        for key, each in dict.items(value):
            yield key, None
            yield from _entries(each)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        yield len(value), None
        for each in value:
            yield from _entries(each)
    else:
        yield None, value


def _noted(module: nn.Module, looks_into_objects: bool) -> Iterator[tuple[str, _Noted]]:
    for key, value in chain(vars(module).items(), module._buffers.items()):
        if key not in OF_TORCH and key not in OF_RECURRENT_LAYERS and not isinstance(value, nn.Module):
            yield key, _Noted.of(value, looks_into_objects=looks_into_objects)


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


def put_into(container: Any, filled: Any) -> bool:
    """Give a list, dict or dataclass the entries of another one of its type; returns whether it has them now."""
    if type(container) is not type(filled) and not (isinstance(container, dict) and isinstance(filled, dict)):
        return False
    if isinstance(container, dict):
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


def _slot(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Slot.of(leaf)
    if _is_number(leaf):
        return KeptNumber(type(leaf))
    return leaf if isinstance(leaf, _AS_THEY_ARE) else Held(type(leaf).__name__)


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (bool, int, float)


def _without_sizes(leaf: Any) -> Any:
    return tuple(leaf) if isinstance(leaf, torch.Size) else leaf
