"""Splits batches into microbatches: how many, and what can't be split.

Data ranks' batches may differ in size: the last ones of a stream, those of a sampler that counts tokens, or of an
evaluation without padding. All are split into equally many microbatches, since there may be a collective call for each:
of parts that are gathered or reduced for it, of experts, or the step's own. A number that doesn't divide all of them
isn't taken, so they have to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from lightning_shard import tree
from lightning_shard.plugin.steps.loop import Loop


@dataclass(frozen=True)
class Step:
    """A step of the user's on one batch.

    Attributes:
        method: Its name.
        call: The user's code.
        parts: The batch's microbatches.
        seeds: The seed of each.
        args: What it is given after the batch.
    """

    method: str
    call: Callable[..., Any]
    parts: Sequence[Any]
    seeds: Sequence[int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Batches:
    """Splits the batches of one loop.

    Args:
        microbatches: Of a whole batch.
        of_all: For each flag, whether it is true on all data ranks; a collective call of these.
    """

    def __init__(self, loop: Loop, microbatches: int, of_all: Callable[[Sequence[bool]], list[bool]]) -> None:
        self._loop = loop
        self._microbatches = microbatches
        self._of_all = of_all
        self._whole: int | None = None

    def split(self, batch: Any) -> list[Any]:
        """Split a training batch; one of another size than the first may have fewer microbatches, if it doesn't divide.

        A collective call over the data ranks.

        Raises:
            BatchError: The first batch doesn't divide into the microbatches.
        """
        if self._microbatches == 1:
            return [batch]
        size = tree.batch_size(batch)
        is_first = self._whole is None
        self._whole = self._whole or size
        self._loop.refuse_list_of_samples(batch, may_be_last=size < self._whole)
        if is_first and size % self._microbatches:
            return tree.split(batch, self._microbatches)  # raises
        return tree.split(batch, self._most_parts(size, self._of_all))

    def split_evaluated(self, batch: Any, *, alike: bool) -> list[Any]:
        """Split an evaluation's batch, into fewer microbatches if it doesn't divide.

        Args:
            alike: Whether into as many as on other data ranks; then it is a collective call of these.
        """
        if self._microbatches > 1:
            self._loop.refuse_list_of_samples(batch, may_be_last=True)
            size, of_all = tree.batch_size(batch), self._of_all if alike else list
            return tree.split(batch, self._most_parts(size, of_all))
        return [batch]

    def _most_parts(self, size: int, of_all: Callable[[Sequence[bool]], list[bool]]) -> int:
        numbers = range(1, self._microbatches + 1)
        return max(compress(numbers, of_all([size % number == 0 for number in numbers])))
