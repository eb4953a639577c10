"""What a step changed inside a list, dict or object that a module keeps, as a message that other stages can apply.

The usual way to collect over an epoch is ``self.outputs.append(…)`` in a step, and a hook at the epoch's end that reads
the list. On a pipeline only the last stage gets to the ``append``. So at the end of a batch it sends what was added
since the batch began, and the other stages add the same. Each compares with an :class:`Outline` of its own, taken as
the batch began: a list may be thousands of batches long, and is neither copied nor sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.plugin.steps.state.python_state import CONTAINERS, attributes, is_object
from lightning_shard.versions import version

LARGEST_SENT = 2**20
"""Elements of a tensor or array that is sent to the other stages; of a larger one they have the shape only."""
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, torch.Size)
_DEPTH = 3
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
    """What a container or an object held at one time; no entry is copied.

    Attributes:
        value: Itself.
        length: Of a list or a deque.
        seen: Its entries by place, of a longer list some, with the versions of tensors and arrays; of a set, or a deque
            with a ``maxlen``, all entries.
        entries: Of a dict, or an object's attributes: each value, and the version of a tensor or an array.
        inner: Outlines of what it holds.
    """

    value: Any
    length: int = 0
    seen: Any = None
    entries: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    inner: dict[Any, Outline] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any, depth: int = _DEPTH) -> Outline:
        """Of a container or an object; ``depth=1`` of itself only, which a growing list needs."""
        if _is_replaced(value):
            return cls(value, len(value), [(each, version(each)) for each in value])
        if isinstance(value, (list, deque)):
            looked_into = list(value) if depth > 1 and len(value) <= _LOOKED_INTO else []
            seen = {place: (value[place], version(value[place])) for place in _places(len(value))}
            return cls(value, len(value), seen, inner=_inner(enumerate(looked_into), depth))
        named = _named(value)
        entries = {key: (each, version(each)) for key, each in named.items()}
        return cls(value, entries=entries, inner=_inner(named.items(), depth))


@dataclass(frozen=True)
class Change:
    """What has changed in a container or an object.

    Attributes:
        added: Of a list: what came behind its first ``length`` entries; of a set, all that it holds.
        replaces: Whether ``added`` is all that the list, deque or set holds.
        changed: Of a dict or an object: new values by key.
        removed: Its keys that are gone.
        order: All keys of a dict in their order, if it isn't that in which new ones come last.
        inner: Changes inside of what it holds, by key or place.
    """

    added: list[Any] = field(default_factory=list)
    replaces: bool = False
    changed: dict[Any, Any] = field(default_factory=dict)
    removed: list[Any] = field(default_factory=list)
    order: list[Any] = field(default_factory=list)
    inner: dict[Any, Change] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.replaces or self.changed or self.removed or self.order or self.inner)

    def fits(self, value: Any) -> bool:
        """Whether a stage's own container is one that this can be applied to."""
        if isinstance(value, (list, deque, set)):
            return not (self.changed or self.removed or self.order)
        return (isinstance(value, dict) or is_plain_object(value)) and not (self.added or self.replaces)

    def apply(self, value: Any, begun: Outline | None, receive: Receive) -> None:
        """Change another stage's container in place.

        Args:
            begun: What it held as the batch began, where this stage has changed it since.
        """
        if isinstance(value, set):
            value.clear()
            value.update(self.added)
        elif isinstance(value, (list, deque)):
            kept = 0 if self.replaces else len(value) if begun is None else begun.length
            while len(value) > kept:
                value.pop()
            value.extend(map(receive, self.added))
        else:
            held = value if isinstance(value, dict) else vars(value)
            for key in self.removed:
                held.pop(key, None)
            for key, sent in self.changed.items():
                held[key] = receive(sent)
            for key in self.order:
                held[key] = held.pop(key)
        for key, change in self.inner.items():
            inside = value[key] if isinstance(value, (list, deque)) else _named(value)[key]
            change.apply(inside, None if begun is None else begun.inner.get(key), receive)


