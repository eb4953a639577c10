"""Starting from other programs' files: plain Lightning's ``.ckpt``, a safetensors file, a transformers folder."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_shard.checkpoint import Checkpoint
from lightning_shard.checkpoint.optimizers.restored import stored_states

WEIGHTS_ALONE = "lightning_shard_weights_alone"
"""A key of what is loaded: where it has no optimizer's state, none is missing."""


def weights_alone(stored: Checkpoint) -> dict[str, Any]:
    """A checkpoint for Lightning of one that no Trainer saved: training begins with its weights, at its first step.

    Where plain torch saved optimizers beside them, their states come with them.
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
