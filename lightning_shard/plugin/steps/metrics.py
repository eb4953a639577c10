"""Makes torchmetrics reduce over the ranks that saw data, and return the same values on all ranks."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from lightning_shard import tree
from lightning_shard.arguments import few
from lightning_shard.errors import StepError
from lightning_shard.lightning_private import told_of_new_metrics
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps.loss_weight import MeansOverSteps
from lightning_shard.state.walk import reachable

_BROADCAST = "_is_broadcast_over_stages"
"""In the attributes of a metric whose ``compute`` gives the value of the stage that updates it: what holds it."""
Holders = frozenset[str | None]
"""The blocks that hold a metric; ``None`` stands for what is around them."""
_AROUND_BLOCKS: Holders = frozenset({None})


class SharedMetrics:
    """Has metrics reduce over data-parallel ranks, and broadcasts the last stage's values to other stages.

    Tensor-parallel ranks see the same data, so a reduction over the world would count it several times. Only the last
    stage of a pipeline updates a module's metrics, in lists and objects too, and of those within a block the stage that
    holds it: their values are shared from there. ``compute``, which already is a collective call over the data ranks,
    becomes one over the pipeline too. Those of callbacks are updated on every stage, from what steps return. Copies of
    metrics are shared likewise.

    A metric may compute other metrics; only the outermost call is broadcast.

    Attributes:
        means: Weighs what means of steps are given in a pipeline.
    """

    def __init__(self, groups: Groups, device: torch.device, stages: Stages | None) -> None:
        self._groups = groups
        self._device = device
        self._stages = stages
        self._inside = False
        self.means = MeansOverSteps()

    def find(self, module: nn.Module, callbacks: Iterable[object]) -> None:
        """Share those of a module and of callbacks that weren't before: hooks may have made some.

        A collective call over the pipeline: what a step has made on the last stage only can't be computed by all.
        """
        found = {path: value for path, value in reachable(module) if isinstance(value, Metric)}
        everywhere = set.intersection(*map(set, self._groups.gather_over_stages([*found])))
        holders = self._holders(module, found)
        for path, metric in found.items():
            self.share(metric, of_steps=path in everywhere, holders=frozenset(holders[id(metric)]))
        for callback in callbacks:
            for leaf in tree.leaves(dict(vars(callback))):
                for part in leaf.modules() if isinstance(leaf, nn.Module) else ():
                    if isinstance(part, Metric):
                        self.share(part, of_steps=False)

    def reducing_new_ones(self) -> AbstractContextManager[None]:
        """Inside, metrics that are made reduce over data ranks; what hooks made is found where an epoch begins."""
        return told_of_new_metrics(partial(self.share, of_steps=False))

    def _holders(self, module: nn.Module, found: Mapping[str, Metric]) -> Mapping[int, Collection[str | None]]:
        """What holds each metric, by its id; one may be given to several blocks."""
        holders: defaultdict[int, set[str | None]] = defaultdict(set)
        every_path = module.named_modules(remove_duplicate=False) if found else ()
        for path, value in chain(found.items(), every_path):
            if isinstance(value, Metric):
                holders[id(value)].add(self._block_around(path))
        return holders

    def _block_around(self, path: str) -> str | None:
        names = self._stages.held[0].places if self._stages is not None else ()
        return next((name for name in names if path.startswith(f"{name}.")), None)

    def share(self, metric: Metric, *, of_steps: bool, holders: Holders = _AROUND_BLOCKS) -> None:
        """
        Args:
            of_steps: Whether the last stage's steps update it, so that only that stage can compute it.
            holders: What holds it; if these are blocks, their stage updates it then.
        """
        if metric.process_group is None:
            metric.process_group = self._groups.data
            metric.__dict__["__deepcopy__"] = partial(self._copied, metric)
        if of_steps and self._stages is not None and _BROADCAST not in metric.__dict__:
            metric.__dict__[_BROADCAST] = holders
            share = (
                self._from_last_stage
                if holders == _AROUND_BLOCKS
                else partial(self._from_holder, type(metric), holders)
            )
            metric.__dict__["compute"] = self._of(metric.compute, share)
            if isinstance(metric, MeanMetric):
                metric.__dict__["update"] = self.means.weighing(metric.update)

    def _copied(self, metric: Metric, memo: dict[int, Any]) -> Metric:
        """A copy, which torchmetrics makes to track a metric over epochs; a process group can't be copied."""
        own = metric.__dict__
        held = {name: own.pop(name) for name in ("process_group", "__deepcopy__", _BROADCAST) if name in own}
        try:
            copied: Metric = copy.deepcopy(metric, memo)
        finally:
            own.update(held)
        copied.process_group = None
        self.share(copied, of_steps=_BROADCAST in held, holders=held.get(_BROADCAST, _AROUND_BLOCKS))
        return copied

    def _of(self, compute: Callable[[], Any], share: Callable[[Callable[[], Any]], Any]) -> Callable[[], Any]:
        stages = self._stages
        assert stages is not None

        def shared() -> Any:
            # in a step, where Metric.forward computes the batch's value, stages don't reach this call together
            if stages.in_step or self._inside:
                return compute()
            self._inside = True
            try:
                return share(compute)
            finally:
                self._inside = False

        return shared

    def _from_last_stage(self, compute: Callable[[], Any]) -> Any:
        assert self._stages is not None
        value = compute() if self._stages.is_last else None
        return self._groups.broadcast_from_last_stage(value, self._device)

    def _from_holder(self, kind: type[Metric], holders: Holders, compute: Callable[[], Any]) -> Any:
        """The value of the rank that holds a block, or blocks.

        Raises:
            StepError: Several do: each has counted its own calls.
        """
        assert self._stages is not None
        holds = any(self._calls(stage, holder) for stage in self._stages.held for holder in holders)
        own = (tree.map_leaves(self._on_host, compute()),) if holds else None
        found = [each for each in self._groups.gather_over_stages(own) if each is not None]
        if len(found) > 1:
            blocks = few([*sorted(filter(None, holders)), *(["what is around them"] if None in holders else [])])
            raise StepError(
                f"Several pipeline stages update one {kind.__name__}, which is in {blocks}, each for its own calls:"
                " give each block one of its own that nothing else holds, have the network return what it is updated"
                " with, or use pipeline_parallel_size=1.",
                breaks=6,
            )
        return tree.map_leaves(lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, found[0][0])

    @staticmethod
    def _calls(stage: Stage, holder: str | None) -> bool:
        """Whether a stage calls a block, or the code after all blocks."""
        return stage.is_last if holder is None else any(place in stage.owned for place in stage.places[holder])

    @staticmethod
    def _on_host(leaf: Any) -> Any:
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
