"""What a rank did when, in a real step: the same :class:`Timeline` that a simulation gives, by the clock.

An action begins when its rank is free for it, waits for what it needs, computes, and ends when it has handed on what
others need. Only the time from the end of its waiting counts as its own, as in a simulation.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.schedule import Action, Schedule
from lightning_shard.pipeline.schedules.simulate import Costs, Event, Timeline

FORMAT = "lightning_shard timeline"


class Watch(Protocol):
    """Is told of each action of a training step."""

    def begins(self, action: Action) -> None:
        """It is this action's turn; the one before has ended."""

    def computes(self) -> None:
        """What the action needs from other ranks has arrived."""

    def ends(self) -> None:
        """The last action has ended."""


class Unwatched:
    def begins(self, action: Action) -> None: ...

    def computes(self) -> None: ...

    def ends(self) -> None: ...


UNWATCHED = Unwatched()

Span = tuple[Action, float, float, float]
"""An action, and in seconds when it began to wait, began to compute, and ended."""


class StopWatch:
    """Notes one step of one rank. Its clock begins where it is made.

    On CUDA the times are those of events on the current stream: noting one waits for nothing, and what was launched
    before it is done then. Else they are the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], Any] = time.perf_counter
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._mark = _event
        self._zero: Any = self._mark()
        self._marks: list[tuple[Action | None, Any, Any]] = []

    def begins(self, action: Action) -> None:
        self._marks.append((action, self._mark(), None))

    def computes(self) -> None:
        action, began, _ = self._marks[-1]
        self._marks[-1] = action, began, self._mark()

    def ends(self) -> None:
        self._marks.append((None, self._mark(), None))

    def spans(self) -> list[Span]:
        """Waits for the device."""
        if self._mark is _event:
            torch.cuda.synchronize()
        spans = []
        for (action, began, computed), (_, ended, _) in zip(self._marks, self._marks[1:]):
            if action is not None:  # else it is what lies between two batches
                start = self._since(began)
                spans.append((action, start, start if computed is None else self._since(computed), self._since(ended)))
        return spans

    def _since(self, mark: Any) -> float:
        return mark - self._zero if isinstance(mark, float) else self._zero.elapsed_time(mark) / 1000


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class RecordedStep:
    """One pipeline's step.

    Attributes:
        step: The number of the batch in the fit, from 0.
        timeline: Starts at the first action's beginning. An event's start is where its waiting had ended.
        skew_s: Clocks of ranks differ by this at the most, as far as can be known.
        data_rank, tensor_rank: Which pipeline it is.
    """

    step: int
    timeline: Timeline
    skew_s: float = 0.0
    data_rank: int = 0
    tensor_rank: int = 0

    @classmethod
    def of(cls, name: str, spans: Mapping[int, Sequence[Span]], **facts: Any) -> RecordedStep:
        """From each rank's, by its place in the pipeline; ``name`` is the schedule's."""
        rows = tuple(tuple(action for action, *_ in spans[rank]) for rank in sorted(spans))
        zero = min(began for of_rank in spans.values() for _, began, _, _ in of_rank)
        events = [
            Event(rank, action, start - zero, end - zero)
            for rank, of_rank in spans.items()
            for action, _, start, end in of_rank
        ]
        return cls(timeline=Timeline(Schedule(name, rows), _in_order(events)), **facts)


def _in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: (event.start, event.end, event.rank)))


def measured_costs(timelines: Sequence[Timeline]) -> Costs:
    """What a simulation of the same schedule takes: the median of each stage's actions, and of sends.

    A send's time is from the end of what is sent to the start of what has waited for it; where nothing waited, it
    isn't known, and nothing. Whole backwards are told as gradients of inputs, since their parts can't be told apart; of
    a stage that also has backwards in two parts, only these count.
    """
    seen: dict[tuple[str, int], list[float]] = {}
    sends: list[float] = []
    for timeline in timelines:
        done = {part: event for event in timeline.events for part in event.action.gives()}
        for rank in range(len(timeline.schedule.rows)):
            free = 0.0
            for event in timeline.of(rank):
                seen.setdefault((event.action.kind, event.action.stage), []).append(event.end - event.start)
                arrived = [done[need] for need in event.action.needs(timeline.schedule.stages)]
                last = max((e for e in arrived if e.rank != rank), key=lambda e: e.end, default=None)
                if last is not None and last.end > free:
                    sends.append(max(event.start - last.end, 0.0))
                free = event.end

    def of(*kinds: str) -> list[float]:
        """Of the first of these kinds that a stage has."""
        found = (
            next((seen[k, s] for k in kinds if (k, s) in seen), [0.0]) for s in range(timelines[0].schedule.stages)
        )
        return [*map(statistics.median, found)]

    transfer = statistics.median(sends) if sends else 0.0
    return Costs(of("F"), of("I", "B"), of("W"), transfer)


# -- as a file --------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What a run recorded, and of what."""

    device: str
    steps: list[RecordedStep] = field(default_factory=list)

    def to_json(self) -> str:
        steps = [
            {
                "step": recorded.step,
                "data_rank": recorded.data_rank,
                "tensor_rank": recorded.tensor_rank,
                "skew_s": recorded.skew_s,
                "schedule": recorded.timeline.schedule.name,
                "events": [
                    {"rank": e.rank, "action": str(e.action), "start_s": e.start, "end_s": e.end}
                    for e in recorded.timeline.events
                ],
            }
            for recorded in self.steps
        ]
        return json.dumps({"format": FORMAT, "version": 1, "device": self.device, "steps": steps}, indent=1) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> Recording:
        """A file that :meth:`to_json` gave.

        Raises:
            ConfigurationError: It is another kind of file.
        """
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            if raw["format"] != FORMAT or raw["version"] != 1:
                raise ValueError(f"format {raw['format']!r}, version {raw['version']!r}")
            return cls(raw["device"], [_step(step) for step in raw["steps"]])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigurationError(
                f"{path} is no timeline that this version recorded ({type(error).__name__}: {error}): give the"
                " timeline.json that RecordTimeline wrote."
            ) from error


def _step(raw: Mapping[str, Any]) -> RecordedStep:
    events = _in_order(Event(e["rank"], _action(e["action"]), e["start_s"], e["end_s"]) for e in raw["events"])
    ranks = 1 + max(event.rank for event in events)
    rows = tuple(tuple(event.action for event in events if event.rank == rank) for rank in range(ranks))
    timeline = Timeline(Schedule(raw["schedule"], rows), events)
    return RecordedStep(raw["step"], timeline, raw["skew_s"], raw["data_rank"], raw["tensor_rank"])


def _action(text: str) -> Action:
    at = next(i for i, char in enumerate(text) if char in "FBIW")
    return Action(int(text[:at]), text[at], int(text[at + 1 :]))  # type: ignore[arg-type]
