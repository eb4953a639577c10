"""DTensors anywhere in the trainer's state: saved in parts like the model's, and laid out anew when they come back.

In the trainer's state a reference stands for each. A mapping that holds a DTensor is state by name, as a callback's
averages of parameters are: all that it holds is merged over the pipeline's stages, and each stage is given its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.format.registered import Reference
from lightning_shard.checkpoint.loading.stored import StoredTensor
from lightning_shard.checkpoint.tensors import is_dtensor
from lightning_shard.errors import UnsupportedStateError

Path = tuple[Any, ...]


def lift(tree: Any, name: str, *, with_siblings: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """A tree of dicts, lists and tuples with a reference for each DTensor, and the tensors by the references' names.

    Args:
        tree: Left as it is.
        name: The names begin so.
        with_siblings: Also take out the plain tensors of a mapping that holds a DTensor: buffers beside parameters.

    Raises:
        UnsupportedStateError: Two tensors would have one name.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str, takes_all: bool) -> Any:
        if is_dtensor(value) or (takes_all and isinstance(value, Tensor)):
            if path in tensors:
                raise UnsupportedStateError(f"Two tensors are named {path!r} once keys are joined by '/': rename one.")
            tensors[path] = value
            return Reference(path)
        takes_all = with_siblings and type(value) in _MAPPINGS and any(map(is_dtensor, value.values()))
        return rebuilt(value, lambda key, item: walk(item, f"{path}/{key}", takes_all))

    return walk(tree, name, False), tensors


def merge_over_stages(tree: Any, gather: Callable[[Any], list[Any]]) -> Any:
    """Complete a tree of :func:`lift` by what other stages hold in mappings of references; collective.

    Args:
        gather: Every stage's value of one.

    Raises:
        UnsupportedStateError: On every rank, a reference that isn't in a mapping: which stage's it is can't be told.
    """
    found: list[tuple[Path, Any]] = []
    _collect(tree, (), found)
    stages = gather(found)
    if len(stages) == 1:
        return tree
    tree = _copied(tree)
    for path, value in (item for stage in stages for item in stage):
        if isinstance(value, Reference):
            raise UnsupportedStateError(
                f"{value.name!r} is a DTensor in a list: with several pipeline stages, each of which has its own, hold"
                " it in a dict by its parameter's name."
            )
        node = tree
        for key in path:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
        for key, item in value.items():
            node.setdefault(key, item)
    return tree


def lay_out(
    tree: Any, live: Mapping[str, Tensor], elsewhere: Collection[str]
) -> tuple[Any, list[tuple[StoredTensor, Tensor]]]:
    """A tree with an empty tensor for each stored tensor, and what goes into them.

    Args:
        live: The module's tensors by name. What has the name and shape of one is laid out like it; any other is whole
            and on the CPU.
        elsewhere: Names that other stages hold: left out of mappings of sharded values.
    """
    pairs: list[tuple[StoredTensor, Tensor]] = []

    def walk(value: Any, key: Any) -> Any:
        if isinstance(value, StoredTensor):
            like = live.get(key) if isinstance(key, str) else None
            if like is not None and like.shape == value.shape:
                target = torch.empty_like(like.detach(), dtype=value.dtype)
            else:
                target = torch.empty(value.shape, dtype=value.dtype)
            pairs.append((value, target))
            return target
        if type(value) in _MAPPINGS and _has(value, StoredTensor):
            value = type(value)((k, item) for k, item in value.items() if k in live or k not in elsewhere)
        return rebuilt(value, lambda k, item: walk(item, k))

    return walk(tree, None), pairs


_MAPPINGS = (dict, OrderedDict)


def _has(mapping: Mapping[Any, Any], kind: type) -> bool:
    return any(isinstance(value, kind) for value in mapping.values())


def rebuilt(value: Any, function: Callable[[Any, Any], Any]) -> Any:
    """A node with ``function(key, child)`` for each child; anything else itself."""
    if type(value) in _MAPPINGS:
        return type(value)((key, function(key, item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(function(index, item) for index, item in enumerate(value))
    return value


def _copied(value: Any) -> Any:
    return rebuilt(value, lambda _, item: _copied(item))


def _collect(value: Any, path: Path, found: list[tuple[Path, Any]]) -> None:
    """Mappings that hold references, with their paths; references elsewhere by themselves."""
    if isinstance(value, Reference):
        found.append((path, value))
    elif type(value) in _MAPPINGS and _has(value, Reference):
        found.append((path, value))
        for key, item in value.items():
            if not isinstance(item, Reference):
                _collect(item, (*path, key), found)
    else:
        rebuilt(value, lambda key, item: _collect(item, (*path, key), found))
