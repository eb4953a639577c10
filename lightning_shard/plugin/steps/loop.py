"""What steps ask of the loop that runs them: a Trainer's, or one of Fabric's that a user writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.hooks import ModelHooks

from lightning_shard import lightning_private, tree
from lightning_shard.plugin.steps.checks.agreement import what_follows

_OF_LIBRARIES = ("lightning.", "lightning_shard.")
_RECORDER = "lightning_shard.testing.recorder"


def has_hooks(trainer: pl.Trainer, module: pl.LightningModule, names: Iterable[str]) -> bool:
    """Whether user code runs in any of these hooks."""
    names = list(names)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return any(is_overridden(module, name, ModelHooks) for name in names) or any(
        is_users(callback, name) for callback in callbacks for name in names
    )


def is_used(trainer: pl.Trainer, module: pl.LightningModule, hook: str) -> bool:
    """Whether any code uses what this hook receives: a user's, or the recorder of this package's tests."""
    recorders = (type(callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return has_hooks(trainer, module, [hook]) or any(kind.__module__ == _RECORDER for kind in recorders)


def is_overridden(holder: Any, name: str, base: Any) -> bool:
    return name in vars(holder) or getattr(type(holder), name) is not getattr(base, name)


def is_users(callback: pl.Callback, name: str) -> bool:
    """Whether a callback's hook is user code: Lightning's progress bars, prediction writers and so on only observe."""
    code = str(getattr(getattr(type(callback), name), "__module__", ""))
    return name in vars(callback) or not code.startswith(_OF_LIBRARIES)


def has_whole_steps(module: object) -> bool:
    """Whether a step is one call of the module, as it is without manual optimization, and in Fabric's loops."""
    return bool(getattr(module, "automatic_optimization", True))


class Loop:
    """A loop that only calls steps, as the steps of one module see it.

    Attributes:
        precision: Lightning's plugin, of a Trainer or of Fabric.
        strategy: The strategy, as a user's code names it, for messages.
        whole_parameters: Where such code finds all parameters between steps.
        is_sanity_check: Whether evaluation steps run to try them before training.
        begins_accumulation: Whether the current batch is the first one after an optimizer step.
        accumulates: The number of batches over whose losses an optimizer step takes the mean.
        observers: Objects of the user's, other than the module, whose state a step may change.
    """

    precision: Any
    strategy = "fabric.strategy"
    whole_parameters = "a checkpoint (fabric.save)"
    is_sanity_check: Any = False
    epoch: Any = 0
    is_accumulating: Any = False
    begins_accumulation: Any = True
    accumulates: Any = 1
    observers: Any = ()
    schedulers: Any = ()

    @property
    def scaler(self) -> Any:
        """The ``GradScaler`` of 16-bit floats; ``None`` without."""
        return getattr(self.precision, "scaler", None)

    @property
    def in_32_bits(self) -> bool:
        """Whether steps compute with at least 32 bits."""
        return "16" not in str(self.precision.precision)

    def step(self, method: str) -> Callable[..., Any]:
        """The user's code for a kind of step; its first argument is a batch."""
        raise NotImplementedError

    @property
    def training_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes what a training step runs in, as autocast."""
        return nullcontext

    def receiver(self, hook: str) -> str | None:
        """The code of the user's that gets what a hook of this name receives, if there is any."""
        return "the code after the step"

    def follows(self) -> str:
        """What this rank reads after the current batch, as far as known: equal on all ranks of a data rank."""
        return ""

    def refuse_list_of_samples(self, batch: Any, *, may_be_last: bool) -> None:
        """Refuse a batch that is a list of samples, of which microbatches would be parts of each."""
        tree.refuse_list_of_samples(batch, None, may_be_last=may_be_last)


def _of_trainer(get: Callable[[Any], Any]) -> Any:
    return property(lambda self: get(self._module.trainer))


class TrainerLoop(Loop):
    """The loops of the Trainer that a module has at the time."""

    strategy = "trainer.strategy"
    whole_parameters = "trainer.strategy.gather_full_parameters()"
    precision = _of_trainer(lambda trainer: trainer.precision_plugin)
    is_sanity_check = _of_trainer(lambda trainer: trainer.sanity_checking)
    epoch = _of_trainer(lambda trainer: trainer.current_epoch)
    is_accumulating = _of_trainer(lightning_private.is_accumulating)
    begins_accumulation = _of_trainer(lightning_private.begins_accumulation)
    accumulates = _of_trainer(lambda trainer: trainer.accumulate_grad_batches)
    observers = _of_trainer(lambda trainer: trainer.callbacks)
    schedulers = _of_trainer(lambda trainer: [config.scheduler for config in trainer.lr_scheduler_configs])
    training_context = _of_trainer(lambda trainer: trainer.precision_plugin.train_step_context)

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module

    def step(self, method: str) -> Callable[..., Any]:
        return getattr(self._module, method)  # type: ignore[no-any-return]

    def receiver(self, hook: str) -> str | None:
        return hook if is_used(self._module.trainer, self._module, hook) else None

    def follows(self) -> str:
        return what_follows(self._module.trainer)

    def refuse_list_of_samples(self, batch: Any, *, may_be_last: bool) -> None:
        trainer = self._module.trainer
        if not lightning_private.stacks_samples(trainer):
            tree.refuse_list_of_samples(batch, lightning_private.samples_drawn(trainer), may_be_last=may_be_last)
