"""Detects what is computed with the samples of a batch together, such as contrastive losses, and logs of an RMSE.

In one process these see the whole batch, and in a pipeline a microbatch at a time: nothing fails, and the loss or the
log is another one. So two microbatches of the first batch run once more with half of their samples exchanged. For what
is computed of each sample by itself, each stage's output has the rows of the runs before, and the sum of the two losses
is as it was. The last stage also runs on both joined to one: its loss and its logs are their mean, but for numbers that
aren't the same when a microbatch runs twice, as where random numbers are drawn. Where that isn't so, samples are
compared.

Each stage checks its own part, on the values that it received. All runs draw the same random numbers.

Limits: microbatches of one sample; what only later steps compare; differences below rounding; gradients that compare
samples where losses don't (``a + b * (a.detach() / b.detach())``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import BatchError
from lightning_shard.pipeline.dataflow.messages import Key
from lightning_shard.pipeline.dataflow.search import Memory, Ran, rerun
from lightning_shard.pipeline.stages.stage import Stage

#: Calls the user's step for a stage on a microbatch, with the random numbers of the microbatch of this number.
RunOn = Callable[[Stage, int, Any], Any]

_TOLERANCE = 1e-4
"""Relative to the largest value."""
_TOLERANCE_IN_HALF = 3e-2
_TOLERANCE_ON_DEVICES = 1e-3
_ROUNDING = 1e-6
"""Of numbers that are zero but for it."""
_OF_REPEATED = 0.01
"""A share of both, where the same is computed twice."""


LOSS = "loss"
_SENT = "sent"
"""Numbers that an earlier stage sends, such as a codebook's use."""
_OF_STAGE = (LOSS, _SENT)


class Told(NamedTuple):
    """A number that a step tells of a microbatch: the loss, or what it logs.

    Attributes:
        value: Of no dimension.
        weight: Of this microbatch, in a mean of several.
        adds_up: Whether microbatches' numbers are added up, and not averaged.
    """

    value: Tensor
    weight: float = 1.0
    adds_up: bool = False


#: What a step told, by kind (:data:`LOSS` or another) and name; from its result, just after it has run.
NumbersOf = Callable[[Any], dict[tuple[str, str], Told]]


@dataclass
class Mixed:
    """What was found.

    Attributes:
        stages: Whose loss, or output, compares samples.
        numbers: Names of other numbers that aren't the mean of their microbatches', or their sum.
        means: Names of numbers that are, though the microbatches' differ: no function of a mean would be.
    """

    stages: list[Stage] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    means: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Run:
    """What a stage received, sent and told for a microbatch, without a graph."""

    i: int
    received: dict[Key, Tensor]
    sent: dict[Key, Tensor]
    numbers: dict[tuple[str, str], Told]

    @classmethod
    def of(cls, i: int, ran: Ran, numbers_of: NumbersOf) -> _Run:
        sent = {key: tensor.detach() for key, tensor in ran.passage.sent.items()}
        received = {key: tensor.detach().clone() for key, tensor in ran.passage.received.items()}
        if ran.stage.is_last:
            return cls(i, received, sent, numbers_of(ran.result))
        return cls(i, received, sent, {(_SENT, str(key)): Told(t) for key, t in sent.items() if _is_number(t)})


