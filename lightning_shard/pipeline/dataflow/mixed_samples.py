"""Detects what is computed with the samples of a batch together, such as contrastive losses, and logs of an RMSE.

In one process these see the whole batch, and in a pipeline a microbatch at a time: nothing fails, and the loss or the
log is another one. So two microbatches of the first batch run once more with half of their samples exchanged. For what
is computed of each sample by itself, each stage's output has the rows of the runs before, and the sum of the two losses
is as it was. The last stage also runs on both joined to one: its loss and its logs are their mean, but for numbers that
aren't the same when a microbatch runs twice, as where random numbers are drawn. Where that isn't so, samples are
compared. Microbatches of one sample have no halves, so only the last of these runs is made.

Where samples lie in what a stage received isn't always clear: each reading is tried (``exchanged_samples.py``), and
samples are compared if they are by all.

Each stage checks its own part, on the values that it received. All runs draw the same random numbers. Where the step,
or its forwards, call other data ranks, these agree before they run it again.

Limits: with microbatches of one sample, what earlier stages compare, random numbers on the last one, and steps that
call data ranks; what only later steps compare; differences below rounding; gradients that compare samples where losses
don't (``a + b * (a.detach() / b.detach())``); networks that compute other values to send in their first forward than
later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.draws import NotesDraws
from lightning_shard.pipeline.dataflow.exchanged_samples import (
    READINGS,
    Given,
    Pair,
    exchanged,
    exchanged_halves,
    is_number,
    joined_pair,
    places,
)
from lightning_shard.pipeline.dataflow.messages import BlockCall, Key
from lightning_shard.pipeline.dataflow.search import Memory, Ran, rerun
from lightning_shard.pipeline.stages.stage import Stage

#: Calls the user's step for a stage on a microbatch, with the random numbers of the microbatch of this number.
RunOn = Callable[[Stage, int, Any], Any]

_TOLERANCE = 1e-4
"""Relative to the largest value."""
_TOLERANCE_IN_HALF = 3e-2
_TOLERANCE_ON_DEVICES = 1e-3
_ROUNDING = 1e-6
"""Absolute tolerance, for numbers that are zero but for rounding."""
_OF_REPEATED = 0.01
"""Factor on both tolerances where the same microbatch runs twice."""
_MARGIN = 4.0
"""Times the tolerance: a difference that can't be missed."""


LOSS, LOG = "loss", "log"
LENGTH = "length"
"""Of a value that the step returned: of one with a row for each sample it is the sum of two microbatches'."""
_SENT = "sent"
"""Numbers that an earlier stage sends, such as a codebook's use."""
_OF_STAGE = (LOSS, _SENT)
_THE_LOSS = (LOSS, "")


class LossOf(Enum):
    """What the loss of two microbatches at once is of their losses."""

    MEAN = "mean"
    SUM = "sum"
    NEITHER = "neither, though no sample was seen to change another's"
    MIXED = "samples are compared"


class Number(NamedTuple):
    """What a step gives for a microbatch: the loss, or what it logs.

    Attributes:
        value: Of no dimension.
        weight: Of this microbatch, in a mean of several.
        adds_up: Whether microbatches' numbers are added up, and not averaged.
    """

    value: Tensor
    weight: float = 1.0
    adds_up: bool = False


_Numbers = Mapping[tuple[str, Any], Number]
#: What a step gave, by kind (:data:`LOSS`, :data:`LOG`) and name, or :data:`LENGTH` and path; from its result, just
#: after it has run, and its microbatch as it was given.
NumbersOf = Callable[[Any, Any], _Numbers]


@dataclass(frozen=True)
class Peers:
    """The data ranks, which a step and its forwards may call.

    Attributes:
        holds_on_any: Whether a condition holds on any of those that have to run alike in a kind of step; a collective
            call of these.
        are_called: Whether the step calls them, as far as known.
    """

    holds_on_any: Callable[[str, bool], bool] = lambda _, condition: condition
    are_called: Callable[[], bool] = bool


ALONE = Peers()
"""Without other data ranks."""


@dataclass
class Findings:
    """What was found.

    Attributes:
        stages: Whose loss, or output, compares samples.
        loss: What the loss is, as far as known.
        logs: Names of logs that aren't the mean of their microbatches', or their sum.
        means: Names of logs that are, though the microbatches' differ: no function of a mean would be.
        fixed: Paths of what the step returned that is as long for two microbatches as for each.
        growing: Paths of what is as long for two as for both together.
    """

    stages: list[Stage] = field(default_factory=list)
    loss: LossOf | None = None
    logs: list[str] = field(default_factory=list)
    means: list[str] = field(default_factory=list)
    fixed: set[tree.Path] = field(default_factory=set)
    growing: set[tree.Path] = field(default_factory=set)


