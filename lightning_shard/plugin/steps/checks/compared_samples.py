"""Warns of losses and networks on pipeline stages that compute with the samples of a batch together.

``pipeline/dataflow/mixed_samples.py`` finds them. Not looked for where another warning says the same: with BatchNorm,
or where the loss is a mean over numbers that vary.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_shard import tree
from lightning_shard.errors import WHOLE_BATCHES
from lightning_shard.pipeline.dataflow.mixed_samples import LENGTH, LOG, LOSS, Findings, Number, NumbersOf
from lightning_shard.pipeline.runtime.outputs import Lengths, lengths
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.steps.logs import HeldLogs
from lightning_shard.plugin.steps.loss_weight import LossWeights


class ComparedSamples:
    """What the check looks at in the first batch of each loader's steps, and what it says of what is found.

    Args:
        loss_of: The loss of what a training step returned.
        warns: Whether this rank does.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        logs: HeldLogs,
        weights: LossWeights,
        loss_of: Callable[[Any], Tensor],
        *,
        warns: bool,
    ) -> None:
        self._module = module
        self._logs = logs
        self._weights = weights
        self._loss_of = loss_of
        self._warns = warns
        self._begun: set[tuple[Any, ...]] = set()
        self._lengths: defaultdict[tuple[Any, ...], Lengths] = defaultdict(Lengths)

    def looks(
        self, method: str, args: Sequence[Any], microbatches: int, *, uses_results: bool = True
    ) -> NumbersOf | None:
        """What takes the numbers of a step with these arguments; ``None`` if nothing is to be looked at.

        Args:
            uses_results: Whether what the step returns is used.
        """
        kind = (method, *args[1:])
        if microbatches == 1 or kind in self._begun:
            return None
        self._begun.add(kind)
        if normalizes_over_samples(self._module):
            return None
        return partial(self._numbers_of, uses_results)

    def _numbers_of(self, uses_results: bool, result: Any, microbatch: Any) -> dict[tuple[str, Any], Number]:
        """The loss in training, what has just been logged, and lengths of what the step returned."""
        logged: dict[tuple[str, Any], Number] = {(LOG, name): number for name, number in self._logs.latest().items()}
        if uses_results:
            found = lengths(result, tree.batch_size(microbatch))
            logged |= {(LENGTH, path): Number(torch.tensor(float(length))) for path, length in found.items()}
        if not self._module.trainer.training:
            return logged
        loss = self._loss_of(result).detach().clone()
        return {(LOSS, ""): Number(loss, self._weights.number(microbatch))} | logged

    def lengths(self, method: str, args: Sequence[Any]) -> Lengths:
        """What is known of the lengths of what a step with these arguments returns."""
        return self._lengths[(method, *args[1:])]

    def tell(
        self, method: str, args: Sequence[Any], found: Findings, microbatches: int, *, is_known: bool = False
    ) -> None:
        """Note what was found in a step with these arguments, and warn of what a batch compares.

        Args:
            is_known: Whether it was told already why the loss isn't a mean; logs are then none for the same reason.
        """
        self.lengths(method, args).add(found.fixed, found.growing)
        self._logs.trust(found.means)
        if is_known or not self._warns:
            return
        warn(found.stages, microbatches)
        if not found.stages:
            self._logs.warn_of_compared(found.logs)


def normalizes_over_samples(root: nn.Module) -> bool:
    """Whether a module has a BatchNorm that takes the batch's statistics."""
    return any(isinstance(module, _BatchNorm) and module.training for module in root.modules())


def warn(found: Sequence[Stage], microbatches: int) -> None:
    """Warn of the stages that were found."""
    for stage in found:
        what = (
            "The training loss of a batch isn't the mean of its parts' losses, as of"
            if stage.is_last
            else f"What pipeline stage {stage.index} ({stage.blocks[stage.owned[0]]} …) computes for a sample depends"
            " on which other samples are in the batch, as in"
        )
        warnings.warn(
            f"{what} contrastive losses, or where the first dimension of its tensors doesn't count the samples (time"
            f" first). With several pipeline stages it is computed for each of {microbatches} microbatches by itself,"
            " as where gradients are accumulated, and differs from one process's, which has the whole batch. If that"
            f" matters, use {WHOLE_BATCHES} or pipeline_parallel_size=1.",
            stacklevel=2,
        )
