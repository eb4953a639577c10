"""Runs Lightning's steps through a pipeline: splits a batch into microbatches, runs the user's step on each, merges.

All ranks of a pipeline read the same batch. Each runs the user's step on every microbatch, as far as its stages go. The
last stage's merged result, its combined logs and the state that it changed are broadcast to all stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import ShardError, StepError
from lightning_shard.layout import Layout
from lightning_shard.parallel.fsdp.bypassed_units import BypassedUnits
from lightning_shard.parallel.fsdp.shard import (
    accumulate_late_gradients,
    end_backward,
    expect_backward_of,
    kept_gathered,
    prefetching,
    reduce_gradients,
    reshard,
)
from lightning_shard.parallel.fsdp.units import leave_out_prefetching, sharded_units
from lightning_shard.pipeline.dataflow.crossing import StageEnd
from lightning_shard.pipeline.dataflow.search import MemoryBeside
from lightning_shard.pipeline.dataflow.taint import refuse
from lightning_shard.pipeline.runtime.channel import Channel
from lightning_shard.pipeline.runtime.outputs import merge, with_losses
from lightning_shard.pipeline.runtime.step import PipelinedStep
from lightning_shard.pipeline.schedules.recorded import Watch
from lightning_shard.pipeline.schedules.schedule import Row, Schedule
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.pipeline.stages.tied import Tie, TiedGradients
from lightning_shard.plugin import trainer_private
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps.alike import TRAIN, Alike
from lightning_shard.plugin.steps.batches import Batches
from lightning_shard.plugin.steps.checks.agreement import check_what_follows, what_follows
from lightning_shard.plugin.steps.checks.changed_batches import ChangedBatches
from lightning_shard.plugin.steps.checks.stepped_schedulers import steps_no_scheduler
from lightning_shard.plugin.steps.checks.unequal_means import UnequalMeans
from lightning_shard.plugin.steps.direct_output import DirectOutput
from lightning_shard.plugin.steps.first_batches import FirstBatches
from lightning_shard.plugin.steps.gradient_norms import WholeNorms
from lightning_shard.plugin.steps.inference_mode import inference_mode_as_no_grad
from lightning_shard.plugin.steps.logs import HeldLogs, InBlock, check_logged_by_last_stage
from lightning_shard.plugin.steps.look_ahead import Arguments
from lightning_shard.plugin.steps.loss_weight import LossWeights, weighted, weighted_for_backward
from lightning_shard.plugin.steps.means_over_steps import MeansOverSteps, UnevenLists
from lightning_shard.plugin.steps.redirect import call_through
from lightning_shard.plugin.steps.schedule_choice import log_whole_backwards
from lightning_shard.plugin.steps.seeds import Seeds
from lightning_shard.plugin.steps.state.kept_states import KeptStates
from lightning_shard.plugin.steps.state.per_stage import StatesApart
from lightning_shard.plugin.steps.state.snapshot import Memory
from lightning_shard.plugin.steps.used_hooks import is_used

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
        parts: Its microbatches.
        results: Their results on the last stage; ``None`` if the batch has to run call by call.
        sent: The number of tensors that each stage of this rank had sent when the batch was done.
        logged: What blocks of this rank logged, on stages before the last.
    """

    parts: list[Any]
    results: list[Any] | None
    sent: list[int]
    logged: set[InBlock]