@dataclass(frozen=True)
class _Run:
    """What a stage received, sent and told for a microbatch, without a graph."""

    i: int
    received: dict[Key, Tensor]
    sent: dict[Key, Tensor]
    numbers: _Numbers

    @classmethod
    def of(cls, i: int, ran: Ran, microbatch: Any, numbers_of: NumbersOf) -> _Run:
        sent = {key: tensor.detach() for key, tensor in ran.passage.sent.items()}
        received = {key: tensor.detach().clone() for key, tensor in ran.passage.received.items()}
        if ran.stage.is_last:
            return cls(i, received, sent, numbers_of(ran.result, microbatch))
        return cls(i, received, sent, {(_SENT, str(key)): Number(t) for key, t in sent.items() if is_number(t)})


@dataclass
class _Lengths:
    """How long for two microbatches as one is what a step returned.

    A reading that takes something else for samples lengthens nothing: what is fixed is so in all readings, what grows
    in one.

    Attributes:
        fixed: Paths of what is as long as for each; ``None`` before a reading.
        growing: Paths of what is as long as for both together.
    """

    fixed: set[tree.Path] | None = None
    growing: set[tree.Path] = field(default_factory=set)

    def add(self, one: _Run, alone: _Run | None, joined: _Run | None) -> None:
        """Compare the runs' lengths.

        Of what varies, such as detections, the first may have as many as both; where there are none, nothing is known.
        """
        if alone is None or joined is None:
            return
        fixed = set()
        for kind, path in one.numbers.keys() & alone.numbers.keys() & joined.numbers.keys():
            if kind == LENGTH:
                first, second, both = (float(run.numbers[kind, path].value) for run in (one, alone, joined))
                if both == first + second > 0:
                    self.growing.add(path)
                elif both == first == second > 0:
                    fixed.add(path)
        self.fixed = fixed if self.fixed is None else self.fixed & fixed


@dataclass(frozen=True)
class _Runs:
    """The runs that are compared.

    Attributes:
        one: Of the first microbatch, in its turn.
        other: Of the second one, in its turn.
        alone: Of the second one, with the random numbers of the first, as the following.
        together: Of the first one with half of the second one's samples; ``None`` if they have one each.
        rest: Of the second one with half of the first one's; ``None`` too if there are no numbers to add up.
        joined: Of both as one; ``None`` on earlier stages, which send as many samples as agreed on; without numbers;
            or if the code can't run on as many samples.
    """

    one: _Run
    other: _Run
    alone: _Run
    together: _Run | None
    rest: _Run | None
    joined: _Run | None

    def send_the_same(self) -> bool:
        """Whether all runs have sent values of the same names: not of a network that changes in its first forward."""
        runs = (self.alone, self.together, self.joined)
        return all(run.sent.keys() == self.one.sent.keys() for run in runs if run is not None)

    def compares(self, size: int) -> bool:
        """Whether the stage compares the samples of a microbatch, of this size."""
        if self.together is not None:
            before, alone = self.one.sent, self.alone.sent
            rows = (_has_rows(sent, before[key], alone[key], size) for key, sent in self.together.sent.items())
            if not all(rows) or not self._adds_up():
                return True
        is_sum = self.loss() is LossOf.SUM
        return any(key[0] in _OF_STAGE and not (is_sum and key == _THE_LOSS) for key in self._unlike())

    def loss(self) -> LossOf | None:
        """What the loss is; ``None`` if there is none, or it isn't known."""
        if _THE_LOSS not in self.one.numbers:
            return None
        if not self._adds_up():
            return LossOf.MIXED
        if self.joined is None or _THE_LOSS not in self._repeated():
            return None
        if _THE_LOSS not in self._unlike():
            return LossOf.MEAN
        total = self.one.numbers[_THE_LOSS].value + self.alone.numbers[_THE_LOSS].value
        return LossOf.SUM if _is_close(self.joined.numbers[_THE_LOSS].value, total) else LossOf.NEITHER

    def logs(self) -> tuple[list[str], list[str]]:
        """The names of logs that aren't means, and of those that are and couldn't be if they were functions of one."""
        unlike, joined = self._unlike(), self.joined.numbers if self.joined is not None else {}
        means = [name for kind, name in self._repeated() if kind == LOG and (kind, name) in joined]
        one, alone = self.one.numbers, self.alone.numbers
        telling = [name for name in means if _differ_much(one[LOG, name], alone[LOG, name])]
        return [name for kind, name in unlike if kind != LENGTH], [n for n in telling if (LOG, n) not in unlike]

    def _adds_up(self) -> bool:
        if self.together is None or self.rest is None:
            return True
        return _add_up(self.one.numbers, self.alone.numbers, self.together.numbers, self.rest.numbers)

    def _repeated(self) -> _Numbers:
        return _repeated(self.one.numbers, self.alone.numbers, self.other.numbers)

    def _unlike(self) -> list[tuple[str, Any]]:
        return _unlike(self.joined.numbers, self._repeated(), self.alone.numbers) if self.joined is not None else []


