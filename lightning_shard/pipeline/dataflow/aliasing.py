"""Tensors that share memory, as a view and what it is a view of: on another stage each has its own.

A change in place of one is a change of the other in one process, and wouldn't be where they were sent. Looked for while
it is searched for what crosses; the code of later microbatches is the same.
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
"""Kinds of names: the user's code holds one object by them, on each stage, and changes it there too."""


class SharedMemory:
    """What a stage sends of a microbatch and has received, by the names of values (``crossing.Key``).

    Args:
        apart: Names of what was received and shares memory with something else where it was computed.
    """

    def __init__(self, apart: Collection[Any]) -> None:
        self._apart = apart
        self._sent: list[tuple[Any, Tensor, int]] = []
        self._received: list[tuple[Any, Tensor, int]] = []

    def sends(self, key: Any, tensor: Tensor) -> None:
        """A copy of it, as it is now."""
        if not tensor.is_inference():
            self._sent.append((key, tensor, tensor._version))

    def receives(self, key: Any, tensor: Tensor) -> None:
        """It is in the hands of the user's code now."""
        if key in self._apart and not tensor.is_inference():
            self._received.append((key, tensor, tensor._version))

    def is_written(self, tensor: Tensor) -> None:
        """By an operation that other stages do too: on what they received, which then has a name of its own.

        Where it isn't all that was sent of its memory, theirs is another.
        """
        shares = [each for each in self._sent if memory_of(each[1]) == memory_of(tensor)]
        if all(sent is tensor and key[0] in _STAYS_ITSELF for key, sent, _ in shares):
            self._sent = [each for each in self._sent if each[1] is not tensor]

    def apart(self) -> frozenset[Any]:
        """The names of what is sent and shares its memory with another that is."""
        by_memory: dict[int, dict[Hashable, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for key, tensor, _ in self._sent:
            by_memory[memory_of(tensor)][id(tensor) if key[0] in _STAYS_ITSELF else key].append(key)
        together = (objects.values() for objects in by_memory.values() if len(objects) > 1)
        found = {key for objects in together for keys in objects for key in keys}
        return frozenset(found | {key for key, _, _ in self._sent if key in self._apart})

    def check(self, sent: Mapping[Any, Tensor], blocks: Sequence[str]) -> None:
        """The stage's part of the microbatch has run.

        Args:
            sent: What was sent, by its names.
            blocks: Names of all blocks.

        Raises:
            StepError: What was sent has been changed through other tensors that share its memory, or what was received
                and shared memory where it was computed was changed here.
        """
        late = [key for key, tensor, version in self._sent if tensor._version != version and _differ(tensor, sent[key])]
        late += [key for key, tensor, version in self._received if tensor._version != version]
        if late:
            raise StepError(
                f"{_text(late[0], blocks)} goes to another pipeline stage, and shares its memory with a tensor that the"
                " step changes in place (a view, as by h[:, 0] or h.view(…), or what a hook or an attribute keeps):"
                " there each has its own memory, and the change of one wouldn't be one of the other. Change it by a new"
                " tensor (h = h + x in place of h += x, inplace=False), keep a copy (h[:, 0].clone()), or use"
                " pipeline_parallel_size=1."
            )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Waits for the device."""
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
    }[kind]
