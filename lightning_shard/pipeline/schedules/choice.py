"""Which of several schedules to run: the fastest by simulation, where that is worth what else it takes.

Pure. Each schedule is simulated on its own stages, by the operations that were counted: with F those of a stage's
forward and L those of its products whose weights' gradients can come later, a backward's second part costs L, and its
first part all else, 2F − L and what is computed again.

What a simulation doesn't see is allowed for: a schedule's *price* is its step times 1 and these allowances together,
and the least price is chosen. They are judgement, not measurement, and on the side of the simpler schedule:

* several stages on each rank, 5 %: twice the sends or more, the user's code once for each stage, evaluations that don't
  stream;
* backwards in two parts, 5 %: Python for each node of the graph, and what isn't counted (norms, activations) is in the
  first part; with data ranks 3 % more, since no gradient is reduced beside a backward;
* 1 % for each 10 % that it keeps more of activations than 1F1B does.

Whatever its step, none is chosen whose fullest rank keeps more than half as much again as 1F1B's, or has over a quarter
more of parameters. What is kept of a stage counts as its operations do, until its weights' gradients are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_shard.pipeline.placement import StagePlacement
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate

SEVERAL_STAGES, TWO_PARTS, REDUCES_LATE, PER_KEPT = 0.05, 0.05, 0.03, 0.1
MOST_KEPT, MOST_WEIGHTS = 1.5, 1.25


@dataclass(frozen=True)
class Compared:
    """A schedule that was compared with others.

    Attributes:
        timeline: Simulated.
        kept: What its fullest rank keeps of the microbatches in flight.
        weights: Bytes of its fullest rank's parameters.
        duration_of, kept_of, weights_of: As parts of the first one's: 1F1B's, but where counts say several stages.
        price: Its duration with what it takes beside, in the first one's durations.
    """

    timeline: Timeline
    kept: float
    weights: int
    duration_of: float = 1.0
    kept_of: float = 1.0
    weights_of: float = 1.0
    price: float = 1.0

    @property
    def fits(self) -> bool:
        return self.kept_of <= MOST_KEPT and self.weights_of <= MOST_WEIGHTS

    def __str__(self) -> str:
        return (
            f"{_name(self.timeline.schedule)} {self.duration_of:.2f}, {100 * self.timeline.bubble:.0f} % idle, keeps"
            f" {_limited(self.kept_of, MOST_KEPT)}"
            + (f", weights {_limited(self.weights_of, MOST_WEIGHTS)}" if self.weights_of > MOST_WEIGHTS else "")
        )


@dataclass(frozen=True)
class Choice:
    """What was chosen, and among what."""

    schedule: Schedule
    among: tuple[Compared, ...]

    def __str__(self) -> str:
        first = self.among[0].timeline.schedule.name
        return (
            f'schedule="auto" chose {_name(self.schedule)}, by a simulation of counted operations in which sends'
            f" take no time. Steps and activations, of {first}'s: {'; '.join(map(str, self.among))}"
        )


def best(placed: Sequence[tuple[Schedule, Sequence[StagePlacement]]], *, has_data_ranks: bool = False) -> Choice:
    """The one of least price; of equals the one that keeps less, and of these the first.

    Args:
        placed: Schedules with their stages, the simplest first.
        has_data_ranks: Whether gradients are reduced over several ranks.
    """
    can_split = any(stage.later for _, stages in placed for stage in stages)
    tried = [_simulated(*each) for each in placed if can_split or not each[0].splits_backwards]
    tried = tried or [_simulated(*each) for each in placed]
    among = tuple(_against(tried[0], each, has_data_ranks) for each in tried)
    chosen = min((each for each in among if each.fits), key=lambda each: (each.price, each.kept))
    return Choice(chosen.timeline.schedule, among)


def _simulated(schedule: Schedule, stages: Sequence[StagePlacement]) -> Compared:
    forward = [float(stage.cost) for stage in stages]
    later = [min(stage.later, cost) for stage, cost in zip(stages, forward)]
    inputs = [2 * cost - late + stage.again for stage, cost, late in zip(stages, forward, later)]
    timeline = simulate(schedule, Costs(forward, inputs, later))
    ranks = range(len(schedule.rows))
    weights = max(sum(stages[stage].bytes for stage in schedule.stages_of(rank)) for rank in ranks)
    return Compared(timeline, max(_kept(schedule, rank, forward) for rank in ranks), weights)


def _kept(schedule: Schedule, rank: int, forward: Sequence[float]) -> float:
    kept = most = 0.0
    for action in schedule.rows[rank]:
        kept += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind] * forward[action.stage]
        most = max(most, kept)
    return most


def _against(first: Compared, each: Compared, has_data_ranks: bool) -> Compared:
    schedule = each.timeline.schedule
    duration = _part(each.timeline.duration, first.timeline.duration)
    kept = _part(each.kept, first.kept)
    allowed = PER_KEPT * max(0.0, kept - 1)
    if schedule.stages > len(schedule.rows):
        allowed += SEVERAL_STAGES
    if schedule.splits_backwards:
        allowed += TWO_PARTS + REDUCES_LATE * has_data_ranks
    weights = _part(each.weights, first.weights)
    return replace(
        each, duration_of=duration, kept_of=kept, weights_of=weights, price=round(duration * (1 + allowed), 9)
    )


def _part(one: float, other: float) -> float:
    """Rounded, as sums of like shares differ in their last digits."""
    return round(one / other, 9) if other else 1.0


def _name(schedule: Schedule) -> str:
    each = schedule.stages // len(schedule.rows)
    return schedule.name + (f" ({each} stages on each rank)" if each > 1 else "")


def _limited(part: float, most: float) -> str:
    return f"{part:.2f}" + (f" (over {most:g})" if part > most else "")