def change_since(before: Outline, now: Any) -> Change:
    """What has changed in a container or an object since an outline of it was taken.

    Raises:
        Unsendable: It was given something that can't be sent.
    """
    inner = {key: found for key, each in before.inner.items() if (found := _inner_change(each, key, now))}
    if _is_replaced(now):
        is_same = len(now) == before.length and all(map(_is_as_seen, now, before.seen))
        return Change() if is_same else Change([sent(each) for each in now], replaces=True)
    if isinstance(now, (list, deque)):
        if len(now) >= before.length and all(_is_as_seen(now[place], seen) for place, seen in before.seen.items()):
            return Change([sent(each) for each in list(now)[before.length :]], inner=inner)
        return Change([sent(each) for each in now], replaces=True)
    named, begun = _named(now), before.entries
    as_applied = [*(key for key in begun if key in named), *(key for key in named if key not in begun)]
    order = [*named] if isinstance(now, dict) and as_applied != [*named] else []
    changed = {
        key: each
        for key, each in named.items()
        if key not in begun or begun[key][0] is not each or begun[key][1] != version(each)
    }
    if any(type(key) not in _SIMPLE and not isinstance(key, tuple) for key in (*changed, *order)):
        raise Unsendable
    removed = [key for key in begun if key not in named]
    values = {key: sent(each) for key, each in changed.items()}
    return Change(changed=values, removed=removed, order=order, inner=inner)


def sent(value: Any) -> Any:
    """A value of any nesting as it is sent: tensors without their graph, of large ones the shape.

    Raises:
        Unsendable: It holds an object that is neither a number, a text, a tensor nor a nesting of these.
    """
    return tree.map_leaves(_sent_leaf, value)


def received(device: torch.device, in_place_of: Callable[[Unsent, torch.device], Any], value: Any) -> Any:
    """What :func:`sent` gave, on another stage's device."""

    def leaf(each: Any) -> Any:
        if isinstance(each, Unsent):
            return in_place_of(each, device)
        return each.to(device) if isinstance(each, Tensor) else each

    return tree.map_leaves(leaf, value)


def has_contents(value: Any) -> bool:
    """Whether it is a container or an object whose changes can be told."""
    return isinstance(value, CONTAINERS) or is_plain_object(value)


def _is_as_seen(value: Any, seen: tuple[Any, int]) -> bool:
    return value is seen[0] and version(value) == seen[1]


def _places(length: int) -> list[int]:
    """The places of a list that are compared: all, or of a longer one some, and the last."""
    return list(range(length)) if length <= _ENTRIES else [*range(0, length, length // _SOME), length - 1]


def _is_replaced(value: Any) -> bool:
    """Whether a container has no end to which entries are added: it is compared, and sent, as a whole."""
    return isinstance(value, set) or (isinstance(value, deque) and value.maxlen is not None)


def _sent_leaf(leaf: Any) -> Any:
    if type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided:
        return leaf.detach().clone() if leaf.numel() <= LARGEST_SENT else Unsent(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, np.ndarray) and leaf.dtype != object and leaf.size <= LARGEST_SENT:
        return leaf.copy()
    if isinstance(leaf, (set, frozenset)) and all(isinstance(each, _SIMPLE) for each in leaf):
        return type(leaf)(leaf)
    if isinstance(leaf, _SIMPLE):
        return leaf
    raise Unsendable


def is_plain_object(value: Any) -> bool:
    return is_object(value) and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module))


def _named(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    return attributes(value) if is_plain_object(value) else {}


def _inner(entries: Any, depth: int) -> dict[Any, Outline]:
    return {key: Outline.of(each, depth - 1) for key, each in entries if has_contents(each)} if depth > 1 else {}


def _inner_change(before: Outline, key: Any, now: Any) -> Change | None:
    """The change of what was held under a key, if it still is: else it is sent as a new value."""
    held = now[key] if isinstance(now, (list, deque)) and key < len(now) else _named(now).get(key)
    return change_since(before, held) if held is before.value else None
