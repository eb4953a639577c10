"""What has changed inside an object since an outline of it was taken, as a message that other stages can apply.

The usual way to collect over an epoch is ``self.outputs.append(…)`` in a step, and a hook at the epoch's end that reads
the list. On a pipeline only the last stage gets to the ``append``. So at the end of a batch it sends what was added
since the batch began, and the other stages add the same. Each compares with an :class:`Outline` of its own, taken as
the batch began: a list may be thousands of batches long, and is neither copied nor sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.state.walk import CONTAINERS, entries, is_object, put_entries, put_entry
from lightning_shard.versions import content, version

LARGEST_SENT = 2**20
"""Elements of a tensor or array that is sent to the other stages; of a larger one they have the shape only."""
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, torch.Size)
DEPTH = 3
"""So deep an outline looks into what was seen to change."""
_ENTRIES = 1024
"""Entries of a list that are compared. Of a longer one only growth, and changes at some places, are seen."""
_LOOKED_INTO = 64
"""Entries of a list that are looked into for changes of their own."""
_SOME = 8


class Unsendable(Exception):
    """A value that can't be sent to other stages."""


@dataclass(frozen=True)
class Unsent(tree.Leaf):
    """In place of a tensor that is too large to be sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Receive = Callable[[Any], Any]
"""Gives this stage's value for one that was sent: tensors on its device, something in place of :class:`Unsent`."""


@dataclass(frozen=True)
class Outline:
    """What a value held at one time; no entry is copied.

    Attributes:
        value: Itself.
        mark: A tensor's version, an array's digest, a container's length.
        content: A digest of a tensor's values, which shows changes past its version, as through ``.data``.
        entries: Its entries, of a long list some: each by key, attribute or place, with its version and its digest.
        inner: Outlines of what it holds.
    """

    value: Any
    mark: int = 0
    content: int = 0
    entries: dict[Any, tuple[Any, int, int]] = field(default_factory=dict)
    inner: dict[Any, Outline] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any, depth: int = DEPTH, *, by_value: bool = False) -> Outline:
        """
        Args:
            depth: 0: of its mark alone; 1: of its entries, which a growing list needs; more: of what these hold too.
            by_value: Whether to digest a tensor's values.
        """
        mark, digest = mark_of(value), content(value) if by_value else 0
        if not depth or not _has_entries(value):
            return cls(value, mark, digest)
        is_list = isinstance(value, (list, deque)) and not _is_replaced(value)
        held = {place: value[place] for place in _places(mark)} if is_list else entries(value)
        seen = {key: (each, version(each), 0) for key, each in held.items()}
        inner = {} if depth == 1 or _is_replaced(value) or (is_list and mark > _LOOKED_INTO) else held
        return cls(value, mark, digest, seen, {k: cls.of(v, depth - 1) for k, v in inner.items() if _has_entries(v)})

    @classmethod
    def whole(cls, value: Any, depth: int, entered: set[int] | None = None) -> Outline:
        """Of all entries of containers, however deep they lie, and of all values; without parameters: sharding
        replaces these.

        Args:
            depth: Into so many objects in each other it looks.
            entered: The ids of what the outline has already, which isn't entered again.
        """
        if type(value) in _SIMPLE:  # most attributes of modules
            return cls(value)
        entered = set() if entered is None else entered
        mark, digest = mark_of(value), content(value)
        if not depth or id(value) in entered or not _has_entries(value):
            return cls(value, mark, digest)
        entered.add(id(value))
        held = {key: each for key, each in entries(value).items() if not isinstance(each, nn.Parameter)}
        seen = {key: (each, version(each), content(each)) for key, each in held.items()}
        inner = {} if _is_replaced(value) else {key: each for key, each in held.items() if _has_entries(each)}
        outlines = {key: cls.whole(each, depth - is_object(each), entered) for key, each in inner.items()}
        return cls(value, mark, digest, seen, outlines)

    def is_as(self, now: Outline) -> bool:
        """Whether another outline of it shows the same."""
        same = self.value is now.value and (self.mark, self.content) == (now.mark, now.content)
        return same and self.has_entries_of(now) and all(each.is_as(now.inner[key]) for key, each in self.inner.items())

    def has_entries_of(self, now: Outline) -> bool:
        """Whether it holds the same under the same keys."""
        if not tree.same_entries([*self.entries], [*now.entries]) or self.inner.keys() != now.inner.keys():
            return False
        return all(map(_are_same, self.entries.values(), now.entries.values()))


