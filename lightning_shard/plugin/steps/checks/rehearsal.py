"""Runs the first microbatches of a batch once more, and as one, to find what the split into microbatches changes.

The second one's result must not depend on what the first has left. Loss and logs of the joined one are the mean of the
two, or logs their sum where they count; what is kept is the same after it (:func:`left_otherwise`); lengths of what the
step returns tell how to merge it (``runtime/outputs.py``). The runs, and why: ``docs/decisions/rehearsal.md``.

All is put back. Not judged: a step that can't run on both at once; losses and logs where random numbers are drawn in
another way; logs that differ when a microbatch runs twice, as a time does. Of what is kept, lists aren't looked at, to
which steps append, nor metrics and BatchNorm: how their states add up is known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard import tree
from lightning_shard.arguments import few
from lightning_shard.errors import WHOLE_BATCHES, BatchError, StepError
from lightning_shard.parallel.batch_norm import batch_norms
from lightning_shard.parallel.fsdp.shard import prefetching
from lightning_shard.parallel.rank_compare import Fingerprint, differing, fingerprints
from lightning_shard.pipeline.dataflow.draws import DrawsByRow
from lightning_shard.pipeline.dataflow.search import Memory
from lightning_shard.pipeline.runtime.outputs import Lengths, lengths
from lightning_shard.pipeline.runtime.step import PipelinedStep, RunOn
from lightning_shard.pipeline.stages.compiled_functions import as_written
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.batches import Alike, Step
from lightning_shard.plugin.steps.redirect import call_through
from lightning_shard.state.walk import children, reachable


class Number(NamedTuple):
    """The loss or a log of a microbatch.

    Attributes:
        value: Of no dimension.
        weight: Of this microbatch, in a mean of several.
        by: What makes the batch's of microbatches' numbers: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
    """

    value: Tensor
    weight: float = 1.0
    by: str = "mean"


Numbers = Mapping[str, Number]
"""Losses and logs of a microbatch, by what they are."""
Sizes = Mapping[tree.Path, int]
"""How long what a step returned is, by its path."""


@dataclass
class _Run:
    """What a microbatch gave on this rank; all but the last two on the last stage only.

    Attributes:
        tensors: What the last stage received, but for what blocks keep, and returned.
        is_blind: Whether random numbers were drawn that depend on the number of samples.
        drawn: Where the generators of numpy and Python stood at the end.
    """

    numbers: Numbers = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    is_blind: bool = False
    drawn: Any = None


@dataclass
class Findings:
    """What a rehearsal has found: on all ranks the same, but for losses, logs and lengths, which the last stage's has.

    Attributes:
        counted: Names of numbers and tensors that two microbatches leave otherwise than both as one.
        unlike: What to report of losses and logs that aren't combined to that of both as one, by what they are.
        lengths: What is known of the lengths of what the step returns.
        failure: Why a run failed, after which no more were made.
    """

    counted: Sequence[str] = ()
    unlike: dict[str, str] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=Lengths)
    failure: BaseException | None = None


class Rehearsals:
    """The rehearsals of one module's steps on this rank, one for each kind of step, and what they report.

    Args:
        weight: Gives how much a microbatch's loss counts.
        alike: The data ranks, which agree on runs that they take part in.
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
        self._told: set[str] = set()

    def lengths(self, step: Step) -> Lengths:
        """What is known of the lengths of what a step of this kind returns."""
        return self._lengths.get(_of_step(step), Lengths())

    def rehearse(
        self,
        pipelined: PipelinedStep,
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
            remember: Takes a snapshot of what it may change; the others are :func:`rehearse`'s.
            is_known: Whether it was said already why the loss isn't a mean; logs are then none for the same reason.

        Returns:
            Whether it was rehearsed.
        """
        method, parts, key = step.method, step.parts, _of_step(step)
        if len(parts) == 1 or key in self._lengths:  # the same on data ranks that run alike
            return False
        self._lengths[key] = Lengths()
        if not self._alike.may_rehearse(method):
            return False
        joined, trains = _joined(parts), method == "training_step"
        if not self._alike.all_can(method, joined is not None):
            joined = None

        def look(result: Any, microbatch: Any) -> tuple[Numbers, Sizes]:
            numbers = {f"self.log({name!r}, …)": number for name, number in self._logged().items()}
            if trains:
                numbers[_LOSS] = Number(self._loss_of(result).detach().clone(), self._weight(microbatch))
            return numbers, lengths(result, tree.batch_size(microbatch)) if uses_results else {}

        def run(stage: Stage, i: int, part: Any) -> Any:
            with _with_running_statistics(self._module):
                return call_through(self._module, partial(run_on, stage, i, part))

        pair, state = (parts[0], parts[1]), partial(numbers_kept, self._module)
        carry()  # what the batch has left
        # the backwards of the batch have freed the parameters
        with prefetching(self._module, all_units=not self._alike.is_needed) if trains else nullcontext():
            found = rehearse(pipelined, step.kind, run, pair, joined, remember(), carry, look, state)
        if found.failure is not None and self._alike.is_needed:
            raise StepError(_FAILED) from found.failure
        self._lengths[key] = found.lengths
        if self._warns:
            self._report(step, found.counted, {} if is_known else found.unlike)
        return True

    def _report(self, step: Step, counted: Sequence[str], unlike: Mapping[str, str]) -> None:
        """Warn of what was found, of each name once."""
        counted = [name for name in counted if name not in self._told]
        lines = [line for name, line in unlike.items() if name not in self._told]
        self._told |= {*unlike, *counted}
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


def _of_step(step: Step) -> tuple[Any, ...]:
    """What a rehearsal's findings hold for: also for steps that were first run to try them before training."""
    return step.method, *step.args[1:]


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


class _FailedError(Exception):
    """A run failed on a stage; raised on all of them."""


def rehearse(
    step: PipelinedStep,
    kind: str,
    run_on: RunOn,
    pair: tuple[Any, Any],
    joined: Any,
    memory: Memory,
    carry: Callable[[], None],
    look: Callable[[Any, Any], tuple[Numbers, Sizes]] = lambda *_: ({}, {}),
    state: Callable[[], Kept] = dict,
) -> Findings:
    """Run two microbatches again, and both as one; a collective call over the pipeline.

    Args:
        run_on: Calls the step for a stage on a microbatch, with the random numbers of that of a number.
        joined: ``None`` if they can't be joined: then only the second one's result is compared.
        memory: A snapshot of the present state, which is put back; released at the end.
        carry: Has all stages go on from the state that the last one has left; a collective call over the pipeline.
        look: The numbers and sizes of a step that has just run, from its result and its microbatch.
        state: This rank's kept numbers, and sums of tensors, by name.

    Raises:
        StepError: On all ranks, if a microbatch's result depends on what the one before has left.
    """
    found, samples, is_blind = Findings(), tree.batch_size(pair[0]), False
    is_carried, changed = False, list[str]()

    def run(part: Any) -> _Run:
        ran = _Run()

        def on(stage: Stage) -> Any:
            with as_written(), DrawsByRow(samples) as draws:  # compiled code draws by itself
                result = run_on(stage, 0, part)
            ran.is_blind |= draws.is_blind
            if stage.is_last and not stage.passage.failed:
                ran.numbers, ran.sizes = look(result, part)
                # a number that a block keeps always crosses, also one that only counts: the result tells what uses it
                crossed = [tensor for key, tensor in stage.passage.received.items() if key[0] != "kept"]
                ran.tensors = [t.detach().clone() for t in tree.tensors((crossed, result))]
            return result

        with torch.no_grad():
            failure = step.rehearse(on, kind)
        if failure is not None:
            raise _FailedError from failure
        carry()
        ran.drawn = randomness.where_others_stand()
        return ran

    begin = state()
    try:
        one = run(pair[0])
        first = state()
        other = run(pair[1])
        both, changed = state(), memory.changed()
        memory.put_back()
        again = run(pair[1])
        is_carried = not _are_repeated(other.tensors, again.tensors)
        memory.put_back()
        if joined is not None:
            whole = run(joined)
            found.counted = [*left_otherwise(begin, first, both, state())]
            found.lengths = as_long(one.sizes, other.sizes, whole.sizes)
            found.unlike = dict(_unlike(one.numbers, other.numbers, again.numbers, whole.numbers))
            is_blind = one.is_blind or whole.is_blind or one.drawn != whole.drawn
    except _FailedError as error:
        found.failure = error.__cause__
    finally:
        memory.put_back()
        memory.forget()
    are_carried, changes, counted, are_blind = zip(*step.gather((is_carried, changed, found.counted, is_blind)))
    if any(are_carried):
        raise _is_carried(_all_of(changes))
    found.counted = _all_of(counted)
    if any(are_blind):
        found.unlike.clear()
    return found


def _all_of(names: Sequence[Sequence[str]]) -> list[str]:
    return [*dict.fromkeys(name for each in names for name in each)]


def _is_carried(changed: Sequence[str]) -> StepError:
    paths = [path.replace("_buffers.", "") or "attributes of the LightningModule" for path in changed]
    return StepError(
        "The result of a step depends on what the step before has left"
        f" ({few(paths) or 'something that is kept outside of the LightningModule'} changes). State that a step"
        " changes counts once per microbatch, and an earlier stage leaves the step after its last block: one process"
        " would go on from what the batch before has left. Set it anew where the step begins, change it in"
        f" on_train_batch_start or on_train_batch_end, or use {WHOLE_BATCHES} or pipeline_parallel_size=1. Or the step"
        " draws from a generator that it makes without a seed: the global ones draw alike on all stages.",
        breaks=6,
    )


# Losses and logs


_LOSS = "The training loss"
_TOLERANCE, _IN_HALF, _ON_DEVICES = 2e-5, 3e-2, 1e-3
"""Of losses and logs, relative to the larger value; on other devices than the CPU at least the last one."""
_ROUNDING = 1e-6
"""Absolute, of losses and logs that are zero but for rounding."""
_OF_LOSSES = (
    "divide a sum by the number of samples (reduction='mean'); for a mean over a number that varies, as of tokens, pass"
    " loss_weight, a function of the batch that returns it; a loss or network that compares samples sees a microbatch"
)
_OF_LOGS = (
    "log a count of samples with reduce_fx='sum'; else log what it is computed from, and compute it in"
    " on_train_batch_end or on_train_epoch_end (on_validation_…); for a mean over a number that varies, give"
    " batch_size=that number; a torchmetrics.Metric is right for the epoch (on_step=False, on_epoch=True)"
)


def _unlike(one: Numbers, other: Numbers, again: Numbers, whole: Numbers) -> Iterator[tuple[str, str]]:
    """What to report of each number that isn't combined to that of both as one."""
    for name in sorted(one.keys() & other.keys() & again.keys() & whole.keys()):
        mine, joined = one[name], whole[name].value
        if not _are_close(other[name].value, again[name].value, share=0.01):
            continue
        values = torch.stack([mine.value.double(), other[name].value.double()])
        weights = values.new_tensor([mine.weight, other[name].weight])
        if mine.by in ("sum", "min", "max"):
            combined = getattr(values, mine.by)()
        else:
            combined = (values * weights).sum() / weights.sum()
        if not _are_close(joined, combined):
            is_sum = mine.by == "mean" and _are_close(joined, values.sum())
            yield (
                name,
                f"{name} is {'a sum' if is_sum else f'no {mine.by}'} over samples ({float(joined):.6g} for both as one,"
                f" and {float(combined):.6g} as the {mine.by} of each). Losses and logs are means over samples"
                f" (sentence 5 of the contract): {_OF_LOSSES if name == _LOSS else _OF_LOGS}.",
            )


def _are_close(one: Tensor, other: Tensor, share: float = 1.0) -> bool:
    """Whether two numbers are equal up to a share of the tolerances; also if one is NaN."""
    tolerance = _IN_HALF if one.dtype in (torch.bfloat16, torch.float16) else _TOLERANCE
    tolerance = tolerance if one.device.type == "cpu" else max(tolerance, _ON_DEVICES)
    a, b = one.double(), other.to(one.device).double()
    return not bool((a - b).abs() > share * (tolerance * torch.maximum(a.abs(), b.abs()) + _ROUNDING))


# Results


_OF_REPEATED = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Of a microbatch that runs twice, relative to a tensor's largest value: caches may be rounded once more."""


def as_long(one: Sizes, other: Sizes, whole: Sizes) -> Lengths:
    """What is as long for both as for each, and as for both together.

    Of what varies, such as detections, the first may have as many as both; where there are none, nothing is known.
    """
    known = Lengths()
    for path in one.keys() & other.keys() & whole.keys():
        if whole[path] == one[path] + other[path] > 0:
            known.growing.add(path)
        elif whole[path] == one[path] == other[path] > 0:
            known.fixed.add(path)
    return known


def _are_repeated(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(_is_repeated, ones, others))


def _is_repeated(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding. Synchronises with the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other) or not one.numel():
        return True
    if not one.is_floating_point():
        return False
    tolerance = max(_OF_REPEATED.get(one.dtype, 1e-2), 0.0 if one.device.type == "cpu" else _ON_DEVICES)
    largest = float(one.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(one, other, rtol=0, atol=tolerance * largest, equal_nan=True)


# What is kept


_OF_KEPT = 1e-6
"""Of numbers and fingerprints, relative to the norm."""
_LARGEST = 2**24
"""Elements of a tensor that is looked at: statistics are small, larger tensors are data."""

Kept = Mapping[str, Fingerprint]


@torch.no_grad()
def numbers_kept(module: nn.Module) -> dict[str, Fingerprint]:
    """The numbers that a module, what it holds, and globals keep, and the fingerprints of tensors and arrays of floats.

    Version counters don't show changes made through ``.data``, and arrays have none.
    """
    norms, found = {id(part) for part in batch_norms(module).values()}, [*reachable(module)]
    known = tuple(f"{path}." for path, part in found if isinstance(part, Metric) or id(part) in norms)
    lists = {path for path, part in found if isinstance(part, Sequence)}
    numbers: dict[str, Fingerprint] = {}
    tensors: dict[str, Tensor] = {}
    for path, value in found:
        if path in lists or path.rpartition(".")[0] in lists or f"{path}.".startswith(known):
            continue
        is_array = isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float64)
        tensor = torch.tensor(value) if is_array else value
        if type(tensor) is Tensor and _is_looked_at(tensor):
            wide = tensor if tensor.itemsize > 2 else tensor.float()
            tensors[path.replace("_buffers.", "")] = wide.nan_to_num()
        for key, number in children(value):
            if type(number) in (int, float):
                # integers are compared as they are
                seen = ((), abs(number), number) if isinstance(number, float) else ((number,), 0.0, 0.0)
                numbers[".".join(filter(None, (path, str(key))))] = seen
    return numbers | fingerprints(tensors)


def _is_looked_at(tensor: Tensor) -> bool:
    is_plain = tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and not tensor.requires_grad and tensor.numel() <= _LARGEST


def left_otherwise(begin: Kept, first: Kept, both: Kept, whole: Kept) -> Iterator[str]:
    """The names of what two microbatches change, and leave otherwise than both as one.

    What a step makes anew with the same values, such as a table for its shapes, isn't changed.

    Args:
        begin: What was kept before.
        first: What the first microbatch has left.
        both: What the second one has left, after it.
        whole: What both as one leave, from the beginning.
    """
    for name in first.keys() & both.keys() & whole.keys():
        if _differ(name, begin, first, both) and _differ(name, both, whole):
            yield name


def _differ(name: str, *looks: Kept) -> bool:
    return any(name not in look for look in looks) or bool(
        differing({name: {i: look[name] for i, look in enumerate(looks)}}, _OF_KEPT)
    )
