"""The named schedules: GPipe, 1F1B, interleaved, zero-bubble and V-shaped ones.

*P* is the number of ranks, *v* that of stages per rank, *n* that of microbatches; ranks *r* count from 0. F, I and W
are the times of a stage's forward and of the two parts of its backward, B = I + W. The bubble is a rank's idle time. In
flight are the forwards whose activations a rank keeps. With v stages per rank, a stage has 1/v of the blocks, and its
activations are that much smaller::

    name                    stages of r      in flight                      bubble
    GPipe                   r                n                              (P − 1)(F + B)
    1F1B                    r                P − r                          (P − 1)(F + B)
    Eager1F1B               r                2(P − 1 − r) + 1               (P − 1)(F + B); mostly less than 1F1B's if
                                                                            stages differ or transfers take time
    Interleaved1F1B         r, r + P, …      (v − 1)g + 2(P − 1 − r) + 1    (P − 1)(F + B)
    InterleavedZeroBubble   r, r + P, …      (v − 1)g + P                   (P − 1)(F + I − min(F, I, W))
    ZBVZeroBubble           V of two         2P                             (P − 1)F, if F = I = W
    DualPipeV               V of two         2P + 1                         (P − 1)F, if F = I = W

where g is the size of the largest round: microbatches pass through the stages in rounds of P or slightly more. In a V,
the last rank holds the first and the last stage, the rank before it the second and the second-to-last, and so on.

Sources: GPipe arXiv:1811.06965; 1F1B (PipeDream-flush) arXiv:2006.09503, eager arXiv:2211.05322, interleaved
arXiv:2104.04473; zero bubble and its V arXiv:2401.10241; DualPipe arXiv:2412.19437, and as a V in
github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_shard.arguments import check_count
from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.schedule import Action, Kind, Row, Schedule, read_csv


class _RowBuilder:
    """Builds the order of one rank: each action takes its stage's next microbatch."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._taken: Counter[tuple[int, str]] = Counter()
        self._pending: list[Action] = []

    def forward(self, stage: int) -> None:
        self._take(stage, "F")

    def backward(self, stage: int) -> None:
        self._take(stage, "B")

    def inputs(self, stage: int) -> None:
        """Append the first part of a backward; the second part is pending."""
        self._take(stage, "I")
        self._pending.append(self._actions[-1]._replace(kind="W"))

    def weights(self) -> None:
        """Append the second part of the backward that has been pending longest."""
        self._actions.append(self._pending.pop(0))

    def parts(self, stage: int) -> None:
        """Append both parts of a backward: the previous stage needn't wait for the second."""
        self.inputs(stage)
        self._actions.append(self._pending.pop())

    def forwards(self, stage: int) -> int:
        return self._taken[stage, "F"]

    def done(self) -> Row:
        while self._pending:
            self.weights()
        return tuple(self._actions)

    def _take(self, stage: int, kind: Kind) -> None:
        counted = (stage, "F" if kind == "F" else "B")
        self._actions.append(Action(stage, kind, self._taken[counted]))
        self._taken[counted] += 1


def _gpipe(ranks: int, stages: int, microbatches: int) -> list[Row]:
    def row(rank: int) -> Row:
        return tuple(Action(rank, kind, i) for kind in ("F", "B") for i in range(microbatches))

    return [row(rank) for rank in range(ranks)]


