"""Runs Lightning's steps on ranks that hold the whole network: with one pipeline stage."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_shard.parallel.fsdp.bypassed_units import BypassedUnits
from lightning_shard.parallel.fsdp.part_calls import Lockstep
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.fsdp.units import is_unit
from lightning_shard.parallel.fsdp.unsharded import unsharded_of
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.checks.unequal_means import UnequalMeans
from lightning_shard.plugin.steps.gradients import Gradients
from lightning_shard.plugin.steps.loop import has_hooks
from lightning_shard.plugin.steps.loss_weight import LossWeights, Weight, weighted_for_backward
from lightning_shard.plugin.steps.redirect import call_through, refuse_sharded

_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward")
"""Hooks between a step and its backward. Parameters stay gathered over them, unless such a hook is used."""


class SingleStageSteps:
    """Runs ``training_step``, its backward and the evaluation steps of one LightningModule.

    Args:
        bypassed: Gathers units whose backward begins elsewhere than at their output; ``None`` with one data rank.
        lockstep: Keeps data ranks' all-gathers in step during evaluation steps; ``None`` with one data rank.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        device: torch.device,
        data_rank: int,
        gradients: Gradients,
        weights: LossWeights,
        means: UnequalMeans,
        bypassed: BypassedUnits | None,
        lockstep: Lockstep | None,
    ) -> None:
        self._module = module
        self._device = device
        self._data_rank = data_rank
        self._gradients = gradients
        self._weights = weights
        self._means = means
        self._weight = Weight()
        self._bypassed = bypassed
        self._lockstep = lockstep
        self._sees_parameters = False
        self._begins = True

    def begin(self, method: str) -> None:
        """Prepare for the first step of this kind, once all callbacks are known."""
        self._begins = True
        if method == "training_step":
            self._sees_parameters = has_hooks(self._module.trainer, self._module, _BEFORE_BACKWARD)

    def train(self, precision: Precision, draw: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a training step, with random numbers of the seed ``draw``; the backward is separate."""
        module, automatic = self._module, self._module.automatic_optimization
        reshard(module)  # a hook may have called it before the optimizer's step, which changes the shards
        [self._weight] = self._weights.of(args[:1] or [None])
        with precision.train_step_context(), self._gradients.by_inputs.watched(), self._watched():
            result = self._run("training_step", draw, args, kwargs)
        if automatic:
            self._means.note(result.get("loss") if isinstance(result, dict) else result)
        self._means.warn()
        if result is None and automatic:  # what the end of its backward would have done
            if not self._gradients.is_accumulating:
                self._gradients.synchronize()
            reshard(module)
        elif self._sees_parameters and automatic:
            reshard(module)
        return result

    def begin_backward(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate. The tensor that the step returned isn't changed."""
        module, whole = self._module, unsharded_of(self._module)
        if whole is not None or is_unit(module):
            refuse_sharded(loss)
        if module.automatic_optimization:
            if whole is not None and self._sees_parameters:
                whole.gather(module)  # blocks may be recomputed; elsewhere FSDP2 gathers for the backward
            self._gradients.begin_backward()
        if self._bypassed is not None:
            self._bypassed.gather(loss)
        return weighted_for_backward(loss, self._weight.of_gradient)

    def _watched(self) -> AbstractContextManager[None]:
        if self._bypassed is None:
            return nullcontext()
        self._bypassed.begin_step(self._module.current_epoch)
        return self._bypassed.watched(ends=not self._module.automatic_optimization)

    def evaluate(self, method: str, draw: int, *args: Any, **kwargs: Any) -> Any:
        if self._begins:  # hooks may have called the module and then changed it, as to averaged weights
            reshard(self._module)
            self._begins = False
        with self._lockstep.step() if self._lockstep is not None else nullcontext():
            return self._run(method, draw, args, kwargs)

    def _run(self, method: str, draw: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with randomness.preserved(self._device):
            randomness.seed_all(randomness.derive(draw, 0, self._data_rank))
            step = partial(getattr(self._module, method), *args, **kwargs)
            return call_through(self._module, step) if self._module.automatic_optimization else step()
