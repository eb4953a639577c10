"""What a block changes beside what it returns: arguments that it writes to, attributes that it sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.crossing import Slot

_GIVEN = "a list or dict that it is given"
_LISTS = (list, dict, set, deque)
_SIMPLE = (Tensor, bool, int, float, str, tuple)
"""What code of a user's keeps under names of its own; libraries keep other things under such."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, such as its hooks."""


@dataclass(frozen=True)
class Before:
    """What a block could change, as it was before its call.

    Attributes:
        lists: Lists, dicts and sets that it could add to: where they are, themselves, and what was in them.
    """

    arguments: list[tuple[Any, int]]
    lists: list[tuple[str, Any, list[Any]]]
    attributes: list[tuple[str, nn.Module, dict[str, tuple[Any, int]]]]

    @classmethod
    def of(cls, block: nn.Module, arguments: Any) -> Before:
        noted = [(leaf, _version(leaf)) for _, leaf in tree.walk(arguments)]
        given = [(_GIVEN, each, _entries(each)) for each in _containers(arguments)]
        own = [
            (f"its {type(value).__name__} {path}{'.' * bool(path)}{key}", value, _entries(value))
            for path, module in block.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, _LISTS) and key not in _OF_TORCH
        ]
        attributes = [(path, module, dict(_attributes(module))) for path, module in block.named_modules()]
        return cls(noted, [*given, *own], attributes)

    def slot(self, leaf: Any) -> Any:
        """An output's; it may be an argument, handed on."""
        place = next((place for place, (argument, _) in enumerate(self.arguments) if argument is leaf), None)
        return replace(Slot.of(leaf), argument=place) if isinstance(leaf, Tensor) else leaf

    def changed(self, name: str) -> list[tuple[int, Tensor]]:
        """The tensors among the arguments that were written to, by their place.

        Raises:
            StepError: A list or dict among them has more or fewer entries, or one of the block's own has new ones with
                gradients: what else it keeps there, such as masks made once, is its own matter.
        """
        for what, each, entries in self.lists:
            known = set(map(id, entries))
            added = [entry for entry in _entries(each) if id(entry) not in known]
            is_given = what == _GIVEN
            if (is_given and len(_entries(each)) != len(entries)) or (not is_given and _has_gradients(added)):
                raise StepError(
                    f"{name} changes {what}, which the other pipeline stages don't see: return what it adds, or set an"
                    " attribute to it anew, which they do."
                )
        places = enumerate(self.arguments)
        return [(p, leaf) for p, (leaf, version) in places if isinstance(leaf, Tensor) and leaf._version != version]

    def kept(self) -> list[tuple[str, str, Any]]:
        """The attributes and buffers that modules of the block have set, or written to."""
        return [
            (path, key, value)
            for path, module, before in self.attributes
            for key, (value, version) in _attributes(module)
            if before.get(key, (before, 0))[0] is not value or before[key][1] != version
        ]


def _attributes(module: nn.Module) -> Iterator[tuple[str, tuple[Any, int]]]:
    for key, value in chain(vars(module).items(), module._buffers.items()):
        if key not in _OF_TORCH and (not key.startswith("_") or isinstance(value, _SIMPLE)):
            yield key, (value, _version(value))


def _entries(container: Any) -> list[Any]:
    """What is in it; sharding exchanges parameters, also in lists of them."""
    entries = [*container, *container.values()] if isinstance(container, dict) else list(container)
    return [entry for entry in entries if not isinstance(entry, nn.Parameter)]


def _has_gradients(values: list[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in tree.walk(values))


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        yield value
    for _, child in tree.children(value):
        yield from _containers(child)
