"""Detects in-place changes of tensors that alias each other (share memory) and cross a cut, and refuses them.

In one process, an in-place change of a tensor also changes its views. On a receiving stage, each tensor has its own
memory, so it wouldn't. The check runs only during the search for what crosses: later microbatches run the same code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import memory_of

_STAYS_ITSELF = ("operation", "block", "changed")
"""Kinds of names whose values are one object in the user's code, on every stage, which changes it there too."""


class SharedMemory:
    """Tracks the tensors that a stage sends and has received for a microbatch, by name (``messages.Key``).

    Args:
        aliased: Names of received values that shared memory with another value where they were computed.
    """

    def __init__(self, aliased: Collection[Any]) -> None:
        self._aliased = set(aliased)
        self._sent: list[tuple[Any, Tensor, int]] = []
        self._received: list[tuple[Any, Tensor, int]] = []

    def also(self, aliased: Collection[Any]) -> None:
        """More received values shared memory where they were computed."""
        self._aliased.update(aliased)

    def sends(self, key: Any, tensor: Tensor) -> None:
        """A copy of the tensor, as it is now, will be sent."""
        if not tensor.is_inference():
            self._sent.append((key, tensor, tensor._version))

    def receives(self, key: Any, tensor: Tensor) -> None:
        """The user's code holds this received tensor from now on."""
        if not tensor.is_inference():
            self._received.append((key, tensor, tensor._version))

    def is_written(self, tensor: Tensor) -> None:
        """An operation that other stages run too has changed a tensor in place; the result has a name of its own.

        They run it on the received tensor, so it is the same there, unless other values that share its memory were
        sent: there these have memory of their own.
        """
        shares = [each for each in self._sent if memory_of(each[1]) == memory_of(tensor)]
        if all(sent is tensor and key[0] in _STAYS_ITSELF for key, sent, _ in shares):
            self._sent = [each for each in self._sent if each[1] is not tensor]

    def aliased(self) -> frozenset[Any]:
        """The names of sent values that share memory with another sent value, here or on an earlier stage."""
        by_memory: dict[int, dict[Hashable, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for key, tensor, _ in self._sent:
            by_memory[memory_of(tensor)][id(tensor) if key[0] in _STAYS_ITSELF else key].append(key)
        together = (objects.values() for objects in by_memory.values() if len(objects) > 1)
        found = {key for objects in together for keys in objects for key in keys}
        return frozenset(found | {key for key, _, _ in self._sent if key in self._aliased})

    def check(self, sent: Mapping[Any, Tensor], blocks: Sequence[str]) -> None:
        """Check the stage's part of the microbatch, after it has run.

        Args:
            sent: The copies that were sent, by name.
            blocks: The names of all blocks.

        Raises:
            StepError: A sent value was changed later through a tensor that shares its memory; or a received value was
                changed here that shared memory where it was computed.
        """
        late = [key for key, tensor, version in self._sent if tensor._version != version and _differ(tensor, sent[key])]
        late += [key for key, tensor, version in self._received if key in self._aliased and tensor._version != version]
        if late:
            raise StepError(
                f"{_text(late[0], blocks)} goes to another pipeline stage, and shares its memory with a tensor that the"
                " step changes in place (a view, as by h[:, 0] or h.view(…), or what a hook or an attribute keeps):"
                " there each has its own memory, and the change of one wouldn't be one of the other. Change it by a new"
                " tensor (h = h + x in place of h += x, inplace=False), keep a copy (h[:, 0].clone()), or use"
                " pipeline_parallel_size=1.",
                breaks=3,
            )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ, NaN aside. Synchronises with the device."""
    with torch.no_grad():
        return not torch.equal(one.nan_to_num(), other.nan_to_num())


def _text(key: Any, blocks: Sequence[str]) -> str:
    kind = key[0]
    if kind == "operation":
        return f"The result of {key[3]}"
    return {
        "block": f"The output of {blocks[key[1]]}",
        "inside": f"What a hook inside of {blocks[key[1]]} sees",
        "kept": f"What {blocks[key[1]]} keeps as an attribute",
        "changed": f"What {blocks[key[1]]} writes to its arguments",
        "object": f"What {blocks[key[1]]} sets in an object that it is given",
    }[kind]
