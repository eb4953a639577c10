"""The result of a search: the fastest layouts, and how many candidates were dropped for which reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_shard.arguments import seconds_text, size_text, table
from lightning_shard.dryrun.timing.layout import StepTime, share_text
from lightning_shard.layout import Layout
from lightning_shard.parallel.activation_checkpointing import Recomputing


class Why:
    """The reasons for which candidates are dropped."""

    CANT_BE_CUT = "the module can't be split that way"
    DOESNT_DIVIDE = "the global batch doesn't divide by the data ranks"
    TOO_FEW = "too few microbatches for the stages, or the schedule"
    TOO_FEW_BLOCKS = "too few blocks for a schedule with several stages on each rank"
    NOT_IN_PARTS = "its schedule postpones weight gradients, which these settings prevent"
    DOESNT_FIT = "a device's memory is too small"
    SLOWER = "slower than those listed, whatever memory they need"


@dataclass(frozen=True)
class Choice:
    """A candidate: one layout with its settings."""

    layout: Layout
    schedule: str | None  # its name; ``None`` with one stage
    samples: int  # per microbatch
    microbatches: int  # per step of one data rank: a pipeline's microbatches, or accumulated batches
    activation_checkpointing: Recomputing
    bound: float = 0.0  # a lower bound of its step time, in seconds
    step: StepTime | None = None  # simulated
    peak_bytes: int = 0  # the fullest stage's

    @property
    def columns(self) -> dict[str, str]:
        """The row of the table, by column."""
        layout, step = self.layout, self.step
        assert step is not None
        replicas, experts = layout.data_parallel_replicas, layout.expert_parallel_size
        return {
            "pipeline": str(layout.pipeline_parallel_size),
            "tensor": str(layout.tensor_parallel_size),
            "data": str(layout.data_parallel_size),
            "replicas": str(replicas) if replicas > 1 else "",
            "experts": str(experts) if experts > 1 else "",
            "schedule": self.schedule or "",
            "microbatches": f"{self.microbatches} × {self.samples}",
            "checkpointing": str(self.activation_checkpointing or "").lower(),
            "step": seconds_text(step.step),
            "MFU": "" if step.mfu is None else f"{100 * step.mfu:.1f} %",
            "tokens/s": f"{step.tokens_per_s:,.0f}",
            "bubble": f"{100 * step.bubble:.1f} %",
            "memory": size_text(self.peak_bytes),
        }

    def to_json(self) -> dict[str, Any]:
        assert self.step is not None
        settings = ("schedule", "samples", "microbatches", "activation_checkpointing", "peak_bytes", "overrides")
        return {
            "layout": self.layout.sizes,
            **{name: getattr(self, name) for name in settings},
            "time": self.step.to_json(),
        }

    @property
    def overrides(self) -> str:
        """The settings as those of a recipe, on one line; those of ``strategy`` are the strategy's arguments."""
        sizes = {name: size for name, size in self.layout.sizes.items() if size > 1 or name != "data_parallel_replicas"}
        found: dict[str, Any] = {f"strategy.{name}": size for name, size in sizes.items()}
        if self.schedule is not None:
            found |= {"strategy.schedule": self.schedule, "strategy.microbatches": self.microbatches}
        if self.activation_checkpointing:
            found["strategy.activation_checkpointing"] = str(self.activation_checkpointing).lower()
        in_batch = self.microbatches if self.schedule is not None else 1
        found["data.batch_size"] = self.samples * in_batch
        if self.microbatches > in_batch:
            found["trainer.accumulate_grad_batches"] = self.microbatches
        return " ".join(f"{name}={value}" for name, value in found.items())


@dataclass(frozen=True)
class Found:
    """The result of a search; ``str()`` is a table."""

    choices: tuple[Choice, ...]  # the fastest layouts, the fastest first
    dropped: Mapping[str, int]  # the number of dropped candidates by reason
    considered: int  # the number of all candidates
    simulated: int
    devices: int
    device: str  # the profile's name
    global_batch: int  # samples per step
    device_memory: int  # bytes of a device that are available to tensors
    assumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For machines. In bytes and seconds."""
        return {**vars(self), "choices": [choice.to_json() for choice in self.choices]}

    def __str__(self) -> str:
        lines = [
            f"{self.considered} ways to use {self.devices} × {self.device} for {self.global_batch} samples a step, with"
            f" {size_text(self.device_memory)} for tensors on each; {self.simulated} simulated"
        ]
        if self.choices:
            rows = _merged([choice.columns for choice in self.choices])
            numbers = [name for name in rows[0] if name not in ("schedule", "checkpointing")]
            fastest, best = self.choices[0], self.choices[0].step
            lines += ["", table([*rows[0]], [[*row.values()] for row in rows], to_the_right=numbers), ""]
            assert best is not None
            lines += ["the fastest, as settings of a recipe:", f"  {fastest.overrides}"]
            lines += [f"  its busiest device: {share_text(best)}"]
        else:
            lines += ["", "none fits: use more devices, devices with more memory, or a smaller global batch or model"]
        lines += ["", *(f"thrown out: {number}, {why}" for why, number in self.dropped.items() if number)]
        lines += [f"assumed: {text}" for text in self.assumed]
        return "\n".join(lines)


def _merged(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Merge rows that differ only in the schedule's name."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        first = found.setdefault(tuple(text for name, text in row.items() if name != "schedule"), row)
        if first is not row:
            first["schedule"] += f" or {row['schedule']}"
    return [*found.values()]
