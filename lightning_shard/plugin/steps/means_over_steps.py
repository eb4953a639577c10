"""Has batches count alike in means over steps, into however many microbatches each is split.

A step that gives its loss to a torchmetrics ``MeanMetric`` does so once for each microbatch, and a smaller last batch
may have fewer of them. So there each one counts for several. A list of losses can't be mended: it is told of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor

from lightning_shard.state.patch import Change


class MeansOverSteps:
    """Follows the steps of one module; outside of steps nothing is weighed."""

    def __init__(self) -> None:
        self._weight = 1.0
        self._microbatch = 0
        self._samples = 1

    @contextmanager
    def batch(self, parts: int, whole: int) -> Iterator[None]:
        """Context of a batch's steps.

        Args:
            parts: The number of its microbatches.
            whole: That of a whole batch.
        """
        self._weight = whole / parts
        try:
            yield
        finally:
            self._weight = 1.0

    def begin_microbatch(self, samples: int) -> None:
        """A step begins, on so many samples."""
        self._microbatch += 1
        self._samples = samples

    def weighing(self, update: Callable[..., None]) -> Callable[..., None]:
        """A ``MeanMetric``'s update, for which a number without a weight has its batch's.

        A metric that was given as many numbers as a microbatch had samples counts these, and is left as it is.
        """
        given = _Given()

        @wraps(update)
        def weighed(value: Any, weight: Any = None) -> None:
            given.note(self._microbatch, self._samples)
            is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
            if weight is None and self._weight != 1.0 and is_number and not given.of_samples:
                weight = self._weight
            update(value, weight)

        return weighed


@dataclass
class _Given:
    """What a metric is given in a microbatch: so many numbers, for so many samples; and whether one for each."""

    microbatch: int = -1
    samples: int = 1
    numbers: int = 0
    of_samples: bool = False

    def note(self, microbatch: int, samples: int) -> None:
        if microbatch != self.microbatch:
            if self.samples > 1:  # one number for one sample may be either
                self.of_samples = self.numbers == self.samples
            self.microbatch, self.samples, self.numbers = microbatch, samples, 0
        self.numbers += 1


class UnevenLists:
    """Warns, once for each, of lists to which steps add a number for each microbatch, where a batch has fewer."""

    def __init__(self) -> None:
        self._most: dict[tuple[str, str], int] = {}
        self._told: set[tuple[str, str]] = set()

    def look(self, changes: Mapping[tuple[str, str], Any], parts: int) -> None:
        """A batch of this number of microbatches has changed this on the last stage: by module and attribute."""
        for key, change in changes.items():
            if not isinstance(change, Change) or not _adds_numbers(change, parts):
                continue
            most = self._most[key] = max(self._most.get(key, 0), parts)
            if parts < most and key not in self._told:
                self._told.add(key)
                warnings.warn(
                    f"A step adds a number to {'.'.join(filter(None, ('self', *key)))} for each microbatch: {most} in"
                    f" earlier batches, and {parts} in this smaller one. A mean over them counts this batch less than"
                    " one process would: use a torchmetrics MeanMetric, in which batches count alike, or"
                    " microbatches=1.",
                    stacklevel=2,
                )


def _adds_numbers(change: Change, parts: int) -> bool:
    """Whether to a list, or to one that it holds, one number was added for each microbatch."""
    adds = not change.replaces and len(change.added) == parts and all(map(_is_number, change.added))
    return adds or any(_adds_numbers(each, parts) for each in change.inner.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point())
