"""What stages tell each other: the names and shapes of the values that cross a cut, and the calls of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.pipeline.dataflow.objects import Path, holds_tensors, is_function

Key = tuple[Any, ...]
"""A value's name: ``("operation", number, leaf, function)``, ``("parameter", name)``, or a value of a block's call
(:class:`BlockCall`): ``("block", block, leaf)``, ``("inside", block, call, leaf)``, ``("kept", block, submodule,
attribute, leaf)``, ``("changed", block, argument)``, ``("object", block, slot)``.
What is computed where no operations are counted has no name, and doesn't cross."""


class Counted(NamedTuple):
    """The number of operations counted, and a checksum of their names; both sides of a cut must agree on it."""

    number: int = 0
    names: int = 0

    def and_then(self, name: str) -> Counted:
        return Counted(self.number + 1, crc32(name.encode(), self.names))


@dataclass(frozen=True)
class End(tree.Leaf):
    """Where a stage leaves the step: at the call of a later stage's block, or after a block if no later one is called.

    Attributes:
        place: The block's place.
        after: Whether it is the last block that the stage's run of the step called, and the stage leaves after it.
        why: What the stage lacked in the code after that block; empty if it ran the step to its end.
    """

    place: int
    after: bool = False
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class Held(tree.Leaf):
    """Stands in a message for an object that holds tensors, a module or a function, which aren't sent.

    Attributes:
        kind: The name of its type.
        argument: The index of the block's argument it is.
    """

    kind: str
    argument: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Slot(tree.Leaf):
    """Describes a tensor in a message, without its values; ``argument``: the index of the block's argument it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    argument: int | None = field(default=None, compare=False)

    @staticmethod
    def of(leaf: Any) -> Any:
        """What stands in a message for a leaf: a slot, a :class:`Held`, or the leaf itself if it holds no tensors."""
        if isinstance(leaf, Tensor):
            return Slot(tuple(leaf.shape), leaf.dtype, getattr(leaf, "needs", leaf.requires_grad))
        if isinstance(leaf, nn.Module) or is_function(leaf) or holds_tensors(leaf):
            return Held(type(leaf).__name__)
        return leaf


@dataclass(frozen=True)
class KeptNumber(tree.Leaf):
    """Stands in a message for a number that a block keeps, which may be another one for each microbatch."""

    kind: type

    @property
    def slot(self) -> Slot:
        """That of the tensor as which it is sent."""
        return Slot((), {bool: torch.bool, int: torch.int64, float: torch.float64}[self.kind], False)


@dataclass(frozen=True)
class Kept(tree.Leaf):
    """An attribute or buffer that a submodule of a block set or changed.

    Attributes:
        module: The submodule's path from the block.
        name: The attribute's name.
        value: The value; in a message, with slots and numbers in place of tensors and numbers.
        in_place: Whether it was the attribute's value before.
    """

    module: str
    name: str
    value: Any
    in_place: bool


def described(slots: Any) -> str:
    """A nested value, for a message: the dtypes and shapes of tensors that slots stand for, and other values."""

    def text(leaf: Any) -> str:
        if isinstance(leaf, Held):
            return leaf.kind
        if isinstance(leaf, KeptNumber):
            return f"a number ({leaf.kind.__name__})"
        if not isinstance(leaf, Slot):
            return repr(leaf)
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype} {list(leaf.shape)}{' with gradients' * leaf.requires_grad}"

    return ", ".join(map(text, tree.leaves(slots))) or "nothing"


@dataclass(frozen=True)
class Change(tree.Leaf):
    """The entries of an object that a block's call set.

    Attributes:
        path: The path to the object from the call's arguments, ``(args, kwargs)``.
        entries: The new entries, with slots in place of tensors.
        written: The keys of tensors that it wrote to in place.
        is_cache: Whether the object is a cache of transformers, or in one. Its models have one by default, and in
            training nothing reads it: unless tensors of one cross, only the search follows its changes.
    """

    path: Path
    entries: dict[Any, Any]
    written: frozenset[Any]
    is_cache: bool


@dataclass(frozen=True)
class BlockCall(tree.Leaf):
    """The effects of a block's call on its own stage, for the stages where a stand-in replaces it.

    Tensors are replaced by slots.

    Attributes:
        output: The return value.
        inside: What the forward hooks of submodules saw: a submodule's name, whether they were called with
            gradients, and its arguments and output.
        kept: Attributes that submodules set or changed.
        changed: Indices of the leaves among its arguments that it wrote to.
        returned_containers: Lists, dicts, dataclasses among its arguments that it returned: the index in the returned
            tuple (``None`` if the container is the whole output), and the index among the arguments' containers.
        objects: Changes of objects among its arguments.
    """

    output: Any
    inside: tuple[tuple[str, bool, Any], ...] = ()
    kept: tuple[Kept, ...] = ()
    changed: tuple[int, ...] = ()
    returned_containers: tuple[tuple[int | None, int], ...] = ()
    objects: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Delivery(tree.Leaf):
    """What one stage sends to the next for each microbatch of a signature.

    Attributes:
        slots: A slot for each value, by name.
        blocks: The calls of all blocks so far, by the block's place.
        counted: The operations before the stage left the step.
        until: Where it left the step.
        aliased: Values that shared memory with another one where they were computed.
    """

    slots: dict[Key, Slot] = field(default_factory=dict)
    blocks: dict[int, BlockCall] = field(default_factory=dict)
    counted: Counted | None = None
    until: End | None = None
    aliased: frozenset[Key] = frozenset()

    @cached_property
    def gradients(self) -> list[Slot]:
        """The slots of values whose gradients come back, in their order."""
        return [slot for slot in self.slots.values() if slot.requires_grad]


@dataclass(frozen=True)
class Request(tree.Leaf):
    """What a stage asks the one before for: values of these names; and the error message, if they can't be had."""

    keys: tuple[Key, ...]
    sentence: str