class MixedSamples:
    """Runs the check, once for each kind of step on each stage of this rank.

    Args:
        remember: Takes a snapshot of what a step may change beside gradients.
    """

    def __init__(self, remember: Callable[[], Memory]) -> None:
        self._remember = remember
        self._first: dict[int, _Run] = {}
        self._checked: set[tuple[str, int]] = set()
        self._found = Mixed()

    def ran(self, kind: str, i: int, ran: Ran, microbatches: Sequence[Any], run: RunOn, numbers_of: NumbersOf) -> None:
        """Microbatch ``i`` has run on one of this rank's stages, forward; check it with the one before."""
        stage = ran.stage
        if (kind, stage.index) in self._checked:
            return
        one, other = self._first.get(stage.index), _Run.of(i, ran, numbers_of)
        self._first[stage.index] = other
        if one is None or one.i + 1 != i:
            return
        self._checked.add((kind, stage.index))
        del self._first[stage.index]
        size = tree.batch_size(microbatches[i])
        mixed = _mixed(microbatches[one.i], microbatches[i], one.received, other.received, size)
        if mixed is None or (stage.is_last and not one.numbers):
            return
        memory = self._remember()

        def again(microbatch: Any, received: Mapping[Key, Tensor]) -> _Run:
            """With the random numbers of the first of the two."""
            try:
                result = rerun(ran, lambda stage, number: run(stage, number, microbatch), one.i, received)
                return _Run.of(one.i, result, numbers_of)
            finally:
                memory.put_back()

        with suppress(Exception):  # code may need what a batch's samples have in common, such as an order by length
            alone = again(microbatches[i], other.received)
            together = again(*mixed.given[0])
            rows = [_has_rows(sent, one.sent[key], alone.sent[key], size) for key, sent in together.sent.items()]
            compares = not all(rows)
            if one.numbers:
                rest = again(*mixed.given[1])
                compares |= not _add_up(one.numbers, alone.numbers, together.numbers, rest.numbers)
                same = _repeated(one.numbers, alone.numbers, other.numbers)
                with suppress(Exception):  # code may know the number of samples from an earlier stage
                    joined = again(*_joined(microbatches[one.i], microbatches[i], one.received, other.received, size))
                    unlike = _unlike(joined.numbers, same, alone.numbers)
                    compares |= any(kind in _OF_STAGE for kind, _ in unlike)
                    if mixed.can_be_judged and not compares:
                        self._found.numbers += [name for _, name in unlike]
                        means = [key for key in same if key in joined.numbers and key not in unlike]
                        self._found.means += [k[1] for k in means if _differ_much(one.numbers[k], alone.numbers[k])]
            if compares and mixed.can_be_judged:
                self._found.stages.append(stage)
        memory.forget()

    def take(self) -> Mixed:
        """What was found since the last call."""
        found, self._found = self._found, Mixed()
        return found

    def ends(self) -> None:
        """The batch ends."""
        self._first.clear()


_Given = tuple[Any, dict[Key, Tensor]]


@dataclass(frozen=True)
class _Exchanged:
    """Two microbatches, and what was received for them, with half of their samples exchanged.

    Attributes:
        can_be_judged: Whether nothing was received that depends on the microbatch as a whole, in a way unknown here.
    """

    given: tuple[_Given, _Given]
    can_be_judged: bool


def _mixed(
    one: Any, other: Any, received: Mapping[Key, Tensor], other_received: Mapping[Key, Tensor], size: int
) -> _Exchanged | None:
    """Exchange half of the samples.

    ``None`` if the structures differ, if the microbatches hold one sample each, or if it isn't clear which dimension of
    a received value counts the samples. It depends on shapes only: a step may call its data ranks, so all have to run
    equally often.
    """
    if size < 2 or received.keys() != other_received.keys():
        return None
    given: tuple[dict[Key, Tensor], dict[Key, Tensor]] = ({}, {})
    can_be_judged = True
    for key, value in received.items():
        twin = other_received[key]
        if value.shape != twin.shape:
            return None
        if _is_number(value):
            exchanged = (value + twin) / 2, (value + twin) / 2  # right for means; the stage that sends it checks that
        elif not _counts_samples(key, value, size):
            can_be_judged &= torch.equal(value, twin)
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
    return _Exchanged(((parts[0], given[0]), (parts[1], given[1])), can_be_judged)


