"""What the submodules of a block or part keep: attributes and buffers that a call sets, and containers it changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard import tree
from lightning_shard.pipeline.dataflow.messages import Held, Kept, KeptNumber, Slot
from lightning_shard.state.patch import Outline
from lightning_shard.state.walk import OF_RECURRENT_LAYERS, entries, is_object, put_entries

OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes of every module, such as its hooks, and ``forward``, which a stand-in replaces."""
_DEPTH = 5
"""So many objects in each other are looked into."""
_AS_THEY_ARE = (str, bytes, type(None), torch.dtype, torch.device)

Name = tuple[str, str]
"""The path of a submodule, and an attribute's or a buffer's name."""


class Attributes:
    """A snapshot of modules' attributes and buffers, without those of metrics.

    Args:
        named: Modules, without those in them.
        looks_into_objects: Whether changes in objects of a user's classes are noted, too, which takes longer.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Module]] = (), *, looks_into_objects: bool = False) -> None:
        self._looks_into_objects = looks_into_objects
        self._noted = [
            (path, each, dict(_noted(each, looks_into_objects)))
            for path, each in named
            if not isinstance(each, Metric)  # the stage that updates it shares what it computes
        ]

    def changed(self, also: Collection[Name] = ()) -> list[Kept]:
        """What was set, written to or changed since, and the attributes ``also``."""
        return [
            Kept(path, key, now.value, before is not None and before.value is now.value)
            for path, module, noted in self._noted
            for key, now in _noted(module, self._looks_into_objects)
            if (before := noted.get(key)) is None or not before.is_as(now) or (path, key) in also
        ]


def _noted(module: nn.Module, looks_into_objects: bool) -> Iterator[tuple[str, Outline]]:
    for key, value in chain(vars(module).items(), module._buffers.items()):
        if key not in OF_TORCH and key not in OF_RECURRENT_LAYERS and not isinstance(value, nn.Module):
            is_entered = looks_into_objects or tree.is_node(value) or not is_object(value)
            yield key, Outline.whole(value, _DEPTH if is_entered else 0)


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
    is_dict = isinstance(container, dict) and isinstance(filled, dict)
    is_other = type(container) is type(filled) and tree.is_node(container) and not isinstance(container, tuple)
    if is_dict or is_other:
        put_entries(container, entries(filled))
    return is_dict or is_other


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
