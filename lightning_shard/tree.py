"""Walk, rebuild and split nested values (pytrees): batches, hidden states, and the outputs of steps.

Nodes are dicts and other mappings (such as ``BatchEncoding``), lists, tuples, named tuples and dataclasses, nested in
any way. All other values are leaves. :func:`split` cuts a batch into microbatches.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_shard.errors import WHOLE_BATCHES, BatchError

Path = tuple[str, ...]
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_DEEPEST = 1000
_UNCUT = f"{WHOLE_BATCHES} or pipeline_parallel_size=1"


class Leaf:
    """Base class of dataclasses that are leaves of a tree, not nodes."""


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path."""
    if not is_node(tree):
        yield path, tree
        return
    for key, child in children(tree):
        yield from walk(child, (*path, str(key)))


def leaves(tree: Any, kind: type = object) -> list[Any]:
    """Every leaf of a kind, in order, without its path; faster than :func:`walk`, for each call of a block."""
    found: list[Any] = []
    waiting = [iter((tree,))]
    while waiting:
        if len(waiting) > _DEEPEST:
            raise RecursionError(f"A {type(tree).__name__} holds itself.")
        for child in waiting[-1]:
            node = None if type(child) is Tensor else _kind_of_node(type(child))
            if node is None:
                if isinstance(child, kind):
                    found.append(child)
                continue
            if node == "sequence":
                waiting.append(iter(child))
            else:  # a user's mapping may have a key of the name ``values``
                waiting.append(iter(child.values() if type(child) is dict else [each for _, each in children(child)]))
            break
        else:
            waiting.pop()
    return found


def tensors(tree: Any) -> list[Tensor]:
    return leaves(tree, Tensor)


def containers(tree: Any) -> Iterator[Any]:
    """The mutable containers of a tree (lists, dicts and dataclasses), in order."""
    is_object = is_node(tree) and dataclasses.is_dataclass(tree)
    if is_object != isinstance(tree, (list, dict)):  # transformers' outputs are dataclass and dict, and aren't changed
        yield tree
    for _, child in children(tree):
        yield from containers(child)


def same_entries(before: list[Any], now: list[Any]) -> bool:
    """Whether two lists hold the same objects; numbers and strings are compared by type and value."""
    return len(before) == len(now) and all(
        one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)
        for one, other in zip(before, now)
    )


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nesting with ``function(leaf)`` for every leaf."""
    if _kind_of_node(type(tree)) is None:
        return function(tree)
    return rebuild(tree, [map_leaves(function, child) for _, child in children(tree)])


def detached(tree: Any) -> Any:
    """The same nesting with tensors that keep no graph alive."""
    if isinstance(tree, Tensor):
        return tree.detach()
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def is_node(tree: Any) -> bool:
    """Whether a value is a node; :class:`torch.Size` is a leaf."""
    return _kind_of_node(type(tree)) is not None


def _found_kind_of_node(kind: type) -> str | None:
    if issubclass(kind, (Tensor, torch.Size)):
        return None
    if issubclass(kind, (list, tuple)):
        return "sequence"
    if issubclass(kind, Mapping):
        return "mapping"
    return "object" if dataclasses.is_dataclass(kind) and not issubclass(kind, Leaf) else None


# cached by type: issubclass(…, Mapping) is slow
_kind_of_node: Callable[[type], str | None] = lru_cache(maxsize=1024)(_found_kind_of_node)


def children(tree: Any) -> list[tuple[Any, Any]]:
    """Keys and children of a node, in order; empty for a leaf."""
    kind = _kind_of_node(type(tree))
    if kind == "sequence":
        return list(enumerate(tree))
    if kind == "mapping":
        return list(tree.items())
    if kind == "object":
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return []


def rebuild(tree: Any, children: list[Any]) -> Any:
    """A node of the same type with the same keys and other children; a dict if the mapping can't be made from one."""
    if isinstance(tree, Mapping):
        items = dict(zip(tree, children))
        try:
            return type(tree)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return _named(type(tree), children)
    if isinstance(tree, (list, tuple)):
        return type(tree)(children)
    rebuilt = copy.copy(tree)
    held = getattr(rebuilt, "__dict__", {})
    for field, child in zip(dataclasses.fields(tree), children):
        if field.name in held:  # past descriptors of the class, which may refuse slots in place of tensors
            held[field.name] = child
        else:
            object.__setattr__(rebuilt, field.name, child)
    return rebuilt


def _named(kind: Any, children: Iterable[Any]) -> Any:
    return tuple.__new__(kind, children)


