"""A step on a clock: what a plan and a search say of it."""

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
    """A step on a clock; seconds.

    Attributes:
        device: The profile's name.
        step: From the first microbatch to the end of the optimizer's step.
        timeline: Of the last batch of the step, in seconds; of the pipeline's ranks.
        stages: What each spends.
        optimizer: The slowest rank's.
        ties: What weights of several stages take, whose gradients are added after the last backward.
        bubble: The share of the step in which the mean rank computes and sends nothing.
        tokens_per_s: Of all devices together.
        mfu: The share of all devices' peak that the model's own operations are (recomputation counts nothing); ``None``
            where these aren't known.
        spent: What the busiest rank spends a step on, by what; what is left is idle.
        sent: Bytes that a rank sends in a step, by axis: the most of any stage's.
        unknown: What isn't in these numbers and should be.
        assumed: What they were taken for.
    """

    device: str
    step: float
    timeline: Timeline
    stages: tuple[StageTime, ...]
    optimizer: float
    ties: float
    bubble: float
    tokens_per_s: float
    mfu: float | None
    spent: Seconds
    sent: Mapping[str, float]
    unknown: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For machines: seconds and bytes."""
        return {
            "device": self.device,
            "step": self.step,
            "bubble": self.bubble,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "dominates": self.dominates,
            "spent": dict(self.spent),
            "sent": dict(self.sent),
            "assumed": list(self.assumed),
            "unknown": list(self.unknown),
        }

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f", {100 * self.mfu:.1f} % MFU"
        bubble = f", {100 * self.bubble:.1f} % bubble" if len(self.timeline.schedule.rows) > 1 else ""
        return f"a step on {self.device}: {seconds_text(self.step)}, {self.tokens_per_s:,.0f} tokens/s{mfu}{bubble}"

    @property
    def dominates(self) -> str:
        """What the busiest rank spends most on."""
        return max(self.spent, key=lambda what: self.spent[what])


def share_text(time: StepTime) -> str:
    """What the busiest device spends its step on, the most first."""
    shares = sorted(((of / time.step, what) for what, of in time.spent.items() if time.step), reverse=True)
    return ", ".join(f"{what} {100 * share:.1f} %" for share, what in shares if share >= 0.0005)