@dataclass(frozen=True)
class Change:
    """What has changed in a container or an object.

    Attributes:
        added: Of a list: what came behind its first ``length`` entries; of a set, all that it holds.
        replaces: Whether ``added`` is all that the list, deque or set holds.
        changed: Of a dict or an object: new values by key.
        keys: All of its keys in order, if some are gone, or new ones don't come last.
        inner: Changes inside of what it holds, by key or place.
    """

    added: list[Any] = field(default_factory=list)
    replaces: bool = False
    changed: dict[Any, Any] = field(default_factory=dict)
    keys: list[Any] | None = None
    inner: dict[Any, Change] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.replaces or self.changed or self.keys is not None or self.inner)

    def fits(self, value: Any) -> bool:
        """Whether a stage's own container is one that this can be applied to."""
        if isinstance(value, (list, deque, set)):
            return not self.changed and self.keys is None
        return has_contents(value) and not (self.added or self.replaces)

    def apply(self, value: Any, begun: Outline | None, receive: Receive) -> None:
        """Change another stage's container in place.

        Args:
            begun: What it held as the batch began, where this stage has changed it since.
        """
        if isinstance(value, set):
            value.clear()
            value.update(self.added)
        elif isinstance(value, (list, deque)):
            kept = 0 if self.replaces else len(value) if begun is None else begun.mark
            while len(value) > kept:
                value.pop()
            value.extend(map(receive, self.added))
        else:
            for key, sent in self.changed.items():
                put_entry(value, key, receive(sent))
            if self.keys is not None:
                held = entries(value)
                put_entries(value, {key: held[key] for key in self.keys if key in held})
        for key, change in self.inner.items():
            change.apply(entries(value)[key], None if begun is None else begun.inner.get(key), receive)


def change_since(before: Outline, now: Any) -> Change:
    """What has changed in a container or an object since an outline of it was taken.

    Raises:
        Unsendable: It was given something that can't be sent.
    """
    outline = Outline.of(now, 1)
    if _is_replaced(now):
        same = before.mark == outline.mark and before.has_entries_of(outline)
        return Change() if same else Change([sent(each) for each in now], replaces=True)
    held = entries(now)
    both = {key: each for key, each in before.inner.items() if held.get(key) is each.value}
    changed = {
        key: held[key] for key, each in both.items() if isinstance(each.value, tuple) and not _is_as_before(each)
    }
    inner = {k: found for k, v in both.items() if has_contents(v.value) and (found := change_since(v, v.value))}
    if isinstance(now, (list, deque)):
        if not changed and all(key in held and _is_as_seen(held[key], seen) for key, seen in before.entries.items()):
            return Change([sent(each) for each in [*now][before.mark :]], inner=inner)
        return Change([sent(each) for each in now], replaces=True)
    begun = before.entries
    keys = [*held] if [*{**begun, **held}] != [*held] else None
    changed |= {key: each for key, each in held.items() if key not in begun or not _is_as_seen(each, begun[key])}
    if any(type(key) not in _SIMPLE and not isinstance(key, tuple) for key in (*changed, *(keys or ()))):
        raise Unsendable
    return Change(changed={k: sent(v) for k, v in changed.items()}, keys=keys, inner=inner)


def sent(value: Any, largest: int = LARGEST_SENT) -> Any:
    """A value of any nesting as it is sent: tensors without their graph, of those with more elements the shape.

    Raises:
        Unsendable: It holds an object that is neither a number, a text, a tensor nor a nesting of these.
    """
    return tree.map_leaves(partial(_sent_leaf, largest), value)


def received(place: Receive, value: Any) -> Any:
    """What :func:`sent` gave, with what another stage has of its tensors."""
    return tree.map_leaves(lambda each: place(each) if isinstance(each, (Tensor, Unsent)) else each, value)


def has_contents(value: Any) -> bool:
    """Whether it is a container or an object whose changes can be told."""
    return isinstance(value, CONTAINERS) or is_object(value)


def mark_of(value: Any) -> int:
    """A container's length, or a :func:`version`: shows that it was changed in place."""
    return len(value) if isinstance(value, CONTAINERS) else version(value)


def _is_as_seen(value: Any, seen: tuple[Any, int, int]) -> bool:
    return _are_same((value, version(value), seen[2]), seen)


def _are_same(now: tuple[Any, int, int], seen: tuple[Any, int, int]) -> bool:
    # by identity: an equal number was written, and may be another one in the next microbatch
    return now[0] is seen[0] and now[1:] == seen[1:]


def _has_entries(value: Any) -> bool:
    return has_contents(value) or isinstance(value, tuple)


def _is_as_before(outline: Outline) -> bool:
    return outline.is_as(Outline.of(outline.value, DEPTH - 1))


def _places(length: int) -> list[int]:
    """The places of a list that are compared: all, or of a longer one some, and the last."""
    return list(range(length)) if length <= _ENTRIES else [*range(0, length, length // _SOME), length - 1]


def _is_replaced(value: Any) -> bool:
    """Whether a container has no end to which entries are added: it is compared, and sent, as a whole."""
    return isinstance(value, set) or (isinstance(value, deque) and value.maxlen is not None)


def _sent_leaf(largest: int, leaf: Any) -> Any:
    if type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided:
        return leaf.detach().clone() if leaf.numel() <= largest else Unsent(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, np.ndarray) and leaf.dtype != object and leaf.size <= largest:
        return leaf.copy()
    if isinstance(leaf, (set, frozenset)) and all(isinstance(each, _SIMPLE) for each in leaf):
        return type(leaf)(leaf)
    if isinstance(leaf, _SIMPLE):
        return leaf
    raise Unsendable
