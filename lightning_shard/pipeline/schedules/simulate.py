"""Simulates a schedule: computes its timeline from the cost of each stage.

Pure. A rank runs one action at a time, in its order, as soon as the action's inputs have arrived. A transfer to another
rank takes ``transfer``; sends don't block the sender, and links don't share bandwidth. A transfer overlaps with the
receiver's earlier computation, or, with ``receives_late``, begins when the receiver asks for it. The latter models this
library's runtime, where the receive is an action's first operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.schedule import Action, Schedule


@dataclass(frozen=True)
class Costs:
    """The costs of one microbatch on each stage, in any unit of time: seconds, or operations.

    Attributes:
        forward: By stage.
        backward_input: The gradients of the stage's inputs, by stage.
        backward_weight: The gradients of its weights, by stage. A whole backward costs both.
        transfer: Sending a value or a gradient between neighbouring stages on different ranks; one number, or one for
            each cut, beginning with the cut after stage 0.
        once: Extra costs of single actions, such as the last backward, which reduces gradients.
        receives_late: Whether a transfer begins only when the receiver reaches the action that needs it, and counts as
            part of that action.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    transfer: float | Sequence[float] = 0.0
    once: Mapping[Action, float] = field(default_factory=dict)
    receives_late: bool = False

    @classmethod
    def of_forwards(cls, forward: Sequence[float], transfer: float = 0.0) -> Costs:
        """Costs where each part of a backward costs as much as the forward: it has as many matrix products."""
        return cls(forward, forward, forward, transfer)

    def of(self, action: Action) -> float:
        stage, kind, _ = action
        once = self.once.get(action, 0.0)
        if kind == "F":
            return once + self.forward[stage]
        inputs = self.backward_input[stage] if kind in "BI" else 0.0
        weights = self.backward_weight[stage] if kind in "BW" else 0.0
        return once + inputs + weights

    @property
    def slowest_transfer(self) -> float:
        """The transfer time of the slowest cut."""
        return self.transfer if isinstance(self.transfer, (int, float)) else max(self.transfer, default=0.0)

    def crossing(self, one: int, other: int) -> float:
        """The transfer time between two neighbouring stages, in either direction."""
        return self.transfer if isinstance(self.transfer, (int, float)) else self.transfer[min(one, other)]


@dataclass(frozen=True)
class Event:
    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule on a clock that starts at 0.

    Attributes:
        events: Sorted by start; events with equal starts are in no particular order.
    """

    schedule: Schedule
    events: tuple[Event, ...]

    @cached_property
    def duration(self) -> float:
        """The time until the last rank is done."""
        return max(event.end for event in self.events)

    def of(self, rank: int) -> list[Event]:
        return [event for event in self.events if event.rank == rank]

    def idle(self, rank: int) -> float:
        """A rank's bubble: the time of the step in which it computes nothing."""
        return self.duration - sum(event.end - event.start for event in self.of(rank))

    @cached_property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle."""
        ranks = len(self.schedule.rows)
        return sum(map(self.idle, range(ranks))) / (ranks * self.duration) if self.duration else 0.0

    @cached_property
    def in_flight(self) -> float:
        """The most microbatches whose activations any rank keeps at once: forwards in flight / stages of the rank."""
        schedule = self.schedule
        return max(schedule.in_flight(rank) / len(schedule.stages_of(rank)) for rank in range(len(schedule.rows)))

    def __str__(self) -> str:
        """A summary without the duration, whose unit only the caller knows."""
        return (
            f"{self.schedule.name}: {100 * self.bubble:.1f} % idle, at most {self.in_flight:g} microbatches in flight"
        )


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Compute when each action starts and ends.

    Raises:
        ConfigurationError: Ranks would deadlock, or the costs don't match the schedule's stages.
    """
    for name in ("forward", "backward_input", "backward_weight"):
        values = getattr(costs, name)
        if len(values) != schedule.stages or not all(0 <= value < float("inf") for value in values):
            raise ConfigurationError(
                f"costs.{name} ({[*values]}) must be a finite number of at least 0 for each of the"
                f" {schedule.stages} stages of {schedule.name}."
            )
    if not isinstance(costs.transfer, (int, float)) and len(costs.transfer) != schedule.stages - 1:
        raise ConfigurationError(
            f"costs.transfer ({[*costs.transfer]}) must be one number, or one for each of the {schedule.stages - 1}"
            f" cuts between the stages of {schedule.name}."
        )
    ends: list[float] = []
    free = [0.0] * len(schedule.rows)
    events = []
    for rank, action, needs in schedule.order:
        start, receiving = free[rank], 0.0
        for need in needs:
            giver, given = schedule.order[need][:2]
            on_its_way = 0.0 if giver == rank else costs.crossing(given.stage, action.stage)
            if costs.receives_late:
                start, receiving = max(start, ends[need]), max(receiving, on_its_way)
            else:
                start = max(start, ends[need] + on_its_way)
        start += receiving
        free[rank] = end = start + costs.of(action)
        ends.append(end)
        events.append(Event(rank, action, start, end))
    return Timeline(schedule, tuple(sorted(events, key=lambda event: event.start)))
