"""DTensors anywhere in the trainer state: saved as shards like the model's, and resharded when they are loaded.

In the saved trainer state a reference replaces each DTensor. A mapping that holds a DTensor is taken to be keyed by
parameter name, such as a callback's averages of parameters: saving merges its entries over the pipeline stages, and
loading gives each stage only its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.format.typed_json import Reference
from lightning_shard.checkpoint.loading.stored import StoredTensor
from lightning_shard.checkpoint.tensors import is_dtensor
from lightning_shard.errors import UnsupportedStateError

Path = tuple[Any, ...]


def lift(tree: Any, name: str, *, with_siblings: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Replace each DTensor in a tree of dicts, lists and tuples by a reference.

    Args:
        name: The prefix of the references' names.
        with_siblings: Also replace the plain tensors of a mapping that holds a DTensor: buffers beside parameters.

    Returns:
        The new tree, and the tensors by the references' names.
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


def merge_over_stages(tree: Any, gather: Callable[[Any], list[Any]]) -> tuple[Any, list[set[str]]]:
    """Add to a tree of :func:`lift` the entries that other stages have in mappings of references. A collective call.

    Returns the new tree, and the names of each stage's references.

    Args:
        gather: All-gathers a value over the stages.
    """
    found: list[tuple[Path, Any]] = []
    _collect(tree, (), found)
    stages = gather(found)
    if len(stages) == 1:
        return tree, [set()]
    tree = _copied(tree)
    names: list[set[str]] = [set() for _ in stages]
    for number, path, value in ((number, *item) for number, stage in enumerate(stages) for item in stage):
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
            if isinstance(item, Reference):
                names[number].add(item.name)
    return tree, names


def lay_out(
    tree: Any, live: Mapping[str, Tensor], elsewhere: Collection[str]
) -> tuple[Any, list[tuple[StoredTensor, Tensor]]]:
    """Replace each stored tensor in a tree by an uninitialised tensor to load it into.

    Args:
        live: The module's tensors by name. A stored tensor with the name and shape of one gets its layout; any other
            becomes a whole CPU tensor.
        elsewhere: Names that other stages hold; they are left out of mappings of stored tensors.

    Returns:
        The new tree, and pairs of a stored tensor and the tensor that it is to be loaded into.
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
    """A new dict, list or tuple with ``function(key, child)`` in place of each child; any other value as it is."""
    if type(value) in _MAPPINGS:
        return type(value)((key, function(key, item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(function(index, item) for index, item in enumerate(value))
    return value


def _copied(value: Any) -> Any:
    return rebuilt(value, lambda _, item: _copied(item))


def _collect(value: Any, path: Path, found: list[tuple[Path, Any]]) -> None:
    """Collect, with their paths, mappings that hold references, and each reference that isn't in a mapping."""
    if isinstance(value, Reference):
        found.append((path, value))
    elif type(value) in _MAPPINGS and _has(value, Reference):
        found.append((path, value))
        for key, item in value.items():
            if not isinstance(item, Reference):
                _collect(item, (*path, key), found)
    else:
        rebuilt(value, lambda key, item: _collect(item, (*path, key), found))