def _in_rounds(ranks: int, stages: int, microbatches: int, *, ahead: int, splits: bool = False) -> list[Row]:
    """Warm-up forwards, then alternately one forward and one backward; each round visits all of a rank's stages.

    Args:
        ahead: How many more warm-up forwards a rank runs than the next rank. One is enough; a second one hides transfer
            times and differences between stages.
        splits: Backwards are in two parts. Rank r defers the second part by r backwards, and so computes r of them at
            the end, where it would otherwise be idle.
    """
    count = max(1, microbatches // ranks)
    rounds = [microbatches // count + (i < microbatches % count) for i in range(count)]

    def row(rank: int) -> Row:
        own = [rank + ranks * i for i in range(stages)]
        forwards = [stage for size in rounds for stage in own for _ in range(size)]
        backwards = [stage for size in rounds for stage in reversed(own) for _ in range(size)]
        warmup = (stages - 1) * rounds[0] + ahead * (ranks - 1 - rank)
        builder = _RowBuilder()
        for stage in forwards[:warmup]:
            builder.forward(stage)
        for i, stage in enumerate(backwards):
            for following in forwards[warmup + i : warmup + i + 1]:
                builder.forward(following)
            if not splits:
                builder.backward(stage)
                continue
            builder.inputs(stage)
            if i >= rank:
                builder.weights()
        return builder.done()

    return [row(rank) for rank in range(ranks)]


def _zero_bubble_v(ranks: int, stages: int, microbatches: int) -> list[Row]:
    def row(down: int) -> Row:
        """The order of the rank whose first stage is number ``down``: stages count downwards from the V's top."""
        first, second = down, 2 * ranks - 1 - down
        builder = _RowBuilder()
        for _ in range(2 * (ranks - down) - 1):
            builder.forward(first)
        for _ in range(down):
            builder.forward(second)
            builder.forward(first)
        for _ in range(ranks - down):
            builder.forward(second)
            builder.parts(second)
        while builder.forwards(second) < microbatches:
            if builder.forwards(first) < microbatches:
                builder.forward(first)
            builder.parts(first)
            builder.forward(second)
            builder.parts(second)
        for _ in range(down):
            builder.inputs(first)
            builder.inputs(second)
        for _ in range(ranks - down):
            builder.inputs(first)
            builder.weights()
        return builder.done()

    return [row(down) for down in reversed(range(ranks))]


def _dual_pipe_v(ranks: int, stages: int, microbatches: int) -> list[Row]:
    """DualPipeV, where a forward and a backward that DualPipe overlaps run one after the other."""

    def row(down: int) -> Row:
        first, second = down, 2 * ranks - 1 - down
        up = ranks - 1 - down
        builder = _RowBuilder()
        for _ in range(2 * up):
            builder.forward(first)
        for _ in range(down + 1):
            builder.forward(first)
            builder.forward(second)
        for _ in range(up):
            builder.parts(second)
            builder.forward(second)
        for _ in range(microbatches - 2 * ranks + down + 1):
            builder.forward(first)
            builder.backward(second)
            builder.forward(second)
            builder.backward(first)
        for _ in range(up):
            builder.backward(second)
            builder.forward(second)
            builder.backward(first)
        ending = [second, first] * (down + 1)
        for stage in ending[: down + 1]:
            builder.backward(stage)
        for stage in ending[down + 1 :]:
            builder.inputs(stage)
        for _ in range(up):
            builder.weights()
            builder.inputs(first)
        return builder.done()

    return [row(down) for down in reversed(range(ranks))]


@dataclass(frozen=True)
class _Named:
    """A named schedule.

    Attributes:
        rows: Builds the orders, from the numbers of ranks, of stages per rank, and of microbatches.
        stages: The least number of stages per rank, and the most (``None``: unlimited).
        usual: The default number of stages per rank.
        microbatches: The least number of microbatches per rank: with fewer, ranks are mostly idle.
        can_have_fewer: Whether it can still be built then. One microbatch is the batch as one process has it.
    """

    rows: Callable[[int, int, int], list[Row]]
    stages: tuple[int, int | None] = (1, 1)
    usual: int = 1
    microbatches: int = 1
    can_have_fewer: bool = True


SCHEDULES: dict[str, _Named] = {
    "GPipe": _Named(_gpipe),
    "1F1B": _Named(partial(_in_rounds, ahead=1)),
    "Eager1F1B": _Named(partial(_in_rounds, ahead=2)),
    "Interleaved1F1B": _Named(partial(_in_rounds, ahead=2), stages=(2, None), usual=2),
    "InterleavedZeroBubble": _Named(partial(_in_rounds, ahead=1, splits=True), stages=(1, None), usual=2),
    "ZBVZeroBubble": _Named(_zero_bubble_v, stages=(2, 2), usual=2, microbatches=2, can_have_fewer=False),
    "DualPipeV": _Named(_dual_pipe_v, stages=(2, 2), usual=2, microbatches=2, can_have_fewer=False),
}


_MOST = 1 << 22
"""The most microbatches of all ranks together: with more, it would take minutes only to list a schedule's actions."""


def build(name: str, ranks: int, microbatches: int | None = None, stages_per_rank: int | None = None) -> Schedule:
    """Build a named schedule, or read one from a CSV file.

    Args:
        name: A key of :data:`SCHEDULES`, or a path that ends in ``.csv``.
        ranks: The number of pipeline ranks.
        microbatches: Default: twice the ranks, or the file's number.
        stages_per_rank: Default: one; two if the schedule is interleaved or a V; or the file's number.

    Raises:
        ConfigurationError: The name is unknown, or the schedule doesn't support these numbers; says what is supported.
    """
    if name.endswith(".csv"):
        return _from_file(name, ranks, microbatches, stages_per_rank)
    named = SCHEDULES.get(name)
    if named is None:
        raise ConfigurationError(f"schedule={name!r} isn't one of {sorted(SCHEDULES)}, or the path of a .csv file.")
    stages = named.usual if stages_per_rank is None else stages_per_rank
    least, most = named.stages
    if stages < least or (most is not None and stages > most):
        more = "" if most == least else " or more"
        raise ConfigurationError(f"schedule={name!r} can't have {stages} stages on each rank: use {least}{more}.")
    microbatches = check_count("microbatches", 2 * ranks if microbatches is None else microbatches)
    if microbatches * ranks > _MOST:
        raise ConfigurationError(
            f"microbatches ({microbatches}) × pipeline_parallel_size ({ranks}) is more than {_MOST}, for which no"
            " schedule is built: a batch has a sample for each microbatch, so choose fewer."
        )
    fewest = named.microbatches * ranks
    if microbatches < fewest and not named.can_have_fewer:
        raise ConfigurationError(
            f"microbatches ({microbatches}) must be at least {named.microbatches} × pipeline_parallel_size ({ranks})"
            f' for schedule={name!r}: use {fewest} or more, or schedule="1F1B", which takes any number.'
        )
    return Schedule(name, tuple(named.rows(ranks, stages, microbatches)))


def _from_file(path: str, ranks: int, microbatches: int | None, stages_per_rank: int | None) -> Schedule:
    schedule = read_csv(path)
    for setting, wanted, there in (
        ("pipeline_parallel_size", ranks, len(schedule.rows)),
        ("microbatches", microbatches, schedule.microbatches),
        ("stages on each rank", stages_per_rank, schedule.stages / len(schedule.rows)),
    ):
        if wanted not in (None, there):
            raise ConfigurationError(
                f"schedule={path!r} is an order for {setting}={there:g}, and that is {wanted}: use {there:g}, or"
                " another file."
            )
    return schedule
