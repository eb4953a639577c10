"""``StepTime``: the estimated time of a step, as plans and searches report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.dryrun.timing.rates import Seconds
from lightning_shard.dryrun.timing.stage import StageTime
from lightning_shard.pipeline.placement import seconds_text
from lightning_shard.pipeline.schedules.simulate import Timeline


@dataclass(frozen=True)
class StepTime:
    """The estimated time of a step. Times are in seconds."""

    device: str  # the profile's name
    step: float  # from the first microbatch to the end of the optimizer's step
    timeline: Timeline  # of the pipeline's ranks, simulated, for the step's last batch
    stages: tuple[StageTime, ...]
    optimizer: float  # the slowest rank's optimizer step
    ties: float  # to sum gradients of weights that several stages share, after the last backward
    bubble: float  # the fraction of the timeline in which the average rank computes nothing: it receives, or waits
    tokens_per_s: float  # of all devices together
    mfu: float | None
    """Model FLOPs utilization: the model's own operations (without recomputation) as a fraction of all devices' peak;
    ``None`` if these operations aren't known."""
    spent: Seconds  # the busiest rank's time in a step, by purpose; the rest is idle
    sent: Mapping[str, float]  # bytes that a rank sends in a step, by axis; the maximum over stages
    unknown: tuple[str, ...] = ()  # what these numbers should include, and don't
    assumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For machines. In seconds and bytes."""
        names = ("device", "step", "bubble", "tokens_per_s", "mfu", "dominates")
        found = {name: getattr(self, name) for name in names}
        texts = {"assumed": list(self.assumed), "unknown": list(self.unknown)}
        return {**found, "spent": dict(self.spent), "sent": dict(self.sent), **texts}

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f", {100 * self.mfu:.1f} % MFU"
        bubble = f", {100 * self.bubble:.1f} % bubble" if len(self.timeline.schedule.rows) > 1 else ""
        return f"a step on {self.device}: {seconds_text(self.step)}, {self.tokens_per_s:,.0f} tokens/s{mfu}{bubble}"

    @property
    def dominates(self) -> str:
        """What the busiest rank spends most time on."""
        return max(self.spent, key=lambda what: self.spent[what])


def share_text(time: StepTime) -> str:
    """A text of the busiest device's shares of time by purpose, the largest first."""
    shares = sorted(((of / time.step, what) for what, of in time.spent.items() if time.step), reverse=True)
    return ", ".join(f"{what} {100 * share:.1f} %" for share, what in shares if share >= 0.0005)
