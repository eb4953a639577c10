"""Runs the first microbatches of a batch once more, and as one, to find what the split into microbatches changes.

After the first batch of each kind of step (``steps/first_batches.py``), from the state that it has left, four
microbatches run through the pipeline, forward only: the first one, and after it the second; the second one from the
state that the first began with; and both joined to one. All draw the same random numbers for each sample
(``draws.py``), and BatchNorm takes its running statistics.

- The second one's result must not depend on what the first has left: else the step is refused.
- The loss of the joined one is the mean of the two losses, and so are logs, or their sum where they count.
- Numbers and tensors that are kept are the same after the two as after the joined one (:func:`left_otherwise`).
- How long what the step returns is for each and for both tells how to merge it (``runtime/outputs.py``).

All is put back. Not judged: a step that can't run on both at once; losses and logs where random numbers are drawn in
another way; logs that differ when a microbatch runs twice, as a time does.

What a module keeps in numbers and tensors: counters, statistics, losses, hidden states; and whether it counts twice.

Lists aren't looked at, to which steps append, nor metrics and BatchNorm: how their states add up is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard import tree
from lightning_shard.arguments import few
from lightning_shard.errors import WHOLE_BATCHES, StepError
from lightning_shard.parallel.batch_norm import batch_norms
from lightning_shard.parallel.rank_compare import Fingerprint, differing, fingerprints
from lightning_shard.pipeline.dataflow.draws import DrawsByRow
from lightning_shard.pipeline.dataflow.search import Memory
from lightning_shard.pipeline.runtime.step import PipelinedStep, RunOn
from lightning_shard.pipeline.stages.compiled_functions import as_written
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.steps import randomness
from lightning_shard.state.walk import children, reachable

_OF_KEPT = 1e-6
"""Of numbers and fingerprints, relative to the norm."""
_LARGEST = 2**24
"""Elements of a tensor that is looked at: statistics are small, larger tensors are data."""


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


Kept = Mapping[str, Fingerprint]


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


LOSS, LOG, LENGTH = "loss", "log", "length"
_TOLERANCE, _IN_HALF, _ON_DEVICES = 2e-5, 3e-2, 1e-3
"""Of losses and logs, relative to the larger value; on other devices than the CPU at least the last one."""
_ROUNDING = 1e-6
"""Absolute, of losses and logs that are zero but for rounding."""
_OF_REPEATED = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Of a microbatch that runs twice, relative to a tensor's largest value: caches may be rounded once more."""


class Number(NamedTuple):
    """What a step gives for a microbatch: its loss, a log, or the length of something that it returns.

    Attributes:
        value: Of no dimension.
        weight: Of this microbatch, in a mean of several.
        by: What makes the batch's of microbatches' numbers: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
    """

    value: Tensor
    weight: float = 1.0
    by: str = "mean"


Name = tuple[str, Any]
"""A kind of number and its name; of a length its path in the result."""
Numbers = Mapping[Name, Number]


@dataclass
class _Run:
    """What a microbatch gave on this rank; numbers and tensors on the last stage only.

    Attributes:
        tensors: What the last stage received, but for what blocks keep, and returned.
        is_blind: Whether random numbers were drawn that depend on the number of samples.
        drawn: Where the generators of numpy and Python stood at the end.
    """

    numbers: Numbers = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    is_blind: bool = False
    drawn: Any = None


class Unlike(NamedTuple):
    """A loss or log that is another one for two microbatches as one.

    Attributes:
        joined: Its value of both as one.
        combined: The mean of each, or what else is made of them.
        is_sum: Whether a mean was expected, and it is the sum.
        of: The first microbatch's number.
    """

    joined: float
    combined: float
    is_sum: bool
    of: Number


@dataclass
class Findings:
    """What a rehearsal has found.

    Attributes:
        is_carried: Whether a microbatch's result depends on what the one before has left.
        changed: The paths of objects that the step changes.
        counted: Names of numbers and tensors that two microbatches leave otherwise than both as one.
        unlike: Losses and logs that aren't combined to that of both as one.
        fixed: Paths of what the step returned that is as long for two microbatches as for each.
        growing: Paths of what is as long for two as for both together.
        failure: Why a run failed, after which no more were made.
    """

    is_carried: bool = False
    changed: Sequence[str] = ()
    counted: Sequence[str] = ()
    unlike: dict[Name, Unlike] = field(default_factory=dict)
    fixed: set[tree.Path] = field(default_factory=set)
    growing: set[tree.Path] = field(default_factory=set)
    failure: BaseException | None = None

    def refuse_carried(self, microbatches: int) -> None:
        """
        Raises:
            StepError: A microbatch's result depends on what the one before has left.
        """
        if not self.is_carried:
            return
        changed = [path.replace("_buffers.", "") or "attributes of the LightningModule" for path in self.changed]
        raise StepError(
            "The result of a step depends on what the step before has left"
            f" ({few(changed) or 'something that is kept outside of the LightningModule'} changes). State that a step"
            " changes counts once per microbatch, of which a batch has"
            f" {microbatches}, and an earlier stage leaves the step after its last block: one process would go on from"
            " what the batch before has left. Set it anew where the step begins, change it in on_train_batch_start or"
            f" on_train_batch_end, or use {WHOLE_BATCHES} or pipeline_parallel_size=1.",
            breaks=6,
        )


