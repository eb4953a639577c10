"""torchmetrics over the axes: values from the ranks that saw data, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_shard.pipeline.stage import Stage
from lightning_shard.plugin.groups import Groups


def span_all_axes(module: nn.Module, groups: Groups, device: torch.device, stage: Stage | None) -> None:
    """Have the metrics of a module reduce over data-parallel ranks, and the other stages get the last one's values.

    Tensor-parallel ranks see the same data, so a reduction over the world would count it several times. Only the last
    stage of a pipeline updates metrics; ``compute`` becomes a collective call over the pipeline, as it is one over the
    data ranks.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            metric.process_group = groups.data
            if stage is not None:
                metric.__dict__["compute"] = _from_last_stage(metric.compute, groups, device, stage)


def _from_last_stage(
    compute: Callable[[], Any], groups: Groups, device: torch.device, stage: Stage
) -> Callable[[], Any]:
    def spanning() -> Any:
        if stage.passage.active:  # in a step, where Metric.forward computes the batch's value: the last stage alone
            return compute()
        return groups.broadcast_from_last_stage(compute() if stage.is_last else None, device)

    return spanning