class MixedSamples:
    """Runs the check, once for each kind of step on each stage of this rank.

    Args:
        remember: Takes a snapshot of what a step may change beside gradients.
        peers: All have to run a step equally often that calls them.
    """

    def __init__(self, remember: Callable[[], Memory], peers: Peers = ALONE) -> None:
        self._remember = remember
        self._peers = peers
        self._first: dict[int, _Run] = {}
        self._checked: set[tuple[str, int]] = set()
        self._found = Findings()
        self._lengths = _Lengths()

    def ran(self, kind: str, i: int, ran: Ran, microbatches: Sequence[Any], run: RunOn, numbers_of: NumbersOf) -> None:
        """Microbatch ``i`` has run on one of this rank's stages, forward; check it with the one before.

        Raises:
            StepError: The step calls other data ranks, and failed on this one when it ran again.
        """
        stage = ran.stage
        if (kind, stage.index) in self._checked:
            return
        one, other = self._first.get(stage.index), _Run.of(i, ran, microbatches[i], numbers_of)
        self._first[stage.index] = other
        if one is None or one.i + 1 != i:
            return
        self._checked.add((kind, stage.index))
        del self._first[stage.index]
        pair = Pair(microbatches[one.i], microbatches[i], one.received, other.received, ran.crossing.incoming.blocks)
        judged, loss = False, None
        clean: list[_Runs] = []
        lengths = self._lengths = _Lengths()
        for reading in range(READINGS):
            given = self._to_run(kind, pair, reading, has_numbers=bool(one.numbers), is_last=stage.is_last)
            if not given:
                break
            runs = self._runs(ran, run, numbers_of, given, one, other, pair.size)
            if runs is not None and (not clean or _THE_LOSS not in one.numbers):
                judged, loss = True, runs.loss() or loss
                clean += [] if runs.compares(pair.size) else [runs]
            # where there is no loss, means that a reading makes other numbers of show that it is wrong, as do lengths
            is_open = not clean or bool(lengths.fixed) or (_THE_LOSS not in one.numbers and bool(_logs_of(clean)[0]))
            if not self._peers.holds_on_any(kind, is_open and reading + 1 < pair.readings()):
                break
        if judged and not clean:
            self._found.stages.append(stage)
        self._found.fixed |= (lengths.fixed or set()) - lengths.growing
        self._found.growing |= lengths.growing
        self._found.loss = loss if stage.is_last else self._found.loss
        logs, means = _logs_of(clean)
        self._found.logs += logs
        self._found.means += means

    def _runs(
        self,
        ran: Ran,
        run: RunOn,
        numbers_of: NumbersOf,
        given: Sequence[Given | None],
        one: _Run,
        other: _Run,
        size: int,
    ) -> _Runs | None:
        """Make the runs of a reading; ``None`` if they can't be judged."""
        alone, together, rest, joined = self._run_again(ran, run, one, numbers_of, given)
        needed = [alone, joined] if size == 1 else [alone, together, *([rest] if one.numbers else [])]
        if alone is None or any(each is None for each in needed):
            return None
        runs = _Runs(one, other, alone, together, rest, joined)
        return runs if runs.send_the_same() else None

    def _to_run(
        self, kind: str, pair: Pair, reading: int, *, has_numbers: bool, is_last: bool
    ) -> Sequence[Given | None]:
        """What a stage has to run: the second microbatch, the two with halves exchanged, and both joined.

        Empty if nothing can be judged; the same on all peers.
        """
        halves = exchanged_halves(pair, reading) if has_numbers or not is_last else None
        # a run that fails would be one call less of data ranks: if these are called, it isn't begun
        can_join = is_last and has_numbers and not self._peers.are_called()
        if self._peers.holds_on_any(kind, halves is None) or halves is None:
            joined = joined_pair(pair, reading) if can_join and pair.size == 1 else None
            if self._peers.holds_on_any(kind, joined is None):
                return ()
            return pair.second, None, None, joined
        joined = joined_pair(pair, reading) if can_join else None
        if is_last and has_numbers and self._peers.holds_on_any(kind, joined is None):
            joined = None
        mixed, remaining = halves
        return pair.second, mixed, remaining if has_numbers else None, joined

    def _run_again(
        self, ran: Ran, run: RunOn, one: _Run, numbers_of: NumbersOf, given: Sequence[Given | None]
    ) -> list[_Run | None]:
        """Run a stage on each of what is given, of which the last is two microbatches joined; put back what changes.

        All runs have the random numbers of the first microbatch. The result is ``None`` where nothing is given, where
        the code needs what a batch's samples have in common, such as an order by length, and of the last where it
        draws random numbers: of those the second microbatch gets others.
        """
        memory = self._remember()
        *single, joined = given

        def again(microbatch: Any, received: Mapping[Key, Tensor], calls: dict[int, BlockCall] | None) -> _Run | None:
            try:
                before = ran if calls is None else ran.after(calls)
                result = rerun(before, lambda stage, number: run(stage, number, microbatch), one.i, received)
                return _Run.of(one.i, result, microbatch, numbers_of)
            except Exception as error:
                if self._peers.are_called():
                    raise StepError(_FAILED) from error
                return None
            finally:
                memory.put_back()

        try:
            runs = [None if each is None else again(*each) for each in single]
            with NotesDraws() as notes:
                runs.append(None if joined is None else again(*joined))
            self._lengths.add(one, runs[0], runs[-1])
            return runs if not notes.has_drawn else [*runs[:-1], None]
        finally:
            memory.forget()

    def take(self) -> Findings:
        """What was found since the last call."""
        found, self._found = self._found, Findings()
        return found

    def ends(self) -> None:
        """The batch ends."""
        self._first.clear()