class _FailedError(Exception):
    """A run failed on a stage; raised on all of them."""


def rehearse(
    step: PipelinedStep,
    kind: str,
    run_on: RunOn,
    pair: tuple[Any, Any],
    joined: Any,
    memory: Memory,
    numbers_of: Callable[[Any, Any], Numbers] = lambda *_: {},
    state: Callable[[], Kept] = dict,
    carry: Callable[[], None] = lambda: None,
) -> Findings:
    """Run two microbatches again, and both as one; a collective call over the pipeline.

    Args:
        kind: The kind of step.
        joined: ``None`` if they can't be joined: then only :attr:`Findings.is_carried` is found.
        run_on: Calls the step for a stage on a microbatch, with the random numbers of that of a number.
        memory: A snapshot of the present state, which is put back; released at the end.
        numbers_of: The numbers of a step that has just run, from its result and its microbatch.
        state: This rank's kept numbers, and sums of tensors, by name.
        carry: Has all stages go on from the state that the last one has left; a collective call over the pipeline.

    Returns:
        What was found: on all ranks the same, but for losses, logs and lengths, which the last stage's has.
    """
    found, samples, is_blind = Findings(), tree.batch_size(pair[0]), False

    def run(part: Any) -> _Run:
        ran = _Run()

        def on(stage: Stage) -> Any:
            with as_written(), DrawsByRow(samples) as draws:  # compiled code draws by itself
                result = run_on(stage, 0, part)
            ran.is_blind |= draws.is_blind
            if stage.is_last and stage.passage.missing is None:
                ran.numbers = numbers_of(result, part)
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
        both, found.changed = state(), memory.changed()
        memory.put_back()
        again = run(pair[1])
        found.is_carried = not _are_repeated(other.tensors, again.tensors)
        memory.put_back()
        if joined is not None:
            whole = run(joined)
            found.counted = [*left_otherwise(begin, first, both, state())]
            found.fixed, found.growing = as_long(one.numbers, other.numbers, whole.numbers)
            found.unlike = dict(_unlike(one.numbers, other.numbers, again.numbers, whole.numbers))
            is_blind = one.is_blind or whole.is_blind or one.drawn != whole.drawn
    except _FailedError as error:
        found.failure = error.__cause__
    finally:
        memory.put_back()
        memory.forget()
    are_carried, changed, counted, are_blind = zip(
        *step.gather((found.is_carried, found.changed, found.counted, is_blind))
    )
    found.is_carried, found.changed, found.counted = any(are_carried), _all_of(changed), _all_of(counted)
    if any(are_blind):
        found.unlike.clear()
    return found


def _all_of(names: Sequence[Sequence[str]]) -> list[str]:
    return [*dict.fromkeys(name for each in names for name in each)]


def _unlike(one: Numbers, other: Numbers, again: Numbers, whole: Numbers) -> Iterator[tuple[Name, Unlike]]:
    for key in sorted(one.keys() & other.keys() & again.keys() & whole.keys(), key=str):
        mine, joined = one[key], whole[key].value
        if key[0] == LENGTH or not _are_close(other[key].value, again[key].value, share=0.01):
            continue
        values = torch.stack([mine.value.double(), other[key].value.double()])
        weights = values.new_tensor([mine.weight, other[key].weight])
        if mine.by in ("sum", "min", "max"):
            combined = getattr(values, mine.by)()
        else:
            combined = (values * weights).sum() / weights.sum()
        if not _are_close(joined, combined):
            is_sum = mine.by == "mean" and _are_close(joined, values.sum())
            yield key, Unlike(float(joined), float(combined), is_sum, mine)


def _are_close(one: Tensor, other: Tensor, share: float = 1.0) -> bool:
    """Whether two numbers are equal up to a share of the tolerances; also if one is NaN."""
    tolerance = _IN_HALF if one.dtype in (torch.bfloat16, torch.float16) else _TOLERANCE
    tolerance = tolerance if one.device.type == "cpu" else max(tolerance, _ON_DEVICES)
    a, b = one.double(), other.to(one.device).double()
    return not bool((a - b).abs() > share * (tolerance * torch.maximum(a.abs(), b.abs()) + _ROUNDING))


def as_long(one: Numbers, other: Numbers, whole: Numbers) -> tuple[set[tree.Path], set[tree.Path]]:
    """The paths of what is as long for both as for each, and as for both together.

    Of what varies, such as detections, the first may have as many as both; where there are none, nothing is known.
    """
    fixed, growing = set(), set()
    for kind, path in one.keys() & other.keys() & whole.keys():
        first, second, both = (float(numbers[kind, path].value) for numbers in (one, other, whole))
        if kind == LENGTH and both == first + second > 0:
            growing.add(path)
        elif kind == LENGTH and both == first == second > 0:
            fixed.add(path)
    return fixed, growing


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
