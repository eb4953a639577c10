"""``RecordTimeline``: a callback that records a run's pipeline timeline, and draws it beside a simulated one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard.arguments import seconds_text, table
from lightning_shard.dryrun.pictures import page, summary, trace
from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.recorded import (
    RecordedStep,
    Recording,
    Span,
    StopWatch,
    measured_costs,
)
from lightning_shard.pipeline.schedules.simulate import Costs, simulate
from lightning_shard.plugin.strategy import HybridShardStrategy


class RecordTimeline(pl.Callback):
    """Records when each pipeline rank ran which action in a few training steps, and draws it.

    Rank 0 writes into ``folder``: ``timeline.json``; ``timeline.html``, the step of median duration beside a simulation
    of the same schedule with the measured costs; and ``trace.json``, the same for Perfetto. A step that isn't recorded
    costs nothing. Before a recorded one all ranks meet at two barriers, where their clocks start: late ranks
    are waited for there, so that the ranks' steps begin together. The clocks' possible difference is recorded with the
    times: the longest time that any rank spent in the second barrier.

    With one pipeline stage there is nothing to record; the callback warns.

    Args:
        folder: A local folder on rank 0's machine; created if missing.
        after: Training batches before the first recorded one. The first batches determine what crosses stages, fill
            caches and compile.
        steps: How many batches to record.
    """

    def __init__(self, folder: str | os.PathLike[str], *, after: int = 10, steps: int = 3) -> None:
        if after < 1 or steps < 1:
            raise ConfigurationError(
                f"after={after} and steps={steps} must be at least 1: a first step finds out what crosses stages."
            )
        self.folder, self.after, self.steps = Path(folder), after, steps
        self.recording: Recording | None = None
        """The recorded steps, on rank 0; None elsewhere, and before they are complete."""
        self._batches = 0
        self._name: str | None = None
        self._skew_s = 0.0
        self._watch: StopWatch | None = None
        self._seen: list[tuple[int, float, list[Span]]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(trainer.strategy, HybridShardStrategy):
            raise ConfigurationError(
                f"RecordTimeline records pipelines of strategy='hybrid_shard', and this Trainer's is"
                f" {type(trainer.strategy).__name__}: leave the callback out."
            )
        self._batches = 0
        self._seen.clear()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HybridShardStrategy)
        self._batches += 1
        if self._batches <= self.after or len(self._seen) == self.steps:
            return
        self._name = strategy.watch_actions(None)
        if self._name is None:
            if self._batches == self.after + 1:
                rank_zero_warn("RecordTimeline: there is one pipeline stage, and so no actions to record.")
            return
        self._skew_s = _meet(strategy)
        self._watch = StopWatch(strategy.root_device)
        strategy.watch_actions(self._watch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._watch is None:
            return
        strategy = trainer.strategy
        assert isinstance(strategy, HybridShardStrategy)
        strategy.watch_actions(None)
        spans, self._watch = self._watch.spans(), None
        if spans:  # otherwise the pipeline was rebuilt meanwhile, on all ranks
            self._seen.append((self._batches - 1, self._skew_s, spans))
        if len(self._seen) == self.steps:
            self._gather(strategy)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HybridShardStrategy)
        if 0 < len(self._seen) < self.steps:
            self._gather(strategy)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._watch = None

    def _gather(self, strategy: HybridShardStrategy) -> None:
        """Gather the records to rank 0, which writes the files. A collective call over all ranks."""
        layout, group = strategy.layout, strategy.groups.host
        everyone: list[Any] | None = [None] * strategy.world_size if strategy.global_rank == 0 else None
        mine = (layout.data_rank, layout.tensor_rank), layout.pipeline_rank, self._seen
        dist.gather_object(mine, everyone, dst=0, group=group)
        if everyone is None:
            return
        assert self._name is not None
        self.recording = Recording(strategy.root_device.type)
        for number, (batch, *_) in enumerate(self._seen):
            skew_s = max(seen[number][1] for *_, seen in everyone)
            for one in sorted({pipeline for pipeline, *_ in everyone}):
                spans = {stage: seen[number][2] for pipeline, stage, seen in everyone if pipeline == one}
                facts = {"skew_s": skew_s, "data_rank": one[0], "tensor_rank": one[1]}
                self.recording.steps.append(RecordedStep.of(self._name, spans, step=batch, **facts))
        write(self.recording, self.folder)
        rank_zero_info(f"RecordTimeline: {len(self._seen)} steps are in {self.folder / 'timeline.html'}")


def _meet(strategy: HybridShardStrategy) -> float:
    """Synchronize all ranks by two barriers; returns how long the second one took, which all enter together."""
    if strategy.root_device.type == "cuda":
        torch.cuda.synchronize(strategy.root_device)
    group = strategy.groups.host
    dist.barrier(group=group)
    began = time.perf_counter()
    dist.barrier(group=group)
    return time.perf_counter() - began


def write(recording: Recording, folder: str | Path) -> None:
    """Write ``timeline.json``; and of the first pipeline ``timeline.html`` and ``trace.json``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "timeline.json").write_text(recording.to_json(), encoding="utf-8")
    first = min((recorded.data_rank, recorded.tensor_rank) for recorded in recording.steps)
    steps = [recorded for recorded in recording.steps if (recorded.data_rank, recorded.tensor_rank) == first]
    shown = sorted(steps, key=lambda recorded: recorded.timeline.duration)[len(steps) // 2]
    costs = measured_costs([recorded.timeline for recorded in steps])
    expected = simulate(shown.timeline.schedule, costs)
    timelines = {
        f"{shown.timeline.schedule.name}, batch {shown.step}, as it ran: {summary(shown.timeline)}": shown.timeline,
        f"The same, simulated from the stages' median costs: {summary(expected)}": expected,
    }
    ratio = shown.timeline.duration / expected.duration if expected.duration else 1.0
    lead = (
        f"The step took {ratio:.2f} times what the simulation says. {len(steps)} steps were recorded on"
        f" {recording.device};\nthis one has the median duration. Clocks of ranks differ by"
        f" {seconds_text(shown.skew_s)} at the most."
    )
    text = f"{lead}\n\nWhat actions take, median\n{_costs_table(costs)}\n\nSteps\n{_steps_table(steps)}"
    foot = "Recorded by lightning_shard.RecordTimeline. All pipelines' steps are in timeline.json."
    (folder / "timeline.html").write_text(page("A pipeline's timeline", text, timelines, foot), encoding="utf-8")
    (folder / "trace.json").write_text(json.dumps(trace(timelines)), encoding="utf-8")


def _costs_table(costs: Costs) -> str:
    split = any(costs.backward_weight)
    head = ["stage", "forward", *(["backward, inputs", "backward, weights"] if split else ["backward"])]
    columns = [costs.forward, costs.backward_input, *([costs.backward_weight] if split else [])]
    rows = [[str(stage), *map(seconds_text, of_stage)] for stage, of_stage in enumerate(zip(*columns))]
    return table(head, [*rows, ["a send", seconds_text(costs.slowest_transfer), *[""] * (len(columns) - 1)]])


def _steps_table(steps: list[RecordedStep]) -> str:
    said = ((step, summary(step.timeline).removesuffix(" idle").split(", ")) for step in steps)
    rows = [[str(step.step), *duration_and_idle, seconds_text(step.skew_s)] for step, duration_and_idle in said]
    return table(["batch", "duration", "idle", "clocks differ by at most"], rows)