def _joined(
    one: Any, other: Any, received: Mapping[Key, Tensor], other_received: Mapping[Key, Tensor], size: int
) -> _Given:
    """One microbatch of the samples of two that can be exchanged.

    Raises:
        BatchError: They can't be joined.
    """
    given = {}
    for key, value in received.items():
        if _is_number(value):
            given[key] = (value + other_received[key]) / 2
        elif _counts_samples(key, value, size):
            given[key] = torch.cat([value, other_received[key]])
        else:
            given[key] = value
    return tree.joined(one, other, size), given


def _is_number(value: Tensor) -> bool:
    return value.ndim == 0 and value.is_floating_point()


def _counts_samples(key: Key, value: Tensor, size: int) -> bool:
    return key[0] != "parameter" and value.ndim > 0 and value.size(0) == size


def _exchanged(tensor: Tensor, other: Tensor) -> Tensor:
    half = len(tensor) // 2
    return torch.cat([other[:half], tensor[half:]])


def _tolerance(tensor: Tensor) -> float:
    tolerance = _TOLERANCE_IN_HALF if tensor.dtype in (torch.bfloat16, torch.float16) else _TOLERANCE
    return tolerance if tensor.device.type == "cpu" else max(tolerance, _TOLERANCE_ON_DEVICES)


_Numbers = Mapping[tuple[str, str], Told]


def _add_up(one: _Numbers, alone: _Numbers, together: _Numbers, rest: _Numbers) -> bool:
    """Whether losses, and numbers sent, add up to the same before and after the exchange."""
    for key in one:
        if key[0] in _OF_STAGE:
            losses = torch.stack([each[key].value.double() * each[key].weight for each in (one, alone, together, rest)])
            difference = (losses[0] + losses[1] - losses[2] - losses[3]).abs()
            if bool(difference > _tolerance(one[key].value) * losses.abs().max()):  # not if it is NaN
                return False
    return True


def _repeated(one: _Numbers, alone: _Numbers, other: _Numbers) -> dict[tuple[str, str], Told]:
    """The first microbatch's numbers, without those that differ between two runs of the second one, as a time does.

    None where the loss does, or without a loss any: then random numbers are drawn, and others are the same by chance.
    """
    known = one.keys() & alone.keys() & other.keys()
    same = {key for key in known if _is_close(alone[key].value, other[key].value, share=_OF_REPEATED)}
    deciding = {key for key in one if key[0] == LOSS} or set(one)
    return {key: one[key] for key in same} if deciding <= same else {}


def _differ_much(one: Told, other: Told) -> bool:
    """By a tenth, so that the mean of a function's values would be seen to differ from its value at the mean."""
    first, second = float(one.value), float(other.value)
    return abs(first - second) > 0.1 * max(abs(first), abs(second))


def _unlike(joined: _Numbers, one: _Numbers, other: _Numbers) -> list[tuple[str, str]]:
    """The numbers of two microbatches at once that aren't the mean of theirs, or their sum."""
    found = []
    for key in sorted(one.keys() & joined.keys()):
        parts = one[key], other[key]
        total = sum(part.value.double() * (1.0 if part.adds_up else part.weight) for part in parts)
        expected = total if one[key].adds_up else total / sum(part.weight for part in parts)
        if not _is_close(joined[key].value, torch.as_tensor(expected)):
            found.append(key)
    return found


def _is_close(one: Tensor, other: Tensor, share: float = 1.0) -> bool:
    difference, largest = (one.double() - other.double()).abs(), torch.maximum(one.double().abs(), other.double().abs())
    return not bool(difference > share * (_tolerance(one) * largest + _ROUNDING))  # also if it is NaN


def _has_rows(together: Tensor, one: Tensor, alone: Tensor, size: int) -> bool:
    """Whether a stage's output is the first run's, with half of the rows of the other's."""
    if not together.is_floating_point() or not together.ndim or together.size(0) != size:
        return True
    expected = _exchanged(one, alone)
    if together.shape != expected.shape:
        return True
    largest = expected.abs().max().double()
    return not bool((together - expected).abs().max() > _tolerance(together) * largest)
