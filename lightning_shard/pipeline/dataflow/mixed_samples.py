"""Detects losses and networks that compute with the samples of a batch together, such as contrastive losses.

In one process these see the whole batch, and in a pipeline a microbatch at a time: nothing fails, and the loss is
another one. So two microbatches of the first batch run once more with half of their samples exchanged. For what is
computed of each sample by itself, each stage's output has the rows of the runs before, and the sum of the two losses is
as it was. Where the last stage draws no random numbers, it also runs on both joined to one, whose loss is their mean.
Where that isn't so, samples are compared.

Each stage checks its own part, on the values that it received. All runs draw the same random numbers.

Limits: microbatches of one sample; what only later steps compare; differences below rounding; gradients that compare
samples where losses don't (``a + b * (a.detach() / b.detach())``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import BatchError
from lightning_shard.pipeline.dataflow.messages import Key
from lightning_shard.pipeline.dataflow.search import Memory, Ran, rerun
from lightning_shard.pipeline.stages.stage import Stage

#: Calls the user's step for a stage on a microbatch, with the random numbers of the microbatch of this number.
RunOn = Callable[[Stage, int, Any], Any]

_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Relative to the largest value."""
_TOLERANCE_IN_HALF = 3e-2
_TOLERANCE_ON_DEVICES = 1e-3


@dataclass(frozen=True)
class _Run:
    """What a stage received, sent and returned for a microbatch, without a graph."""

    i: int
    received: dict[Key, Tensor]
    sent: dict[Key, Tensor]
    loss: Tensor | None

    @classmethod
    def of(cls, i: int, ran: Ran, loss_of: Callable[[Any], Tensor]) -> _Run:
        sent = {key: tensor.detach() for key, tensor in ran.passage.sent.items()}
        received = {key: tensor.detach().clone() for key, tensor in ran.passage.received.items()}
        return cls(i, received, sent, loss_of(ran.result).detach().clone() if ran.stage.is_last else None)


class MixedSamples:
    """Runs the check, once for each stage of this rank.

    Args:
        remember: Takes a snapshot of what a step may change beside gradients.
    """

    def __init__(self, remember: Callable[[], Memory]) -> None:
        self._remember = remember
        self._first: dict[int, _Run] = {}
        self._checked: set[int] = set()
        self._found: list[Stage] = []

    def ran(self, i: int, ran: Ran, microbatches: Sequence[Any], run: RunOn, loss_of: Callable[[Any], Tensor]) -> None:
        """Microbatch ``i`` has run on one of this rank's stages, forward; check it with the one before."""
        stage = ran.stage
        if stage.index in self._checked:
            return
        one, other = self._first.get(stage.index), _Run.of(i, ran, loss_of)
        self._first[stage.index] = other
        if one is None or one.i + 1 != i:
            return
        self._checked.add(stage.index)
        del self._first[stage.index]
        size = tree.batch_size(microbatches[i])
        mixed = _mixed(microbatches[one.i], microbatches[i], one.received, other.received, size)
        if mixed is None:
            return
        memory = self._remember()

        def again(microbatch: Any, received: Mapping[Key, Tensor]) -> _Run:
            try:
                result = rerun(ran, lambda stage, number: run(stage, number, microbatch), one.i, received)
            finally:
                memory.put_back()
            return _Run.of(one.i, result, loss_of)

        with suppress(Exception):  # code may need what a batch's samples have in common, such as an order by length
            alone = again(microbatches[i], other.received)  # with the random numbers of the first
            together = again(*mixed[0])
            if stage.is_last:
                losses = [each.loss for each in (one, alone, together, again(*mixed[1]))]
                is_mixed = not _add_up(*losses)  # type: ignore[arg-type]
                joined = _joined(microbatches[one.i], microbatches[i], one.received, other.received, size)
                if not is_mixed and joined is not None and _is_close(alone.loss, other.loss):
                    with suppress(Exception):  # code may know the number of samples from an earlier stage
                        is_mixed = not _is_mean(again(*joined).loss, one.loss, alone.loss)
            else:
                is_mixed = not all(
                    _has_rows(tensor, one.sent[key], alone.sent[key], size) for key, tensor in together.sent.items()
                )
            if is_mixed:
                self._found.append(stage)
        memory.forget()

    def take(self) -> list[Stage]:
        """The stages that were found since the last call."""
        found, self._found = self._found, []
        return found

    def ends(self) -> None:
        """The batch ends."""
        self._first.clear()