class PipelinedSteps:
    """Runs one LightningModule's ``training_step`` and evaluation steps on this rank's stages."""

    def __init__(
        self,
        module: pl.LightningModule,
        stages: Stages,
        groups: Groups,
        layout: Layout,
        device: torch.device,
        schedule: Schedule,
        ties: Iterable[Tie],
        weights: LossWeights,
        means: UnequalMeans,
        over_steps: MeansOverSteps,
        alike: Alike,
        bypassed: BypassedUnits | None,
        *,
        reduces_each: bool = False,
        reshards_each: bool = False,
    ) -> None:
        self._module = module
        self._stages = stages
        self._groups = groups
        self._layout = layout
        self._device = device
        self._microbatches = schedule.microbatches
        self._schedule = schedule
        self._splits = self._logs_whole_backwards = schedule.splits_backwards
        self._reduces_each = reduces_each
        self._reshards_each = reshards_each
        self._alike = alike
        self._batches = Batches(module, schedule.microbatches, groups.of_all_peers)
        self._seeds = Seeds(module, device, layout.data_rank)
        self._has_trained = False
        self._unused_results: set[str] = set()
        self._under_way: deque[_Begun] = deque()
        self._late_changes = False  # whether any step changes, after the network, what the next batch reads
        self._apart = StatesApart(module, stages)
        self._kept = KeptStates(module, stages, self._apart)
        self._changed_batches = ChangedBatches(module)
        self.reset_crossings()
        self._ties = TiedGradients(module, ties, layout.pipeline_rank, groups.backward.earlier, groups.control, device)
        self._logs = HeldLogs(module, self._block)
        self._output = DirectOutput(module, self._is_silent)
        self._weights = weights
        self._means = means
        self._over_steps = over_steps
        self._uneven_lists = UnevenLists()
        self._bypassed = bypassed
        warns = stages.is_last and layout.data_rank == layout.tensor_rank == 0
        self._first_batches = FirstBatches(module, self._logs.latest, weights.number, _loss, alike, warns=warns)

    def reset_crossings(self) -> None:
        """Forget what crosses between stages, to find it again: when other parameters train. On all stages together."""
        groups, rank_of = self._groups, self._schedule.rank_of
        ranks = [rank_of[stage] for stage in range(len(rank_of))]
        first = Channel(groups.forward, groups.backward, groups.control, 0, ranks, self._device)
        channels = [replace(first, stage=stage.index) for stage in self._stages]
        self._step = PipelinedStep(self._stages, channels, self._remember, self._alike.of_any)
        self._step.returns = self._returns

    def watch(self, watch: Watch) -> str:
        """Call ``watch`` for each action of training steps from now on; returns the schedule's name."""
        self._step.watch = watch
        return self._schedule.name

    def train(self, precision: Precision, optimizer: Any, draw: int, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run all forwards and backwards of a batch; returns what ``training_step`` would have returned for it."""
        module = self._module
        trainer = module.trainer
        accumulating = trainer_private.is_accumulating(trainer)
        trainer_private.zero_gradients(trainer, trainer.fit_loop.epoch_loop.batch_idx, optimizer)
        parts = self._batches.split(batch)
        scale = 1.0 / (len(parts) * trainer.accumulate_grad_batches)
        weights = self._weights.of(parts)
        scaler = getattr(precision, "scaler", None)  # fp16's
        units = list(sharded_units(module))
        if self._bypassed is not None:
            self._bypassed.begin_step(module.current_epoch)

        def scaled(i: int, result: Any) -> Tensor:
            self._means.note(_loss(result))
            loss = weighted_for_backward(_loss(result), weights[i].of_gradient) * scale
            return loss if scaler is None else scaler.scale(loss)

        def run(stage: Stage, i: int, part: Any) -> Any:
            with precision.train_step_context():
                return self._run(stage, "training_step", draw, i, part, args, kwargs)

        def run_again(stage: Stage, i: int, part: Any) -> Any:
            with precision.train_step_context():
                return self._run_inside(stage, "training_step", draw, i, part, args, kwargs)

        def before_backward(stage: Stage, i: int, is_last: bool) -> None:
            self._seeds.of_part(stage, draw, i)
            self._logs.begin_microbatch()  # hooks of gradients may log
            self._expect_backward(units, is_last=is_last, accumulating=accumulating)

        def after_backward() -> None:
            if self._splits and self._reduces_each:
                reduce_gradients(module, reshards=False)
            elif self._splits:
                accumulate_late_gradients(units)

        with self._apart.batch():
            with self._around_steps("training_step", len(parts)):
                with (
                    self._ties.adding(first=trainer_private.begins_accumulation(trainer), last=not accumulating),
                    # overlaps with the transfer of the stage's input
                    prefetching(module, all_units=not self._reshards_each) if self._has_trained else nullcontext(),
                ):
                    results = self._step.train(
                        run,
                        parts,
                        self._order(len(parts)),
                        loss_of=scaled,
                        before_backward=before_backward,
                        after_backward=after_backward,
                    )
                    self._end_backwards(accumulating)
                self._alike.begin(TRAIN)
                if self._rehearse(TRAIN, "training_step", args, parts, run_again, is_known=self._means.warn()):
                    reshard(module)  # the optimizer's step follows
            if self._logs_whole_backwards and self._has_trained:  # the first batch runs its first backwards whole
                log_whole_backwards(self._schedule, self._step)
                self._logs_whole_backwards = False
            self._has_trained = True
            losses = [weighted(_loss(result), weight.of_mean) for result, weight in zip(results, weights)]
            # where no hook receives the other results, only the losses are shared
            results = losses if "training_step" in self._unused_results else with_losses(results, losses)
            result = self._share(results, parts, self._logs.in_blocks(of_last=False), "training_step", args)
        loss = _loss(result) / trainer.accumulate_grad_batches
        precision.pre_backward(loss, module)
        precision.post_backward(loss, module)
        return result

    def _expect_backward(self, units: Sequence[nn.Module], *, is_last: bool, accumulating: bool) -> None:
        if not self._reshards_each:
            leave_out_prefetching(units)
        if self._splits:  # FSDP2 takes the end of a backward's first part for the end of the whole backward
            expect_backward_of(units, reduces=False, reshards=False, is_last=is_last)
            return
        reduces = self._reduces_each or (is_last and not accumulating)
        expect_backward_of(units, reduces=reduces, reshards=is_last or self._reshards_each)

    def _end_backwards(self, accumulating: bool) -> None:
        """Do what the end of a last backward would have done, where there was none."""
        end_backward(self._module, reduces=not accumulating)
        if self._splits or (self._step.has_skipped_backward and not accumulating):
            if not accumulating:
                reduce_gradients(self._module)
            reshard(self._module)

    def evaluate(
        self, method: str, draw: Draw, upcoming: Iterable[Arguments], batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forwards of a batch; returns on every stage what the step would have returned for it.

        Args:
            draw: Computes a step's seed from its arguments.
            upcoming: The arguments of the next steps. A rank with one stage runs its part of these too, where it is
                known what crosses the cuts, until as many batches are in flight as stages follow.
        """
        arguments = (batch, *args)
        # after the first batch of a kind it is known what it changes that the next one reads
        is_known = self._alike.knows(self._kind(method, args))
        with self._apart.batch():
            begun = self._under_way.popleft() if self._under_way else self._begin(method, draw, arguments, kwargs)
            parts, results, logged = begun.parts, begun.results, begun.logged
            if results is None:
                parts, seed = [batch], draw(arguments)
                for stage in self._stages:
                    self._seeds.of_part(stage, seed, 0)
                run = partial(self._run_inside, self._stages[-1], method, seed, 0, batch, args, kwargs)
                after_call = partial(self._seeds.after_call, self._stages[-1], seed)
                of_any = self._groups.of_any_peer if self._layout.expert_parallel_size > 1 else bool
                of_calls = partial(
                    self._step.call_by_call, run, self._apart.call, self._seeds.remember, after_call, of_any
                )
                # data ranks may make more or fewer calls
                with kept_gathered(self._module), self._around_steps(method, 1):
                    results = [call_through(self._module, of_calls)]
                self._apart.begin()  # the step ran once, not once per stage
                logged = self._logs.in_blocks(of_last=False)
            elif is_known and len(self._stages) == 1 and not self._alike.is_needed and not self._late_changes:
                # with several stages on a rank, states are versioned per batch
                self._look_ahead(method, draw, upcoming)
            if method in self._unused_results:
                results = [None] * len(results)
            result = self._share(results, parts, logged, method, args)
        self._alike.begin(self._kind(method, args))
        self._step.flush(begun.sent if self._under_way else None)  # the last stage has received all of this batch
        return result

    def begin(self, method: str) -> None:
        """Prepare for the first step of this kind; a collective call over the pipeline.

        What steps return is sent to all stages only where a hook receives it. Batches left in flight by an interrupted
        evaluation are dropped.
        """
        self._under_way.clear()
        self.look_again(method)
        trainer, hook = self._module.trainer, _RESULT_HOOKS.get(method)
        uses_results = hook is None or is_used(trainer, self._module, hook)
        follows = what_follows(trainer)
        all_use, all_follow = zip(*self._groups.gather_over_stages((uses_results, follows)))
        check_what_follows(follows, all_follow[-1])
        if any(all_use):
            self._unused_results.discard(method)
        else:
            self._unused_results.add(method)

    def look_again(self, method: str) -> None:
        """Look anew at what crosses in the next step of this kind: it may depend on the epoch."""
        self._step.look_again(TRAIN if method == "training_step" else method)

    def _forget_others(self) -> None:
        """After such a step: if it found something else, forget what is known of batches of other shapes."""
        kind, self._step.looked_again_at = self._step.looked_again_at, None
        if kind is None or not self._step.knows_others(kind):
            return
        if any(self._groups.gather_over_stages(self._step.found_other)):
            self._step.forget(kind)

    def _look_ahead(self, method: str, draw: Draw, upcoming: Iterable[Arguments]) -> None:
        most = self._stages[0].count - 1 - self._stages[0].index
        for arguments in islice(upcoming, len(self._under_way), most):
            batch, *args = arguments
            kind = self._kind(method, args)
            if not self._alike.knows(kind):  # nor what it changes that the next batch reads
                return
            if not self._step.knows(self._batches.split_evaluated(batch, alike=False), kind):
                return
            self._under_way.append(self._begin(method, draw, arguments, {}, waits=False))

    def _kind(self, method: str, args: Sequence[Any]) -> str:
        """A key of what a step may depend on, other than its batch."""
        return " ".join(map(str, (method, self._module.trainer.sanity_checking, *args[1:])))

    def _begin(
        self, method: str, draw: Draw, arguments: Arguments, kwargs: dict[str, Any], *, waits: bool = True
    ) -> _Begun:
        """Run this rank's part of a batch."""
        batch, *args = arguments
        kind = self._kind(method, args)
        # in the first batch of a kind it isn't known yet whether it calls data ranks
        alike = self._alike.is_needed or not self._alike.knows(kind)
        parts, seed = self._batches.split_evaluated(batch, alike=alike), draw(arguments)

        def run(stage: Stage, i: int, part: Any) -> Any:
            return self._run_inside(stage, method, seed, i, part, tuple(args), kwargs)

        step = partial(self._step.evaluate, run, parts, self._order(len(parts)), kind, waits=waits)
        with self._around_steps(method, len(parts)):
            results = call_through(self._module, step)
            if results is not None and not self._alike.knows(kind):
                self._alike.begin(kind)
                self._rehearse(kind, method, args, parts, run)
        return _Begun(parts, results, self._step.sent, self._logs.in_blocks(of_last=False))

    def _rehearse(self, kind: str, method: str, *what: Any, is_known: bool = False) -> bool:
        what = (self._step, kind, method, *what, self._remember)
        return self._first_batches.rehearse(*what, uses_results=method not in self._unused_results, is_known=is_known)

    def _order(self, microbatches: int) -> Row:
        """This rank's actions for this number of microbatches."""
        return self._schedule.first(microbatches).rows[self._layout.pipeline_rank]

    def _run(
        self, stage: Stage, method: str, draw: int, i: int, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a microbatch in its own call of the root, so that the root's hooks see what is returned or sent."""

        def step() -> Any:
            result = self._run_inside(stage, method, draw, i, part, args, kwargs)
            stage.passage.ends()
            return result if stage.is_last else list(stage.passage.sent.values())

        bypassed = self._bypassed
        with bypassed.watched(stage.index) if bypassed is not None and i == 0 else nullcontext():
            result = call_through(self._module, step)
        if bypassed is not None:
            bypassed.gather(result, stage.index)
        return result if stage.is_last else None

    def _returns(self, stage: Stage, sent: list[Tensor]) -> None:
        """Have the root's hooks see what a stage has sent after its run."""
        if torch.is_grad_enabled():
            call_through(self._module, lambda: sent)
            if self._bypassed is not None:
                self._bypassed.gather(sent, stage.index)

    def _run_inside(
        self, stage: Stage, method: str, draw: int, i: int, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the user's step on a microbatch, inside a call of the root; returns its result on the last stage."""
        self._seeds.seed(self._seeds.of_part(stage, draw, i))  # equal on every stage, for the code around the blocks
        stage.method = method
        searching, several = stage.passage.searching, len(self._stages) > 1
        if searching or several or self._changed_batches.changes(method):  # the part may run again; hooks are given it
            part = tree.copied(part)
        looks = searching and stage.calls is None
        looking = self._changed_batches.looking_at(method, part, warns=stage.is_last) if looks else nullcontext()
        # call by call, a step runs whole on each rank
        kept = self._kept.step(stage, searching=searching) if stage.calls is None else nullcontext()
        # otherwise each stage's run on this rank would add to the logs
        forget_logs = self._logs.remember() if several and not stage.is_last else None
        self._logs.begin_microbatch()
        self._over_steps.begin_microbatch(tree.batch_size(part) if self._microbatches > 1 else 1)
        try:
            with kept, stage.running(self._module), looking:
                result = getattr(self._module, method)(part, *args, **kwargs)
                if not stage.is_last:
                    return None
                refuse(result, "What the step returns")
                self._kept.check_numbers(stage)
                return result
        except StageEnd:
            return None
        except (RuntimeError, ValueError, IndexError) as error:
            if stage.calls is None and self._microbatches > 1 and not isinstance(error, ShardError):
                error.add_note(_CUT.format(parts=self._microbatches))
            raise
        finally:
            if forget_logs is not None:
                forget_logs()

    @contextmanager
    def _around_steps(self, method: str, microbatches: int) -> Iterator[None]:
        """Context in which a batch's steps run."""
        with (
            self._logs.holding(microbatches, method),
            self._over_steps.batch(microbatches, self._microbatches),
            self._seeds.preserved(),
            WholeNorms.aside(),
            self._output.watched(microbatches),
            steps_no_scheduler(self._module.trainer, microbatches),  # type: ignore[attr-defined]
            inference_mode_as_no_grad(),
        ):
            yield
        self._forget_others()

    def _is_silent(self) -> bool:
        """Whether a stage before the last runs: the last one's step does the same."""
        stage = self._stages.current
        return stage is not None and stage.in_step and not stage.is_last

    def _remember(self, *, puts_back: bool = True) -> MemoryBeside:
        self._seeds.look_for_generators()  # a first step may make some
        beside = (self._apart, self._logs, self._kept, self._output) if puts_back else ()
        put_rest_back = [each.remember() for each in beside]

        def put_all_back() -> None:
            for put_back in put_rest_back:
                put_back()

        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        memory = Memory(self._module, len(self._stages), callbacks, puts_back=puts_back)
        return MemoryBeside(memory, put_all_back)

    def _block(self) -> tuple[str, bool] | None:
        """The block that is being called, and whether the last stage calls it."""
        stage = self._stages.current
        if stage is None or stage.place is None or not stage.passage.active:  # a stage may end inside of a block
            return None
        return stage.blocks[stage.place], stage.is_last

    def _share(
        self, results: list[Any], parts: Sequence[Any], logged: set[InBlock], method: str, args: Sequence[Any]
    ) -> Any:
        """The last stage's merged result and logs, on every stage; no device is waited for.

        Args:
            logged: In blocks, by this rank's stages before the last.
            method: The step.
            args: Its arguments after the batch.
        """
        shared: Any = None
        follows = what_follows(self._module.trainer)
        if self._stages.is_last:
            size = tree.batch_size(parts[0]) if len(parts) > 1 else 0
            merged = tree.map_leaves(_detached, merge(results, size, self._first_batches.lengths(method, args)))
            in_blocks = sorted(self._logs.in_blocks(of_last=True))  # the broadcaster takes no set for an equal value
            changes = self._kept.changes()
            self._uneven_lists.look(changes, len(results))
            shared = (merged, self._logs.combined(), changes, len(results), in_blocks, follows)
        shared = self._groups.broadcast_from_last_stage(shared, self._device)
        result, logs, changes, microbatches, logged_last, followed = shared
        check_what_follows(follows, followed)
        self._late_changes |= bool(changes)
        self._kept.take(changes, microbatches + len(self._under_way), self._device)
        check_logged_by_last_stage(logged, set(logged_last))
        self._logs.emit(logs)
        return result


def _loss(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"training_step returned {type(result).__name__}: with several pipeline stages it must return the loss, a"
            " tensor of one element, or a dict that holds it as 'loss'."
        )
    return loss.reshape(())


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
