"""Records the timeline of a real step, as the same :class:`Timeline` that a simulation gives, with measured times.

An action begins when its rank is free for it. It waits for its inputs, computes, and ends when it has issued its sends.
Only the time after the wait counts as the action's own, as in a simulation.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.schedule import Action, Schedule
from lightning_shard.pipeline.schedules.simulate import Costs, Event, Timeline

FORMAT = "lightning_shard timeline"


Span = tuple[Action, float, float, float]
"""An action, and the times in seconds at which it began to wait, began to compute, and ended."""


class StopWatch:
    """Times one step of one rank. Its clock starts when it is constructed.

    On CUDA, times are those of events on the current stream: recording an event doesn't block the host, and the event
    completes when all work launched before it is done. On other devices, times are the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], Any] = time.perf_counter
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._mark = _event
        self._zero: Any = self._mark()
        self._marks: list[tuple[Action | None, Any, Any]] = []

    def begins(self, action: Action) -> None:
        """This action begins; the previous one has ended."""
        self._marks.append((action, self._mark(), None))

    def computes(self) -> None:
        """The action's inputs from other ranks have arrived."""
        action, began, _ = self._marks[-1]
        self._marks[-1] = action, began, self._mark()

    def ends(self) -> None:
        """The last action has ended."""
        self._marks.append((None, self._mark(), None))

    def spans(self) -> list[Span]:
        """All actions of the step. Synchronises with the device."""
        if self._mark is _event:
            torch.cuda.synchronize()
        spans = []
        for (action, began, computed), (_, ended, _) in zip(self._marks, self._marks[1:]):
            if action is not None:  # None: the time between two batches
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
    """One step of one pipeline.

    Attributes:
        step: The index of the batch in the fit, from 0.
        timeline: Starts when the first action begins. An event starts when its wait has ended.
        skew_s: An upper bound of the clock skew between ranks, in seconds, as far as it is known.
        data_rank, tensor_rank: The pipeline's coordinates.
    """

    step: int
    timeline: Timeline
    skew_s: float = 0.0
    data_rank: int = 0
    tensor_rank: int = 0

    @classmethod
    def of(cls, name: str, spans: Mapping[int, Sequence[Span]], **facts: Any) -> RecordedStep:
        """Combine the spans of each pipeline rank; ``name`` is the schedule's, ``facts`` are the other attributes."""
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
    """The costs for a simulation of the same schedule: medians over each stage's actions, and over transfers.

    A transfer takes from the end of the sending action to the start of the action that waited for it. Where no action
    waited it can't be measured and is left out; if none is measured, ``transfer`` is 0. A whole backward counts as
    ``backward_input``, since its parts can't be told apart; if a stage also has split backwards, only those count.
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
        """By stage, the median duration of the first of these kinds that the stage has."""
        found = (
            next((seen[k, s] for k in kinds if (k, s) in seen), [0.0]) for s in range(timelines[0].schedule.stages)
        )
        return [*map(statistics.median, found)]

    transfer = statistics.median(sends) if sends else 0.0
    return Costs(of("F"), of("I", "B"), of("W"), transfer)


# -- as a file --------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """The recorded steps of a run, and the name of its device."""

    device: str
    steps: list[RecordedStep] = field(default_factory=list)

    def to_json(self) -> str:
        steps = []
        for recorded in self.steps:
            facts = {name: value for name, value in vars(recorded).items() if name != "timeline"}
            events = [
                {"rank": e.rank, "action": str(e.action), "start_s": e.start, "end_s": e.end}
                for e in recorded.timeline.events
            ]
            steps.append({**facts, "schedule": recorded.timeline.schedule.name, "events": events})
        return json.dumps({"format": FORMAT, "version": 1, "device": self.device, "steps": steps}, indent=1) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> Recording:
        """Read a file with the text of :meth:`to_json`.

        Raises:
            ConfigurationError: The file isn't one.
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


def _step(raw: dict[str, Any]) -> RecordedStep:
    events = _in_order(Event(e["rank"], _action(e["action"]), e["start_s"], e["end_s"]) for e in raw.pop("events"))
    ranks = range(1 + max(event.rank for event in events))
    rows = tuple(tuple(event.action for event in events if event.rank == rank) for rank in ranks)
    return RecordedStep(timeline=Timeline(Schedule(raw.pop("schedule"), rows), events), **raw)


def _action(text: str) -> Action:
    stage, kind, microbatch = re.split("([FBIW])", text)
    return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]
