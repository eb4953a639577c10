"""Detects results that depend on state carried over from the previous microbatch, and refuses such steps.

In one process, a step runs once per batch, and continues from the state that the previous batch left: counters,
averages, states of recurrent layers. In a pipeline, it runs once per microbatch, and on an earlier stage only up to the
stage's last block. So carried state differs from one process's, and so does a result that depends on it.

The check runs a microbatch twice: once from the state that the previous microbatch left, and once from the state that
the previous microbatch began with. The results must be equal. It runs once per kind of step, and doesn't depend on how
the state is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import WHOLE_BATCHES, StepError
from lightning_shard.pipeline.dataflow.messages import Counted
from lightning_shard.pipeline.dataflow.search import Memory, OfAny, Ran, RunStep, rerun

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative to a tensor's largest value, on the CPU: what the first run cached may have been rounded once more."""
_TOLERANCE_IN_HALF = 1e-2
_TOLERANCE_ON_DEVICES = 1e-3
"""A lower bound on devices other than the CPU, where sums have no fixed order."""
_NAMED = 4


@dataclass(frozen=True)
class _Begun:
    """A microbatch that ran, and the state with which this rank's first stage began it.

    Attributes:
        i: Its number.
        memory: A snapshot of that state.
        counted: The operations that each stage counted, by stage.
    """

    i: int
    memory: Memory
    counted: dict[int, Counted] = field(default_factory=dict)


class LeftState:
    """Runs the check, once for each kind of step.

    Args:
        remember: Takes a snapshot of what a step may change beside gradients.
        of_any: As for :class:`PipelinedStep`.
    """

    def __init__(self, remember: Callable[[], Memory], of_any: OfAny = bool) -> None:
        self._remember = remember
        self._of_any = of_any
        self._known: set[str] = set()
        self._begun: _Begun | None = None
        self._checked = 0  # stages of this rank, in this batch

    def begins(self, kind: str, keys: Sequence[Hashable], i: int) -> None:
        """Microbatch ``i`` is about to run on a stage; what crosses is already known.

        Args:
            kind: The kind of step.
            keys: The signatures of all microbatches.
        """
        if self._begun is None and self._is_due(kind, keys, i):
            self._begun = _Begun(i, self._remember())

    def searched(
        self, kind: str, keys: Sequence[Hashable], i: int, memory: Memory, ran: Sequence[Ran], run: RunStep
    ) -> None:
        """Microbatch ``i`` has run on all of this rank's stages, in a search for what crosses.

        Args:
            memory: A snapshot of the state that it began with; released here, or later.
        """
        follows = self._begun is not None and i == self._begun.i + 1
        if not follows or self._of_any(not all(map(self._is_comparable, ran))):
            self.ends()
            if self._is_due(kind, keys, i):
                self._begun = _Begun(i, memory, {each.stage.index: each.passage.counted for each in ran})
                return
        memory.forget()
        for each in ran:
            self.ran(kind, keys, i, each, len(ran), run)

    def ran(self, kind: str, keys: Sequence[Hashable], i: int, ran: Ran, stages: int, run: RunStep) -> None:
        """Microbatch ``i`` has run on one of this rank's ``stages``; compare it with a second run, if it is due.

        Raises:
            StepError: The results differ if it begins with the state that the previous microbatch began with.
        """
        if self._begun is None:
            return
        self._begun.counted.setdefault(ran.stage.index, ran.passage.counted)
        if i != self._begun.i + 1 or self._of_any(not self._is_comparable(ran)):
            return
        before = self._begun.memory
        changed, now = before.changed(), self._remember()
        before.put_back()
        is_same = _same(ran, rerun(ran, run, i))
        now.put_back()
        now.forget()
        if not is_same:
            raise _carried_state_error(changed, len(keys))
        self._checked += 1
        if self._checked == stages:
            self._known.add(kind)
            self.ends()

    def ends(self) -> None:
        """The batch ends: release the snapshot."""
        if self._begun is not None:
            self._begun.memory.forget()
        self._begun, self._checked = None, 0

    def _is_comparable(self, ran: Ran) -> bool:
        """Whether numbered values have the same names as in the previous microbatch.

        They may not: a first microbatch may run more operations, to fill caches.
        """
        assert self._begun is not None
        return not ran.crossing.is_traced() or self._begun.counted.get(ran.stage.index) == ran.passage.counted

    def _is_due(self, kind: str, keys: Sequence[Hashable], i: int) -> bool:
        return kind not in self._known and keys[i : i + 1] == keys[i + 1 : i + 2]


def _carried_state_error(changed: Sequence[str], microbatches: int) -> StepError:
    named = [path.replace("_buffers.", "") or "attributes of the LightningModule" for path in changed]
    kept = ", ".join(named[:_NAMED]) + (f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "")
    return StepError(
        "The result of a step depends on what the step before has left"
        f" ({kept or 'something that is kept outside of the LightningModule'} changes). A batch goes through the"
        f" pipeline in {microbatches} microbatches, each a call of the step, and an earlier stage leaves the step after"
        " its last block: one process would go on from what the batch before has left. Set it anew where the step"
        " begins, change it in on_train_batch_start or on_train_batch_end, or use"
        f" {WHOLE_BATCHES} or pipeline_parallel_size=1."
    )


def _same(one: Ran, other: Ran) -> bool:
    first, second = (tree.tensors((each.passage.sent, each.result)) for each in (one, other))
    return len(first) == len(second) and all(map(_close, first, second))


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding. Synchronises with the device."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other) or not one.numel():
        return True
    if not one.is_floating_point():
        return False
    tolerance = _TOLERANCES.get(one.dtype, _TOLERANCE_IN_HALF)
    if one.device.type != "cpu":
        tolerance = max(tolerance, _TOLERANCE_ON_DEVICES)
    largest = float(one.detach().nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(one, other, rtol=0, atol=tolerance * largest, equal_nan=True)
