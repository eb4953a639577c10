"""Runs steps through a pipeline: splits a batch into microbatches, runs the user's step on each, merges.

All ranks of a pipeline read the same batch. Each runs the user's step on every microbatch, as far as its stages go. The
last stage's merged result, its combined logs and the state that it changed are broadcast to all stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import ShardError
from lightning_shard.parallel.fsdp.shard import kept_gathered, reshard
from lightning_shard.pipeline.dataflow.crossing import StageEnd
from lightning_shard.pipeline.dataflow.taint import refuse
from lightning_shard.pipeline.runtime.channel import Channel, Pipeline, signature
from lightning_shard.pipeline.runtime.outputs import merge, with_losses
from lightning_shard.pipeline.runtime.step import PipelinedStep, RunOn
from lightning_shard.pipeline.schedules.recorded import StopWatch
from lightning_shard.pipeline.schedules.schedule import Row, Schedule
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.pipeline.stages.tied import TiedGradients
from lightning_shard.plugin.assembly.assemble import Assembly
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps.around_steps import DirectOutput, inference_mode_as_no_grad, steps_no_scheduler
from lightning_shard.plugin.steps.batches import Alike, Batches, Step
from lightning_shard.plugin.steps.checks.agreement import check_what_follows
from lightning_shard.plugin.steps.checks.rehearsal import Rehearsals
from lightning_shard.plugin.steps.checks.step_memory import StepMemory
from lightning_shard.plugin.steps.gradient_norms import WholeNorms
from lightning_shard.plugin.steps.gradients import StageUnits
from lightning_shard.plugin.steps.logs import HeldLogs
from lightning_shard.plugin.steps.look_ahead import Arguments
from lightning_shard.plugin.steps.loop import Loop
from lightning_shard.plugin.steps.loss_weight import Shares, loss_of, weighted, weighted_for_backward
from lightning_shard.plugin.steps.randomness import Seeds
from lightning_shard.plugin.steps.redirect import call_through
from lightning_shard.plugin.steps.state.after_network import LateState
from lightning_shard.plugin.steps.state.per_stage import StatesApart

Draw = Callable[[Arguments], int]
_RESULT_HOOKS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
}
"""The hooks that receive what a step returned."""

_CUT = (
    "With several pipeline stages a step gets a part of the batch at a time (here one of {parts}): a network or step"
    " that works across samples, or for one batch size only, needs pipeline_parallel_size=1."
)


@dataclass(frozen=True)
class _Begun:
    """An evaluation batch for which this rank has run its part.

    Attributes:
        results: The microbatches' results on the last stage; ``None`` if the batch has to run call by call.
        sent: The number of tensors that each stage of this rank had sent when the batch was done.
    """

    step: Step
    results: list[Any] | None
    sent: list[int]


class PipelinedSteps:
    """Runs one module's training and evaluation steps on this rank's stages, for a Trainer's loops or Fabric's.

    It has many attributes, since a step is put together here: each is a part with a job of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        loop: Loop,
        known: Assembly,
        schedule: Schedule,
        groups: Groups,
        shares: Shares,
        alike: Alike,
        units: StageUnits,
    ) -> None:
        self._module = module
        self._loop = loop
        assert known.stages is not None
        self._stages = stages = known.stages
        self._schedule = schedule
        self._groups = groups
        self._layout = layout = known.layout
        self._shares = shares
        self._alike = alike
        self._units = units
        self._device = device = stages[0].device
        self._microbatches = schedule.microbatches
        self._batches = Batches(loop, self._microbatches, groups.of_all_peers)
        self._seeds = Seeds(module, stages, device, layout.data_rank)
        self._unused_results: set[str] = set()
        self._under_way: deque[_Begun] = deque()
        self._late_changes = False  # whether any step changes, after the network, what the next batch reads
        self._apart = StatesApart(module, stages)
        self._kept = LateState(module, stages, self._apart)
        self.reset_crossings()
        earlier = groups.backward.earlier
        self._ties = TiedGradients(module, known.ties, layout.pipeline_rank, earlier, groups.control, device)
        self._logs = HeldLogs(module, self._block, self._is_silent)
        self._output = DirectOutput(module, self._is_silent)
        warns = stages.is_last and layout.data_rank == layout.tensor_rank == 0
        self._rehearsals = Rehearsals(module, self._logs.latest, shares.weights.number, loss_of, alike, warns=warns)

    def reset_crossings(self) -> None:
        """Forget what crosses between stages, to find it again: when other parameters train. On all stages together."""
        groups, rank_of = self._groups, self._schedule.rank_of
        ranks = [rank_of[stage] for stage in range(len(rank_of))]
        pipeline = Pipeline(groups.forward, groups.backward, groups.control, ranks, self._device)
        first = Channel(pipeline, 0)
        channels = [Channel(pipeline, stage.index, first.handed) for stage in self._stages]
        self._step = PipelinedStep(self._stages, channels, self._remember, self._alike.of_any)
        self._crossings = self._step.crossings
        self._crossings.returns = self._returns

    def look_again(self, method: str) -> None:
        """Look anew at what crosses in the next step of this kind: it may depend on the epoch."""
        self._crossings.look_again(method)

    def watch(self, watch: StopWatch | None) -> str:
        """Call ``watch``, if any, for each action of training steps from now on; returns the schedule's name."""
        self._step.watch = watch
        return self._schedule.name

    def begin(self, method: str) -> None:
        """Prepare for the first step of this kind; a collective call over the pipeline.

        What steps return is sent to all stages only where a hook receives it. Batches left in flight by an interrupted
        evaluation are dropped.
        """
        self._under_way.clear()
        self.look_again(method)
        hook, follows = _RESULT_HOOKS.get(method), self._loop.follows()
        uses_results = hook is None or self._loop.receiver(hook) is not None
        all_use, all_follow = zip(*self._groups.gather_over_stages((uses_results, follows)))
        check_what_follows(follows, all_follow[-1])
        if any(all_use):
            self._unused_results.discard(method)
        else:
            self._unused_results.add(method)

    def train(self, draw: int, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run all forwards and backwards of a batch; returns what ``training_step`` would have returned for it."""
        module, loop = self._module, self._loop
        accumulating, scaler = loop.is_accumulating, loop.scaler
        step = self._on_parts("training_step", draw, self._batches.split(batch), args, kwargs)
        parts, shares, units, in_training = step.parts, self._shares, self._units, loop.training_context
        scale = 1.0 / (len(parts) * loop.accumulates)
        weights, of_parts = shares.weights.of(parts), dict[int, Tensor]()
        has_units = units.begin_step(loop.epoch)

        def scaled(i: int, result: Any) -> Tensor:
            loss = loss_of(result)
            of_parts[i] = weighted(loss.detach(), weights[i].of_mean)
            shares.means.note(loss)
            loss = weighted_for_backward(loss, weights[i].of_gradient) * scale
            return loss if scaler is None else scaler.scale(loss)

        def run(stage: Stage, i: int, part: Any) -> Any:
            with in_training():
                return self._run(stage, step, i, part)

        def run_again(stage: Stage, i: int, part: Any) -> Any:
            with in_training():
                return self._run_inside(stage, step, i, part)

        def before_backward(stage: Stage, i: int, is_last: bool) -> None:
            stage.seed = step.seeds[i]
            self._logs.begin_microbatch()  # hooks of gradients may log
            if has_units:
                units.expect_backward(is_last=is_last, accumulating=accumulating)

        with self._apart.batch():
            with self._around_steps("training_step", len(parts)):
                adding = self._ties.adding(first=loop.begins_accumulation, last=not accumulating)
                with adding, units.prefetching():
                    results = self._step.train(
                        run,
                        parts,
                        self._order(len(parts)),
                        kind=step.kind,
                        loss_of=scaled,
                        before_backward=before_backward,
                        after_backward=units.end_split_backward if self._schedule.splits_backwards else None,
                    )
                    units.end_backwards(accumulating=accumulating, has_skipped=self._step.has_skipped_backward)
                self._alike.begin(step.kind)
                if self._rehearse(step, run_again, is_known=shares.means.warn()):
                    reshard(module)  # the optimizer's step follows
            losses = [of_parts[i] for i in sorted(of_parts)]
            # where no hook receives the other results, only the losses are shared
            results = losses if "training_step" in self._unused_results else with_losses(results, losses)
            return self._share(results, step)

    def evaluate(
        self, method: str, draw: Draw, upcoming: Iterable[Arguments], batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forwards of a batch; returns on every stage what the step would have returned for it.

        Args:
            upcoming: The arguments of the next steps. A rank with one stage runs its part of these too, where it is
                known what crosses the cuts, until as many batches are in flight as stages follow.
        """
        arguments = (batch, *args)
        # after the first batch of a kind it is known what it changes that the next one reads
        is_known = self._alike.knows(self._kind(method, args))
        with self._apart.batch():
            begun = self._under_way.popleft() if self._under_way else self._begin(method, draw, arguments, kwargs)
            step, results = begun.step, begun.results
            if results is None:
                step = self._on_parts(method, draw(arguments), [batch], args, kwargs)
                results = self._call_by_call(step)
            elif is_known and len(self._stages) == 1 and not self._alike.is_needed and not self._late_changes:
                # with several stages on a rank, states are versioned per batch
                self._look_ahead(method, draw, upcoming)
            if method in self._unused_results:
                results = [None] * len(results)
            result = self._share(results, step)
        self._alike.begin(step.kind)
        self._step.flush(begun.sent if self._under_way else None)  # the last stage has received all of this batch
        return result

    def _begin(
        self, method: str, draw: Draw, arguments: Arguments, kwargs: dict[str, Any], *, waits: bool = True
    ) -> _Begun:
        """Run this rank's part of a batch."""
        batch, *args = arguments
        is_first = not self._alike.knows(self._kind(method, args))
        # in the first batch of a kind it isn't known yet whether it calls data ranks
        parts = self._batches.split_evaluated(batch, alike=self._alike.is_needed or is_first)
        step = self._on_parts(method, draw(arguments), parts, tuple(args), kwargs)

        def run(stage: Stage, i: int, part: Any) -> Any:
            return self._run_inside(stage, step, i, part)

        evaluate = partial(self._step.evaluate, run, parts, self._order(len(parts)), step.kind, waits=waits)
        with self._around_steps(method, len(parts)):
            results = call_through(self._module, evaluate)
            if results is not None and is_first:
                self._alike.begin(step.kind)
                self._rehearse(step, run)
        return _Begun(step, results, self._step.sent)

    def _call_by_call(self, step: Step) -> list[Any]:
        """Run a step that calls the network several times, once on all ranks; the network's calls run on the stages."""
        [seed], [batch] = step.seeds, step.parts
        for stage in self._stages:
            stage.seed = seed
        run = partial(self._run_inside, self._stages[-1], step, 0, batch)
        after_call = partial(self._seeds.after_call, seed)
        of_any = self._groups.of_any_peer if self._layout.expert_parallel_size > 1 else bool
        calls = self._step.calls(self._apart.call, self._seeds.remember, after_call, of_any)
        # data ranks may make more or fewer calls
        with kept_gathered(self._module), self._around_steps(step.method, 1):
            result = call_through(self._module, partial(calls.run, run))
        self._apart.begin()  # the step ran once, not once per stage
        return [result]

    def _look_ahead(self, method: str, draw: Draw, upcoming: Iterable[Arguments]) -> None:
        most = self._stages[0].network.stages - 1 - self._stages[0].index
        for arguments in islice(upcoming, len(self._under_way), most):
            batch, *args = arguments
            kind = self._kind(method, args)
            if not self._alike.knows(kind):  # nor what it changes that the next batch reads
                return
            parts = self._batches.split_evaluated(batch, alike=False)
            if not self._crossings.knows([signature(part, kind) for part in parts]):
                return
            self._under_way.append(self._begin(method, draw, arguments, {}, waits=False))

    def _kind(self, method: str, args: Sequence[Any]) -> str:
        """A key of what a step may depend on, other than its batch."""
        return " ".join(map(str, (method, self._loop.is_sanity_check, *args[1:])))

    def _on_parts(
        self, method: str, draw: int, parts: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Step:
        kind, seeds = self._kind(method, args), self._seeds.of_parts(draw, len(parts))
        return Step(method, kind, self._loop.step(method), parts, seeds, args, kwargs)

    def _order(self, microbatches: int) -> Row:
        """This rank's actions for this number of microbatches."""
        return self._schedule.first(microbatches).rows[self._layout.pipeline_rank]

    @contextmanager
    def _around_steps(self, method: str, microbatches: int) -> Iterator[None]:
        """Context in which a batch's steps run."""
        with (
            self._logs.holding(method),
            self._shares.metrics.weighing(microbatches, self._microbatches),
            self._seeds.preserved(),
            WholeNorms.aside(),
            self._output.watched(microbatches),
            steps_no_scheduler(self._loop.schedulers, microbatches),
            inference_mode_as_no_grad(),
        ):
            yield

    def _run(self, stage: Stage, step: Step, i: int, part: Any) -> Any:
        """Run a microbatch in its own call of the root, so that the root's hooks see what is returned or sent."""

        def inside() -> Any:
            result = self._run_inside(stage, step, i, part)
            if stage.passage.at_end is not None:
                stage.passage.ends()
            return result if stage.is_last else list(stage.passage.sent.values())

        bypassed = self._units.bypassed
        with bypassed.watched(stage.index) if bypassed is not None and i == 0 else nullcontext():
            result = call_through(self._module, inside)
        if bypassed is not None:
            bypassed.gather(result, stage.index)
        return result if stage.is_last else None

    def _run_inside(self, stage: Stage, step: Step, i: int, part: Any) -> Any:
        """Call the user's step on a microbatch, inside a call of the root; returns its result on the last stage."""
        stage.method, stage.seed = step.method, step.seeds[i]
        self._seeds.seed(stage.seed)  # equal on every stage, for the code around the blocks
        # call by call, a step runs whole on each rank
        searching = stage.passage.searching
        kept = self._kept.step(stage, searching=searching) if stage.calls is None else nullcontext()
        self._logs.begin_microbatch()
        own = tree.copied(part)  # it may run again, and hooks are given the batch as it was loaded
        try:
            with stage.running(self._module), kept:
                result = step.call(own, *step.args, **step.kwargs)
                if not stage.is_last:
                    return None
                refuse(result, "What the step returns")
                return result
        except StageEnd:
            return None
        except (RuntimeError, ValueError, IndexError) as error:
            if stage.calls is None and self._microbatches > 1 and not isinstance(error, ShardError):
                error.add_note(_CUT.format(parts=self._microbatches))
            raise

    def _returns(self, stage: Stage, sent: list[Tensor]) -> None:
        """Have the root's hooks see what a stage has sent after its run."""
        if torch.is_grad_enabled():
            call_through(self._module, lambda: sent)
            if self._units.bypassed is not None:
                self._units.bypassed.gather(sent, stage.index)

    def _rehearse(self, step: Step, run: RunOn, *, is_known: bool = False) -> bool:
        what = (self._step, step, run, self._remember, self._carry)
        uses_results = step.method not in self._unused_results
        with self._logs.aside():
            return self._rehearsals.rehearse(*what, uses_results=uses_results, is_known=is_known)

    def _carry(self) -> None:
        """Have all stages go on from the state that the last one has left; a collective call over the pipeline."""
        broadcast = partial(self._groups.broadcast_from_last_stage, device=self._device)
        self._late_changes |= self._kept.carry(broadcast, self._device)

    def _remember(self, *, puts_back: bool = True) -> StepMemory:
        self._seeds.may_have_new_generators = True  # a first step may make some
        others = [self._apart.begin, self._kept.forget, self._output.remember()] if puts_back else ()
        return StepMemory(self._module, len(self._stages), self._loop.observers, others, puts_back=puts_back)

    def _share(self, results: list[Any], step: Step) -> Any:
        """The last stage's merged result and logs, on every stage; no device is waited for."""
        shared: Any = None
        follows = self._loop.follows()
        if self._stages.is_last:
            size = tree.batch_size(step.parts[0]) if len(step.parts) > 1 else 0
            merged = tree.detached(merge(results, size, self._rehearsals.lengths(step)))
            shared = (merged, self._logs.combined(), self._kept.changes(), follows)
        shared = self._groups.broadcast_from_last_stage(shared, self._device)
        result, logs, changes, followed = shared
        check_what_follows(follows, followed)
        self._late_changes |= bool(changes)
        self._kept.take(changes, self._device, begun=len(self._under_way))
        self._logs.emit(logs)
        return result

    def _block(self) -> str | None:
        """The name of the block that is being called, if any is."""
        stage = self._stages.current
        if stage is None or not stage.passage.active:  # a stage may end inside of a block
            return None
        return next((stage.blocks[place] for place in stage.running_places if place is not None), None)

    def _is_silent(self) -> bool:
        """Whether a stage before the last runs: the last one's step does the same."""
        stage = self._stages.current
        return stage is not None and stage.in_step and not stage.is_last
