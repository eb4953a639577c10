"""Computes the memory of a pipeline rank at each moment of a step. Pure arithmetic on what its stages hold.

At the moment when a rank runs one part of one microbatch, it holds:

* all buffers; its shards of parameters and optimizer state; and its shards of gradients, once they are reduced;
* *gathered* parameters, as FSDP2 of torch 2.11 to 2.14 gathers and frees them: parameters outside of blocks for the
  whole step, blocks for the whole step or while they run, and the buffer of one all-gather;
* unreduced gradients, and the buffer of one reduce-scatter;
* *activations*: what autograd saves of the microbatches in flight; counted separately, those of the *loss*, with
  everything that runs after the last block;
* *received* values: for each microbatch in flight the values, and a copy of them that the blocks may modify; receive
  buffers for the next action; the gradient that a backward began with; and what is still being sent;
* *working* memory: the growth of memory while the current part runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from lightning_shard.dryrun.counting.counts import Counts
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.dryrun.memory.peak import Held, Moment, Rank, Stage, StageMemory
from lightning_shard.dryrun.memory.step import Step
from lightning_shard.layout import Layout
from lightning_shard.pipeline.schedules.schedule import Row, Schedule


def moments_of(rank: Rank) -> Iterator[Moment]:
    """The moments of one optimizer step: of all of the rank's actions, and of the optimizer."""
    step = Step(rank)
    last = max(place for place, action in enumerate(rank.row) if action.kind in "BW")
    for turn in range(rank.held.accumulates):
        reduces = turn == rank.held.accumulates - 1
        step.begin()
        for place, action in enumerate(rank.row):
            step.asks_for(*rank.row[place + 1 : place + 2])
            if action.kind == "F":
                yield from step.forward(action)
            else:
                yield from step.backward(action, ends_batch=place == last, reduces=reduces)
    trained = (numel * p.dtype.itemsize for p, numel in rank.shards if p.requires_grad)
    yield step.update(rank.optimizer.steps_with(list(trained)) if rank.optimizer is not None else 0)


def _memory_of(rank: Rank, *, copies: bool) -> StageMemory:
    moments = tuple(moments_of(rank))
    state = {"parameters": rank.held_bytes, "optimizer": rank.state_bytes, "gradients": rank.reduced_bytes}
    host = dict(state) if rank.held.cpu_offload else {}
    if copies:
        host["copy"] = state["parameters"] + state["optimizer"]
    return StageMemory(
        stages=tuple(rank.stages),
        in_flight=tuple(_most_in_flight(rank.row, stage) for stage in rank.stages),
        peak=max(moments, key=lambda moment: moment.total),
        host=host,
        moments=moments,
        parameters=sum(numel for _, numel in rank.shards),
    )


def _most_in_flight(row: Row, stage: int) -> int:
    changes = {"F": 1, "I": 0, "B": -1, "W": -1}
    return max(accumulate(changes[action.kind] for action in row if action.stage == stage))


def stage_memories(
    counts: Counts,
    layout: Layout,
    stages: Sequence[range],
    schedule: Schedule,
    held: Held,
    optimizer: OptimizerState | None,
    *,
    copies: bool = False,
) -> tuple[StageMemory, ...]:
    """The memory of each pipeline rank; with ``copies``, saves are asynchronous, from a copy in host memory."""
    made = {index: Stage(counts, layout, blocks, held, optimizer) for index, blocks in enumerate(stages)}
    return tuple(_memory_of(Rank(made, schedule, rank), copies=copies) for rank in range(len(schedule.rows)))
