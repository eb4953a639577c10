"""What a block changes beside what it returns: arguments that it writes to, attributes that it sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.crossing import Slot


@dataclass(frozen=True)
class Before:
    """What a block could change, as it was before its call."""

    arguments: list[tuple[Any, int]]
    containers: list[tuple[Any, int]]
    attributes: list[tuple[str, nn.Module, dict[str, tuple[Any, int]]]]

    @classmethod
    def of(cls, block: nn.Module, arguments: Any) -> Before:
        noted = [(leaf, _version(leaf)) for _, leaf in tree.walk(arguments)]
        sizes = [(each, len(each)) for each in _containers(arguments)]
        return cls(noted, sizes, [(path, module, dict(_attributes(module))) for path, module in block.named_modules()])

    def slot(self, leaf: Any) -> Any:
        """An output's; it may be an argument, handed on."""
        place = next((place for place, (argument, _) in enumerate(self.arguments) if argument is leaf), None)
        return replace(Slot.of(leaf), argument=place) if isinstance(leaf, Tensor) else leaf

    def changed(self, name: str) -> list[tuple[int, Tensor]]:
        """The tensors among the arguments that were written to, by their place.

        Raises:
            StepError: A list or dict among them has other entries.
        """
        if any(len(each) != size for each, size in self.containers):
            raise StepError(
                f"{name} changes a list or dict that it is given, which the other pipeline stages don't see: return"
                " what it adds."
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
        if not key.startswith("_") and key != "training":
            yield key, (value, _version(value))


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        yield value
    for _, child in tree.children(value):
        yield from _containers(child)