_FAILED = (
    "The step calls other data ranks (itself, or in its forwards), and failed when it ran on other samples of the same"
    " batch, as it does in the first batch to find out whether it compares samples. The others would wait for this"
    " rank: make it independent of what a batch's samples have in common, such as an order by length, or use"
    " microbatches=1 or data_parallel_size=1."
)


def _logs_of(readings: Sequence[_Runs]) -> tuple[list[str], list[str]]:
    """The names of logs that are means in no reading, and of those that are means in any, and no functions of one."""
    found = [runs.logs() for runs in readings if runs.joined is not None]
    if not found:
        return [], []
    first, *others = found
    means = dict.fromkeys(name for _, each in found for name in each)
    return [name for name in first[0] if all(name in unlike for unlike, _ in others)], list(means)


def _tolerance(tensor: Tensor) -> float:
    tolerance = _TOLERANCE_IN_HALF if tensor.dtype in (torch.bfloat16, torch.float16) else _TOLERANCE
    return tolerance if tensor.device.type == "cpu" else max(tolerance, _TOLERANCE_ON_DEVICES)


def _add_up(one: _Numbers, alone: _Numbers, together: _Numbers, rest: _Numbers) -> bool:
    """Whether losses, and numbers sent, add up to the same before and after the exchange."""
    for key in one:
        if key[0] in _OF_STAGE:
            losses = torch.stack([each[key].value.double() * each[key].weight for each in (one, alone, together, rest)])
            difference = (losses[0] + losses[1] - losses[2] - losses[3]).abs()
            if bool(difference > _tolerance(one[key].value) * losses.abs().max()):  # not if it is NaN
                return False
    return True


def _repeated(one: _Numbers, alone: _Numbers, other: _Numbers) -> _Numbers:
    """The first microbatch's numbers, without those that differ between two runs of the second one, as a time does.

    None where the loss does, or without a loss any: then random numbers are drawn, and others are the same by chance.
    """
    known = one.keys() & alone.keys() & other.keys()
    same = {key for key in known if _is_close(alone[key].value, other[key].value, share=_OF_REPEATED)}
    deciding = {key for key in one if key[0] == LOSS} or set(one)
    return {key: one[key] for key in same} if deciding <= same else {}


def _differ_much(one: Number, other: Number) -> bool:
    """So much that the mean of a function's values would be seen to differ from its value at the mean.

    Of an exponential or a root it differs by about an eighth of the square of the values' relative difference.
    """
    first, second = float(one.value), float(other.value)
    share = max(0.1, (8 * _MARGIN * _tolerance(one.value)) ** 0.5)
    return abs(first - second) > share * max(abs(first), abs(second))


def _unlike(joined: _Numbers, one: _Numbers, other: _Numbers) -> list[tuple[str, Any]]:
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
    """Whether a stage's output is the first run's, with half of the samples of the other's.

    Of an output in which they may lie in several places any may be right: a recurrent layer's states have them second.
    A vector may be of features.
    """
    if not together.is_floating_point() or not one.shape == alone.shape == together.shape:
        return True
    shape = tuple(together.shape)
    if len(shape) == 1 and shape[0] != size:
        return True
    found = places(shape, size)
    return not found or any(_are_same(together, exchanged(one, alone, place)) for place in found)


def _are_same(found: Tensor, expected: Tensor) -> bool:
    if not expected.numel():
        return True
    largest = expected.abs().max().double()
    return not bool((found - expected).abs().max() > _tolerance(found) * largest)
