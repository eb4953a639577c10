"""Makes torchmetrics reduce over the ranks that saw data, and return the same values on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.plugin.groups import Groups
from lightning_shard.state.walk import reachable

_BROADCAST = "_is_broadcast_over_stages"
"""In the attributes of a metric whose ``compute`` is shared over stages: its path if a block holds it, else no text."""


class SharedMetrics:
    """Has metrics reduce over data-parallel ranks, and broadcasts the last stage's values to other stages.

    Tensor-parallel ranks see the same data, so a reduction over the world would count it several times. Only the last
    stage of a pipeline updates a module's metrics, in lists and objects too: ``compute``, which already is a collective
    call over the data ranks, becomes one over the pipeline too. Those of callbacks are updated on every stage, from
    what steps return. Copies of metrics are shared likewise. A metric in a block counts its own stage's calls only, and
    isn't computed between steps.

    A metric may compute other metrics; only the outermost call is broadcast.

    In means over steps batches count alike, into however many microbatches each is split: in a ``MeanMetric``, each
    number of a smaller batch counts for several.
    """

    def __init__(self, groups: Groups, device: torch.device, stages: Stages | None) -> None:
        self._groups = groups
        self._device = device
        self._stages = stages
        self._inside = False
        self._weight = 1.0  # of a microbatch, in means over steps

    @contextmanager
    def weighing(self, parts: int, whole: int) -> Iterator[None]:
        """Context of the steps of a batch of so many microbatches, of which a whole batch has ``whole``."""
        self._weight = whole / parts
        try:
            yield
        finally:
            self._weight = 1.0

    def find(self, module: Any) -> None:
        """Share those of a LightningModule and of callbacks that weren't before, where a run or an epoch begins.

        A collective call over the pipeline: what a step has made on the last stage only can't be computed by all.
        """
        found = {path: value for path, value in reachable(module) if isinstance(value, Metric)}
        everywhere = set.intersection(*map(set, self._groups.gather_over_stages([*found])))
        blocks = tuple(f"{name}." for name in (self._stages.held[0].places if self._stages is not None else ()))
        # one may be given to several blocks
        paths = [*found.items(), *(module.named_modules(remove_duplicate=False) if found else ())]
        in_blocks = {id(each): path for path, each in reversed(paths) if path.startswith(blocks)}
        for path, metric in found.items():
            self.share(metric, of_steps=path in everywhere, in_block=in_blocks.get(id(metric), ""))
        for callback in module.trainer.callbacks:
            for leaf in tree.leaves(dict(vars(callback))):
                for part in leaf.modules() if isinstance(leaf, nn.Module) else ():
                    if isinstance(part, Metric):
                        self.share(part, of_steps=False)

    def share(self, metric: Metric, *, of_steps: bool, in_block: str = "") -> None:
        """
        Args:
            of_steps: Whether the last stage's steps update it, so that only that stage can compute it.
            in_block: Its path if a block holds it.
        """
        if metric.process_group is None:
            metric.process_group = self._groups.data
            metric.__dict__["__deepcopy__"] = partial(self._copied, metric)
        if of_steps and self._stages is not None and _BROADCAST not in metric.__dict__:
            metric.__dict__[_BROADCAST] = in_block
            metric.__dict__["compute"] = partial(self._compute, metric.compute, in_block)
            if isinstance(metric, MeanMetric):
                metric.__dict__["update"] = partial(self._update, metric.update)

    def _update(self, update: Callable[..., None], value: Any, weight: Any = None) -> None:
        is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
        update(value, self._weight if weight is None and is_number and self._weight != 1.0 else weight)

    def _copied(self, metric: Metric, memo: dict[int, Any]) -> Metric:
        """A copy, which torchmetrics makes to track a metric over epochs; a process group can't be copied."""
        own = metric.__dict__
        held = {name: own.pop(name) for name in ("process_group", "__deepcopy__", _BROADCAST) if name in own}
        try:
            copied: Metric = copy.deepcopy(metric, memo)
        finally:
            own.update(held)
        copied.process_group = None
        self.share(copied, of_steps=_BROADCAST in held, in_block=held.get(_BROADCAST, ""))
        return copied

    def _compute(self, compute: Callable[[], Any], in_block: str) -> Any:
        """A metric's value on all stages, in a call that they make together; refused if a block holds the metric."""
        stages = self._stages
        assert stages is not None
        # in a step, where Metric.forward computes the batch's value, stages don't reach this call together
        if stages.in_step or self._inside:
            return compute()
        if in_block:
            raise StepError(
                f"{in_block} is a metric in a block, and with pipeline stages it has counted the calls of its own stage"
                " only: have the block return what it is updated with, and keep the metric on the LightningModule; or"
                " use pipeline_parallel_size=1.",
                breaks=6,
            )
        self._inside = True
        try:
            value = compute() if stages.is_last else None
            return self._groups.broadcast_from_last_stage(value, self._device)
        finally:
            self._inside = False