# PackedSequence's constructor takes tensors only, but stages send each other nestings with placeholders for tensors
copyreg.pickle(PackedSequence, lambda packed: (_named, (PackedSequence, tuple(packed))))  # type: ignore[arg-type]


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into ``parts`` microbatches of equal size, in order; a batch of any kind is its own single one.

    Tensors of at least one dimension are cut along dim 0. Lists with an entry per sample and no such tensors (texts,
    file names, a number for each sample), tuples of strings, and numpy arrays of the batch's length are cut too.
    Anything else is passed to each microbatch unchanged.

    Raises:
        BatchError: Tensors differ in the size of dim 0, there is no tensor, or ``parts`` doesn't divide the size.
    """
    if parts == 1:
        return [batch]
    size = batch_size(batch)
    if size % parts:
        raise BatchError(
            f"A batch of {size} samples can't be cut into {parts} equal microbatches: use a batch_size that is a"
            f" multiple of {parts} (with drop_last=True if it is the last, smaller batch), or set microbatches to a"
            f" divisor of {size}.",
            breaks=1,
        )
    step = size // parts
    return _sliced(batch, size, [slice(start, start + step) for start in range(0, size, step)])


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the size of dim 0 of its tensors.

    Raises:
        BatchError: Tensors differ in the size of dim 0, or there is no tensor of at least one dimension.
    """
    found = {tensor.size(0) for tensor in tensors(batch) if tensor.ndim}
    if len(found) == 1:
        return found.pop()
    if not found:
        raise BatchError(
            f"A batch without tensors of at least one dimension ({type(batch).__name__}) can't be cut into"
            " microbatches: put the samples into tensors, in tuples, lists, dicts or dataclasses, or use"
            f" {_UNCUT}.",
            breaks=1,
        )
    sizes: dict[int, Path] = {}
    for path, leaf in walk(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            sizes.setdefault(leaf.size(0), path)
    seen = ", ".join(f"{'.'.join(path) or 'the batch'}: {size}" for size, path in sizes.items())
    raise BatchError(
        f"The batch's tensors differ in their first dimension ({seen}), so it isn't clear how to cut it into"
        " microbatches: put the sample dimension first in all of them, or make constants 0-dimensional. Graphs joined"
        " into one can't be cut: use"
        f" {_UNCUT}.",
        breaks=1,
    )


def refuse_list_of_samples(batch: Any, drawn: int | None, *, may_be_last: bool = True) -> None:
    """Refuse a batch that has a list or tuple with an entry per sample, as ``collate_fn=list`` makes.

    :func:`split` would cut such a batch inside each sample, along dim 0 of its tensors.

    Args:
        drawn: The number of samples that the loader draws for a batch; ``None`` if it isn't known.
        may_be_last: Whether the batch may be the last of an epoch, with fewer samples.

    Raises:
        BatchError: A list or plain tuple has tensors in each entry, and

            - ``drawn`` entries of equal outlines, or, where that isn't known, more than three that are as many as dim
              0's size. Allowed is a tuple of at most three that is the whole batch, such as inputs and targets.
            - Or it is inside the batch, and has nestings, as many as dim 0's size.
    """
    found: list[Any] = []
    _holds_tensors(batch, found)
    size = batch_size(batch) if found else 0
    for node in found:
        are_parts = node is batch and isinstance(node, tuple) and len(node) <= _PARTS
        as_drawn = len(node) == drawn and (size >= len(node) or not may_be_last)
        as_long = drawn is None and len(node) == size and len(node) > _PARTS
        are_nested = len(node) == size and node is not batch and all(map(is_node, node))
        if are_nested or ((as_drawn or as_long) and not are_parts and len({*map(_outline, node)}) == 1):
            made_of = "" if drawn is None else f", and a batch is made of {drawn} samples"
            raise BatchError(
                f"The batch has a {type(node).__name__} of {len(node)} entries, and the size of their tensors' dim 0 is"
                f" {size}{made_of}. It is ambiguous which of the two counts the samples, and so how to cut it into"
                " microbatches. Stack them into tensors (torch's own collate function does), or use another"
                f" batch_size, or {_UNCUT}.",
                breaks=1,
            )


_PARTS = 3
"""A batch that is a tuple of at most so many tensors is taken for inputs and targets, not for a tuple of samples."""


def _holds_tensors(tree: Any, found: list[Any]) -> bool:
    """Whether a tree has tensors to cut; appends to ``found`` every list and plain tuple with some in each entry."""
    if isinstance(tree, Tensor):
        return tree.ndim > 0
    kind = _kind_of_node(type(tree))
    if kind is None:
        return False
    entries = tree if kind == "sequence" else [child for _, child in children(tree)]
    holding = [_holds_tensors(entry, found) for entry in entries if type(entry) not in _PLAIN]
    if (isinstance(tree, list) or type(tree) is tuple) and tree and len(holding) == len(tree) and all(holding):
        found.append(tree)
    return any(holding)


def _outline(tree: Any) -> tuple[Any, ...]:
    """Paths, numbers of dimensions and dtypes of a tree's tensors: equal for samples of one data set; sizes differ."""
    return tuple((path, leaf.ndim, leaf.dtype) for path, leaf in walk(tree) if isinstance(leaf, Tensor) and leaf.ndim)


def _sliced(tree: Any, size: int, slices: list[slice]) -> list[Any]:
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided or tree.is_nested:
            return [_sparse_slice(tree, each.start, each.stop) for each in slices]
        parts = [tree[each] if tree.ndim else tree for each in slices]
        # .data gives the part a version counter of its own: a step may change its microbatch in place
        return [part if part.requires_grad else part.data for part in parts]
    is_array = isinstance(tree, np.ndarray)
    if (tree.ndim and len(tree) == size) if is_array else _is_a_column(tree, size):
        return [tree[each] for each in slices]
    if is_array or not is_node(tree):
        return [tree] * len(slices)
    parts_of_children = [_sliced(child, size, slices) for _, child in children(tree)]
    return [rebuild(tree, [parts[number] for parts in parts_of_children]) for number in range(len(slices))]


def joined(tree: Any, other: Any, size: int) -> Any:
    """A batch of the samples of two batches of ``size`` samples: the inverse of :func:`split`.

    Raises:
        BatchError: The batches are of different structures, or hold tensors that aren't dense.
    """
    if isinstance(tree, Tensor):
        if tree.shape != other.shape or tree.layout != torch.strided or tree.is_nested:
            raise BatchError("The batches hold tensors of other shapes, or that aren't dense.", breaks=1)
        return torch.cat([tree, other]) if tree.ndim else tree
    if isinstance(tree, np.ndarray):
        return np.concatenate([tree, other]) if tree.ndim and len(tree) == size else tree
    if _is_a_column(tree, size):
        return type(tree)([*tree, *other])
    if not is_node(tree):
        return tree
    pairs = list(zip(children(tree), children(other)))
    if type(tree) is not type(other) or len(children(tree)) != len(children(other)):
        raise BatchError("The batches are of different structures.", breaks=1)
    return rebuild(tree, [joined(child, twin, size) for (_, child), (_, twin) in pairs])


def _sparse_slice(tensor: Tensor, start: int, stop: int) -> Tensor:
    if tensor.layout != torch.sparse_coo:
        kind = f"{'nested ' * tensor.is_nested}tensor of layout {tensor.layout}"
        raise BatchError(
            f"A batch with a {kind} can't be cut into microbatches: use a dense or sparse_coo tensor, or {_UNCUT}.",
            breaks=1,
        )
    return tensor.index_select(0, torch.arange(start, stop, device=tensor.device))


def _is_a_column(tree: Any, size: int) -> bool:
    """Whether a value is a list, or a tuple of strings, with an entry per sample and no tensors to cut."""
    if not isinstance(tree, (list, tuple)) or len(tree) != size or any(tensor.ndim for tensor in tensors(tree)):
        return False
    return isinstance(tree, list) or (type(tree) is tuple and all(isinstance(entry, str) for entry in tree))


def copied(batch: Any) -> Any:
    """A copy of a batch, whose tensors and objects may be changed in place; what can't be copied is the same."""

    def copied_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.clone()
        if type(leaf) in _PLAIN:
            return leaf
        try:
            return copy.deepcopy(leaf)
        except Exception:  # of any class's own
            return leaf

    return map_leaves(copied_leaf, batch)


_MOST_OUTLINED = 4096
"""So many leaves of objects in a batch are looked at: one may lead to a whole dataset."""


def outline(batch: Any) -> tuple[Any, ...]:
    """What the shapes in a step may depend on: shapes and dtypes of a batch's tensors and arrays, also inside objects.

    Of a batch without any, such as texts, it is a hash of the values.
    """
    found: list[tuple[Any, Any]] = []
    plain: list[Any] = []
    seen: set[int] = set()
    waiting = deque(leaves(batch))
    while waiting and len(seen) < _MOST_OUTLINED:
        leaf = waiting.popleft()
        if isinstance(leaf, Tensor) and leaf.is_nested:
            found += [(tuple(each.shape), each.dtype) for each in leaf.unbind()]
        elif isinstance(leaf, (Tensor, np.ndarray)):
            found.append((tuple(leaf.shape), leaf.dtype))
        elif type(leaf) in _PLAIN:
            plain.append(leaf)
        elif id(leaf) not in seen and not isinstance(leaf, (type, torch.nn.Module)):
            seen.add(id(leaf))
            waiting += leaves(getattr(leaf, "__dict__", {}))
    return tuple(found) if found else (hash(tuple(plain)),)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a ``uint8`` view of shape ``[bytes]``."""
    # not view(-1): it keeps a single element's stride, which may be other than 1
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
