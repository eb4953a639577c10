"""Warns of losses and networks on pipeline stages that compute with the samples of a batch together.

``pipeline/dataflow/mixed_samples.py`` finds them. Not looked for where another warning says the same: with BatchNorm,
or where the loss is a mean over numbers that vary.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_shard.errors import WHOLE_BATCHES
from lightning_shard.pipeline.stages.stage import Stage


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
