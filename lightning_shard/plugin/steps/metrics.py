"""Makes torchmetrics reduce over the ranks that saw data, and return the same values on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchmetrics import MeanMetric, Metric

from lightning_shard import tree
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps.means_over_steps import MeansOverSteps
from lightning_shard.plugin.steps.state.python_state import reachable


def share_metrics(
    module: nn.Module,
    callbacks: Iterable[object],
    groups: Groups,
    device: torch.device,
    stages: Stages | None,
    means: MeansOverSteps,
) -> None:
    """Reduce metrics over data-parallel ranks, and broadcast the last stage's values to other stages.

    Tensor-parallel ranks see the same data, so a reduction over the world would count it several times. Only the last
    stage of a pipeline updates a module's metrics, in lists and objects too. ``compute``, which already is a collective
    call over the data ranks, becomes one over the pipeline too. Those of callbacks are updated on every stage, from
    what steps return. Copies of metrics are shared likewise.

    Args:
        means: Weighs what means of steps are given in a pipeline.
    """
    sharing = _Sharing(groups, device, stages, means)
    for _, value in reachable(module):
        if isinstance(value, Metric):
            sharing.share(value, of_steps=True)
    for callback in callbacks:
        for leaf in tree.leaves(dict(vars(callback))):
            for part in leaf.modules() if isinstance(leaf, nn.Module) else ():
                if isinstance(part, Metric):
                    sharing.share(part, of_steps=False)


class _Sharing:
    """Wraps ``compute``. A metric may compute other metrics; only the outermost call is broadcast."""

    def __init__(self, groups: Groups, device: torch.device, stages: Stages | None, means: MeansOverSteps) -> None:
        self._groups = groups
        self._device = device
        self._stages = stages
        self._means = means
        self._inside = False

    def share(self, metric: Metric, *, of_steps: bool) -> None:
        if metric.process_group is None:
            metric.process_group = self._groups.data
            metric.__dict__["__deepcopy__"] = partial(self._copied, metric, of_steps)
            if self._stages is not None and of_steps:
                metric.__dict__["compute"] = self._of(metric.compute)
                if isinstance(metric, MeanMetric):
                    metric.__dict__["update"] = self._means.weighing(metric.update)

    def _copied(self, metric: Metric, of_steps: bool, memo: dict[int, Any]) -> Metric:
        """A copy, which torchmetrics makes to track a metric over epochs; a process group can't be copied."""
        held = {name: metric.__dict__.pop(name) for name in ("process_group", "__deepcopy__")}
        try:
            copied: Metric = copy.deepcopy(metric, memo)
        finally:
            metric.__dict__.update(held)
        copied.process_group = None
        self.share(copied, of_steps=of_steps)
        return copied

    def _of(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        stages = self._stages
        assert stages is not None

        def shared() -> Any:
            # in a step, where Metric.forward computes the batch's value, stages don't reach this call together
            if stages.in_step or self._inside:
                return compute()
            self._inside = True
            try:
                value = compute() if stages.is_last else None
            finally:
                self._inside = False
            return self._groups.broadcast_from_last_stage(value, self._device)

        return shared
