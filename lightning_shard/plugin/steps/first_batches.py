"""Rehearses the first batch of each kind of step, and reports by name what its split into microbatches changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.arguments import few
from lightning_shard.errors import WHOLE_BATCHES, BatchError, StepError
from lightning_shard.parallel.batch_norm import batch_norms
from lightning_shard.parallel.fsdp.shard import prefetching
from lightning_shard.pipeline.dataflow.search import Memory
from lightning_shard.pipeline.runtime.outputs import Lengths, lengths
from lightning_shard.pipeline.runtime.step import PipelinedStep, RunOn
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.steps.alike import Alike
from lightning_shard.plugin.steps.batches import Step
from lightning_shard.plugin.steps.checks.rehearsal import (
    LENGTH,
    LOG,
    LOSS,
    Name,
    Number,
    Numbers,
    Unlike,
    numbers_kept,
    rehearse,
)
from lightning_shard.plugin.steps.redirect import call_through


class FirstBatches:
    """The rehearsals of one module's steps on this rank, one for each kind of step, and what they report.

    Args:
        logged: Gives what the microbatch has logged, by name.
        weight: Gives how much a microbatch's loss counts.
        loss_of: The loss of what a training step returned.
        alike: The data ranks, which agree on runs that they take part in.
        warns: Whether this rank reports.
    """

    def __init__(
        self,
        module: nn.Module,
        logged: Callable[[], Mapping[str, Number]],
        weight: Callable[[Any], float],
        loss_of: Callable[[Any], Tensor],
        alike: Alike,
        *,
        warns: bool,
    ) -> None:
        self._module = module
        self._logged = logged
        self._weight = weight
        self._loss_of = loss_of
        self._alike = alike
        self._warns = warns
        self._lengths: dict[tuple[Any, ...], Lengths] = {}
        self._told: set[Name] = set()

    def lengths(self, method: str, args: Sequence[Any]) -> Lengths:
        """What is known of the lengths of what a step with these arguments returns."""
        return self._lengths.get((method, *args[1:]), Lengths())

    def rehearse(
        self,
        pipelined: PipelinedStep,
        kind: str,
        step: Step,
        run_on: RunOn,
        remember: Callable[[], Memory],
        carry: Callable[[], None],
        *,
        uses_results: bool,
        is_known: bool = False,
    ) -> bool:
        """Rehearse a step that has run on a batch, if none with these arguments was before.

        A collective call over the pipeline, and over data ranks that have to run alike.

        Args:
            kind: The kind of step.
            run_on: Calls it on a microbatch, inside of a call of the root, with the random numbers of that of a number.
            remember: Takes a snapshot of what it may change.
            carry: Has all stages go on from the state that the last one has left.
            uses_results: Whether what it returns is used.
            is_known: Whether it was said already why the loss isn't a mean; logs are then none for the same reason.

        Returns:
            Whether it was rehearsed.

        Raises:
            StepError: Its result depends on what the step before has left. Or it failed, and data ranks would wait.
        """
        method, parts = step.method, step.parts
        if len(parts) == 1 or (method, *step.args[1:]) in self._lengths:  # the same on data ranks that run alike
            return False
        self._lengths[method, *step.args[1:]] = known = Lengths()
        if not self._alike.may_rehearse(method):
            return False
        joined, trains = _joined(parts), method == "training_step"
        if not self._alike.all_can(method, joined is not None):
            joined = None

        def numbers_of(result: Any, microbatch: Any) -> Numbers:
            found: dict[Name, Number] = {(LOG, name): number for name, number in self._logged().items()}
            if uses_results:
                sizes = lengths(result, tree.batch_size(microbatch))
                found |= {(LENGTH, path): Number(torch.tensor(float(size))) for path, size in sizes.items()}
            if trains:
                found[LOSS, ""] = Number(self._loss_of(result).detach().clone(), self._weight(microbatch))
            return found

        def run(stage: Stage, i: int, part: Any) -> Any:
            with _with_running_statistics(self._module):
                return call_through(self._module, partial(run_on, stage, i, part))

        pair, state = (parts[0], parts[1]), partial(numbers_kept, self._module)
        carry()  # what the batch has left
        # the backwards of the batch have freed the parameters
        with prefetching(self._module, all_units=not self._alike.is_needed) if trains else nullcontext():
            found = rehearse(pipelined, kind, run, pair, joined, remember(), numbers_of, state, carry)
        found.refuse_carried(len(parts))
        if found.failure is not None and self._alike.is_needed:
            raise StepError(_FAILED) from found.failure
        known.add(found.fixed, found.growing)
        if self._warns:
            self._report(step, found.counted, {} if is_known else found.unlike)
        return True

    def _report(self, step: Step, counted: Sequence[str], unlike: Mapping[Name, Unlike]) -> None:
        """Warn of what was found, of each name once."""
        counted = [name for name in counted if ("kept", name) not in self._told]
        lines = [_text(key, each) for key, each in unlike.items() if key not in self._told]
        self._told |= {*unlike, *(("kept", name) for name in counted)}
        if counted:
            lines.append(
                f"{few(counted)}: two microbatches leave something else than both as one. State that a step changes"
                " counts once per microbatch (sentence 6 of the contract): count batches in on_train_batch_end"
                " (on_validation_batch_end, …), and samples by a torchmetrics metric."
            )
        if lines:
            warnings.warn(
                f"{step.method} runs once for each of {len(step.parts)} microbatches, and two of them run as one give"
                f" something else. {WHOLE_BATCHES} or pipeline_parallel_size=1 is as in one process; else:\n- "
                + "\n- ".join(lines),
                stacklevel=2,
            )


_FAILED = (
    "The step calls other data ranks (itself, or in its forwards), and failed when two microbatches of the first batch"
    " ran as one, as they do to find out what the split changes. The others would wait for this rank: make it"
    " independent of the number of samples, or use microbatches=1 or data_parallel_size=1."
)
_MEANS = "Losses and logs are means over samples (sentence 5 of the contract)"
_OF_LOSSES = (
    "divide a sum by the number of samples (reduction='mean'); for a mean over a number that varies, as of tokens, pass"
    " loss_weight, a function of the batch that returns it; a loss or network that compares samples sees a microbatch"
)
_OF_LOGS = (
    "log a count of samples with reduce_fx='sum'; else log what it is computed from, and compute it in"
    " on_train_batch_end or on_train_epoch_end (on_validation_…); for a mean over a number that varies, give"
    " batch_size=that number; a torchmetrics.Metric is right for the epoch (on_step=False, on_epoch=True)"
)


def _text(key: Name, found: Unlike) -> str:
    what, remedy = ("The training loss", _OF_LOSSES) if key[0] == LOSS else (f"self.log({key[1]!r}, …)", _OF_LOGS)
    isnt = "a sum" if found.is_sum else f"no {found.of.by}"
    values = f"{found.joined:.6g} for both as one, and {found.combined:.6g} as the {found.of.by} of each"
    return f"{what} is {isnt} over samples ({values}). {_MEANS}: {remedy}."


def _joined(parts: Sequence[Any]) -> Any:
    """The first two microbatches as one; ``None`` if they can't be joined."""
    try:
        return tree.joined(parts[0], parts[1], tree.batch_size(parts[1]))
    except BatchError:
        return None


@contextmanager
def _with_running_statistics(module: nn.Module) -> Iterator[None]:
    """Context in which BatchNorm compares no samples: that it does is warned of at setup."""
    layers = [layer for layer in batch_norms(module).values() if layer.training and layer.track_running_stats]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True
