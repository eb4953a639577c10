"""``Plan``: the estimated memory, time and checkpoint of a layout, as a table for people and as JSON for machines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_shard.arguments import count_text, short, size_text, table
from lightning_shard.dryrun.counting.counts import Counts
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.dryrun.memory.peak import KINDS, Held, StageMemory, usable
from lightning_shard.dryrun.memory.stored import Stored
from lightning_shard.dryrun.timing.layout import StepTime, share_text
from lightning_shard.layout import Layout
from lightning_shard.pipeline.placement import Placement, range_text
from lightning_shard.pipeline.schedules.schedule import Schedule

_COLUMNS = {kind: "weights" if kind == "parameters" else kind for kind in KINDS if kind != "batch"}
"""Kinds of memory, and their names in the table."""


@dataclass(frozen=True)
class Run:
    """The choices beside the layout whose effect is computed from the counts of one microbatch."""

    schedule: str = "1F1B"
    microbatches: int = 1  # per batch; 1 with one stage
    placement: Literal["auto", "even"] | Sequence[int] = "auto"
    held: Held = field(default_factory=Held)
    asynchronous_saving: bool = False


@dataclass(frozen=True)
class Remedy:
    """A change that would make a layout fit."""

    setting: str  # the change as text, such as ``microbatches=16``
    peak_bytes: int  # the fullest stage's peak after the change


@dataclass(frozen=True)
class Plan:
    """The estimate for one layout of a module; ``str()`` is a table of its many attributes."""

    layout: Layout
    run: Run
    name: str  # the module's class
    precision: str
    device_type: str
    model_parameters: int  # elements of the whole model's parameters; tied ones count once
    counts: Counts  # of one microbatch on one rank
    placement: Placement | None  # ``None`` if the module has no blocks
    schedule: Schedule  # each pipeline rank's order of actions
    optimizer: OptimizerState  # per parameter
    stages: tuple[StageMemory, ...]  # of each pipeline rank, which has one stage or several
    checkpoint: Stored  # what a save writes
    device_memory: int | None = None  # bytes
    remedies: tuple[Remedy, ...] = ()  # the cheapest change that would make it fit, if it doesn't, and there is one
    time: StepTime | None = None  # of a step on a device; ``None`` if no device was given
    choice: str = ""  # how the schedule was chosen among others; empty if it was given by name

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest stage's devices."""
        return max(stage.peak.total for stage in self.stages)

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into each device's memory; ``None`` if that isn't known."""
        return None if self.device_memory is None else self.peak_bytes <= usable(self.device_memory)

    def to_json(self) -> dict[str, Any]:
        """For machines. Sizes are in bytes."""
        return {
            "module": self.name,
            "parameters": self.model_parameters,
            "layout": self.layout.sizes,
            "precision": self.precision,
            "schedule": self.schedule.name,
            "choice": self.choice or None,
            "microbatches": self.run.microbatches,
            "samples_per_microbatch": self.counts.samples,
            "tokens_per_microbatch": self.counts.tokens,
            "settings": dict(vars(self.run.held)),
            "optimizers": list(self.optimizer.names),
            "assumed": list(self.counts.assumed),
            "device_memory": self.device_memory,
            "peak": self.peak_bytes,
            "fits": self.fits,
            "remedies": [dataclasses.asdict(remedy) for remedy in self.remedies],
            "stages": [
                {
                    "stages": list(memory.stages),
                    "ranks": [ranks.start, ranks.stop - 1],
                    "blocks": [[blocks.start, blocks.stop] for blocks in self._blocks(memory)],
                    "in_flight": list(memory.in_flight),
                    "parameters": memory.parameters,
                    "peak": memory.peak.total,
                    "peak_at": str(memory.peak),
                    "memory": dict(memory.peak.bytes),
                    "host": dict(memory.host),
                }
                for memory, ranks in zip(self.stages, self.layout.stages())
            ],
            "checkpoint": dataclasses.asdict(self.checkpoint),
            "time": self.time.to_json() if self.time is not None else None,
        }

    def __str__(self) -> str:
        lines = [*self._heading(), "", self._table(), "", *self._verdict(), *self._time(), str(self.checkpoint)]
        lines += [self.choice] if self.choice else []
        timed = self.time if self.time is not None else self.counts
        lines += [f"assumed: {text}" for text in timed.assumed]
        return "\n".join(lines)

    def _blocks(self, memory: StageMemory) -> list[range]:
        return [self.placement.stages[stage].blocks for stage in memory.stages] if self.placement is not None else []

    def _heading(self) -> Iterator[str]:
        ranks = self.layout.world_size
        size = count_text(self.model_parameters).replace(" G", " B")
        devices = f"{self.device_type} device{'s' * (ranks > 1)}"
        yield f"{self.name}: {size} parameters on {ranks} {devices}, {self.layout}"
        batch = f"{self.counts.samples} sample{'s' * (self.counts.samples > 1)}"
        if self.counts.tokens != self.counts.samples:
            batch += f" ({self.counts.tokens:,} tokens)"
        if self.layout.data_parallel_size > 1:
            batch += f" on each of {self.layout.data_parallel_size} data ranks"
        held = self.run.held
        facts = [self.precision]
        if self.layout.pipeline_parallel_size > 1:
            facts += [self.schedule.name, f"{self.run.microbatches} microbatches of {batch}"]
        else:
            facts.append(f"batches of {batch}")
        if held.accumulates > 1:
            facts.append(f"accumulate_grad_batches={held.accumulates}")
        names = ("activation_checkpointing", "cpu_offload", "reduce_each_microbatch", "reshard_after_forward")
        facts += [f"{name}={getattr(held, name)}" for name in names if getattr(held, name) not in (None, False)]
        facts.append(" and ".join(self.optimizer.names))
        yield ", ".join(facts)

    def _table(self) -> str:
        several, is_pipeline = len(self.stages) < self.schedule.stages, self.layout.pipeline_parallel_size > 1
        rows = [
            {
                "stages" if several else "stage": ", ".join(map(str, memory.stages)),
                "ranks": f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
                "blocks": ", ".join(map(range_text, self._blocks(memory))),
                "in flight": " + ".join(map(str, memory.in_flight)) if is_pipeline else "",
                "parameters": count_text(memory.parameters),
                **{name: _cell(memory.peak.bytes[kind]) for kind, name in _COLUMNS.items()},
                "peak": size_text(memory.peak.total),
                "at": short(_last_names(str(memory.peak)), 48),
            }
            for memory, ranks in zip(self.stages, self.layout.stages())
        ]
        numbers = ("parameters", *_COLUMNS.values(), "peak")
        return table([*rows[0]], [[*row.values()] for row in rows], to_the_right=numbers)

    def _time(self) -> Iterator[str]:
        if self.time is None:
            return
        yield str(self.time)
        yield f"  the busiest device: {share_text(self.time)}"
        if self.time.sent:
            sent = ", ".join(f"{axis} {size_text(nbytes)}" for axis, nbytes in self.time.sent.items())
            yield f"  a device sends in a step: {sent}"

    def _verdict(self) -> Iterator[str]:
        peak = size_text(self.peak_bytes)
        stages = max(self.stages, key=lambda stage: stage.peak.total).stages
        fullest = f"a device of stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))} needs"
        most = f"{fullest} most,"
        if len(self.stages) == 1:
            fullest = most = "each device needs"
        if self.device_memory is None:
            yield f"{most} {peak}, and what its driver and allocator take beside"
        else:
            room = f"tensors can have {size_text(usable(self.device_memory))} of its {size_text(self.device_memory)}"
            yield f"{f'fits: {most}' if self.fits else f'does not fit: {fullest}'} {peak}; {room}"
            yield from (f"  {remedy.setting} would: {size_text(remedy.peak_bytes)}" for remedy in self.remedies)
            if self.fits is False and not self.remedies:
                yield "  no other setting would: search for other sizes, or use more devices, a smaller batch or model"
        host = max(sum(stage.host.values()) for stage in self.stages)
        if host:
            yield f"in the host's memory: {size_text(host)} for each device"


def _cell(nbytes: int) -> str:
    return size_text(nbytes) if nbytes else ""


def _last_names(text: str) -> str:
    """``layers.3`` for ``model.decoder.layers.3``."""
    return re.sub(r"(?:\w+\.)+(\w+\.\w+)", r"\1", text)
