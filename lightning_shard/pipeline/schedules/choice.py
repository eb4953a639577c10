"""Chooses a schedule (``schedule="auto"``): the fastest in simulation, if its gain outweighs its other costs.

Pure. Each schedule is simulated on its own placement, from counted operations. With F the operations of a stage's
forward, and L those of its products whose weight gradients can be deferred, the second part of a split backward costs
L, and the first part the rest: 2F − L, plus what is recomputed. A schedule's *price* is its step's duration × (1 + the
sum of its allowances, for what the simulation doesn't model), and the lowest price within the limits wins. Allowances
and limits: ``docs/decisions/schedule_auto.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_shard.pipeline.placement import StagePlacement
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate

SEVERAL_STAGES, TWO_PARTS, REDUCES_LATE, PER_KEPT = 0.05, 0.05, 0.03, 0.1
"""For several stages on a rank: at least twice the sends, the user's code once for each stage, and evaluations don't
stream. For split backwards: Python runs for each node of the graph, and operations that aren't counted (norms,
activations) are in the first part; with data ranks also that no gradient is reduced during one. For activations."""
MOST_KEPT, MOST_WEIGHTS = 1.5, 1.25


@dataclass(frozen=True)
class Compared:
    """A schedule, compared with the first candidate: 1F1B, unless the placement fixes several stages per rank.

    Attributes:
        timeline: Its simulation.
        kept: Activations that its fullest rank keeps for microbatches in flight, until their weight gradients are
            computed, in operations of their forwards.
        weights: Bytes of its fullest rank's parameters.
        duration_of, kept_of, weights_of: Duration, ``kept`` and ``weights`` relative to the first candidate's.
        price: ``duration_of`` with the allowances.
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
    """The chosen schedule, and the candidates."""

    schedule: Schedule
    among: tuple[Compared, ...]

    def __str__(self) -> str:
        first = self.among[0].timeline.schedule.name
        return (
            f'schedule="auto" chose {_name(self.schedule)}, by a simulation of counted operations in which sends'
            f" take no time. Steps and activations, of {first}'s: {'; '.join(map(str, self.among))}"
        )


def best(placed: Sequence[tuple[Schedule, Sequence[StagePlacement]]], *, has_data_ranks: bool = False) -> Choice:
    """The schedule of lowest price that fits; ties go to the one that keeps less, then to the earlier one.

    Args:
        placed: Candidates with the placement of their stages, the simplest first.
        has_data_ranks: Whether gradients are reduced over several ranks.
    """
    can_split = any(stage.later for _, stages in placed for stage in stages)
    tried = [_simulated(*each) for each in placed if can_split or not each[0].splits_backwards]
    tried = tried or [_simulated(*each) for each in placed]
    among = tuple(_relative_to(tried[0], each, has_data_ranks) for each in tried)
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


def _relative_to(first: Compared, each: Compared, has_data_ranks: bool) -> Compared:
    schedule = each.timeline.schedule
    duration = _ratio(each.timeline.duration, first.timeline.duration)
    kept = _ratio(each.kept, first.kept)
    allowed = PER_KEPT * max(0.0, kept - 1)
    if schedule.stages > len(schedule.rows):
        allowed += SEVERAL_STAGES
    if schedule.splits_backwards:
        allowed += TWO_PARTS + REDUCES_LATE * has_data_ranks
    weights = _ratio(each.weights, first.weights)
    return replace(
        each, duration_of=duration, kept_of=kept, weights_of=weights, price=round(duration * (1 + allowed), 9)
    )


def _ratio(one: float, other: float) -> float:
    """The ratio, rounded: sums of equal terms in another order differ in their last digits."""
    return round(one / other, 9) if other else 1.0


def _name(schedule: Schedule) -> str:
    each = schedule.stages // len(schedule.rows)
    return schedule.name + (f" ({each} stages on each rank)" if each > 1 else "")


def _limited(part: float, most: float) -> str:
    return f"{part:.2f}" + (f" (over {most:g})" if part > most else "")
