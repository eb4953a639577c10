"""Starts runs from other programs' files: plain Lightning's ``.ckpt``, a safetensors file, a transformers folder."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_shard.checkpoint import Checkpoint
from lightning_shard.checkpoint.optimizers.restored import stored_states

WEIGHTS_ALONE = "lightning_shard_weights_alone"
"""A key in what is loaded from such a file: a missing optimizer state is expected then."""


def weights_alone(stored: Checkpoint) -> dict[str, Any]:
    """Present weights that no Trainer saved as a checkpoint for Lightning: training starts with them, at step 0.

    Optimizer states that plain torch saved beside the weights are included.
    """
    states = stored_states(stored)
    return {
        WEIGHTS_ALONE: True,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": dict(stored),
        "epoch": 0,
        "global_step": 0,
        "optimizer_states": states or [],
        "optimizer_tensors": dict(stored.optimizer) if states else {},
        "lr_schedulers": [],
    }