_Given = tuple[Any, dict[Key, Tensor]]


def _mixed(
    one: Any, other: Any, received: Mapping[Key, Tensor], other_received: Mapping[Key, Tensor], size: int
) -> tuple[_Given, _Given] | None:
    """Two microbatches, and what was received for them, with half of their samples exchanged.

    It is ``None`` if their structures differ, if they hold one sample each, or if it isn't clear which dimension of a
    received value counts the samples.
    """
    if size < 2 or received.keys() != other_received.keys():
        return None
    given: tuple[dict[Key, Tensor], dict[Key, Tensor]] = ({}, {})
    for key, value in received.items():
        twin = other_received[key]
        if value.shape != twin.shape or not _counts_samples(key, value, size):
            if value.shape != twin.shape or not torch.equal(value, twin):
                return None
            exchanged = value, twin
        elif size in value.shape[1:]:
            return None
        else:
            exchanged = _exchanged(value, twin), _exchanged(twin, value)
        for each, tensor in zip(given, exchanged):
            each[key] = tensor
    try:
        parts = tree.with_half_of(one, other, size), tree.with_half_of(other, one, size)
    except BatchError:
        return None
    return (parts[0], given[0]), (parts[1], given[1])


def _joined(
    one: Any, other: Any, received: Mapping[Key, Tensor], other_received: Mapping[Key, Tensor], size: int
) -> _Given | None:
    """One microbatch of the samples of two that can be exchanged; ``None`` if they can't be joined."""
    given = {
        key: torch.cat([value, other_received[key]]) if _counts_samples(key, value, size) else value
        for key, value in received.items()
    }
    try:
        return tree.joined(one, other, size), given
    except BatchError:
        return None


def _counts_samples(key: Key, value: Tensor, size: int) -> bool:
    return key[0] != "parameter" and value.ndim > 0 and value.size(0) == size


def _exchanged(tensor: Tensor, other: Tensor) -> Tensor:
    half = len(tensor) // 2
    return torch.cat([other[:half], tensor[half:]])


def _tolerance(tensor: Tensor) -> float:
    tolerance = _TOLERANCES.get(tensor.dtype, _TOLERANCE_IN_HALF)
    return tolerance if tensor.device.type == "cpu" else max(tolerance, _TOLERANCE_ON_DEVICES)


def _add_up(one: Tensor, alone: Tensor, together: Tensor, rest: Tensor) -> bool:
    """Whether the losses add up to the same before and after the exchange."""
    losses = torch.stack([each.reshape(()).double() for each in (one, alone, together, rest)])
    difference = (losses[0] + losses[1] - losses[2] - losses[3]).abs()
    return not bool(difference > _tolerance(one) * losses.abs().max())  # also if it is NaN


def _is_close(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return not bool((one - other).abs() > _tolerance(one) * torch.maximum(one.abs(), other.abs()))


def _is_mean(joined: Tensor | None, one: Tensor | None, other: Tensor | None) -> bool:
    """Whether the loss of two microbatches at once is the mean of theirs."""
    assert one is not None
    assert other is not None
    return _is_close(joined, (one + other) / 2)


def _has_rows(together: Tensor, one: Tensor, alone: Tensor, size: int) -> bool:
    """Whether a stage's output is the first run's, with half of the rows of the other's."""
    if not together.is_floating_point() or not together.ndim or together.size(0) != size:
        return True
    expected = _exchanged(one, alone)
    if together.shape != expected.shape:
        return True
    largest = expected.abs().max().double()
    return not bool((together - expected).abs().max() > _tolerance(together) * largest)
