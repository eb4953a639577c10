"""Shows tokens per second in the progress bar, and which part of the devices' peak that is."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor


def tokens_of(batch: Any) -> int:
    """The tokens that a batch trains: of ``input_ids``, or of its first tensor, if that is rows of integers; or 0."""
    ids = batch
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids", next(iter(batch.values()), None))
    elif isinstance(batch, (tuple, list)):
        ids = next(iter(batch), None)
    is_rows = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
    return ids.numel() if is_rows else 0


class TokensPerSecond(L.Callback):
    """Logs ``tokens/s`` of all ranks together, over the last ``window`` batches, and on known GPUs ``mfu``.

    The model FLOPs utilisation takes 6 operations per parameter and token, so it leaves out attention, and counts all
    experts of a mixture.
    """

    def __init__(self, window: int = 20) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=window + 1)
        self._parameters = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._parameters = sum(parameter.numel() for parameter in pl_module.parameters())  # before they are sharded

    def on_train_epoch_start(self, *_: Any) -> None:
        self._ends.clear()  # what lies between epochs isn't training

    def on_validation_start(self, *_: Any) -> None:
        self._ends.clear()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ends.append((time.perf_counter(), tokens_of(batch)))
        (begin, _), *counted = self._ends
        if not counted or not counted[-1][1]:
            return
        of_ranks = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        tokens = sum(count for _, count in counted) * of_ranks.get("num_replicas", 1)
        rate = tokens / (counted[-1][0] - begin)
        pl_module.log("tokens/s", rate, prog_bar=True)
        dtype = torch.bfloat16 if "bf16" in str(trainer.precision) else torch.float32
        peak = get_available_flops(trainer.strategy.root_device, dtype) if torch.cuda.is_available() else None
        if peak:
            pl_module.log("mfu", 6 * self._parameters * rate / (peak * trainer.world_size), prog_bar=True)
