"""Access to private parts of Lightning's Trainer (lightning 2.6), all in one file.

* ``fit_loop._skip_backward`` (also used by Lightning's own weight averaging): the closure runs ``training_step``, then
  ``zero_grad``, then ``backward``. A pipelined ``training_step`` runs its backwards itself. So the closure must skip
  both, and gradients must be zeroed before the step.
* ``_accelerator_connector.use_distributed_sampler``: Lightning's injected sampler always shuffles training data and
  distributes it by global rank. Ours replaces it, and no other switch exists before the loaders are requested.
* ``*_loop.inference_mode``: DTensors don't work in inference mode, and no hook asks the strategy.
* ``*_loop.on_run_end``: all-gathered parameters are freed before the hooks that it calls. The strategy has no hook that
  runs before those.
* ``_run_stage``: an error that leaves it is the one that callbacks, loggers and the user get.
* ``predict_loop._on_predict_epoch_end``: passes ``_predictions`` and ``epoch_batch_indices``, per loader, to prediction
  writers, and returns the predictions.
* ``_combined_loader``: the loaders of an evaluation loop.
* ``_data_fetcher.done``, ``.batches``: whether a loop's data is exhausted, and which batches were prefetched (one, for
  loaders without a length). ``epoch_loop._num_ready_batches_reached``: whether the current batch ends the epoch.
* ``_results.log`` (reached through the module's ``_trainer``, where it has one): every ``self.log`` ends here, by
  whatever name it is called.
* ``fabric.connector._convert_precision_to_unified_args``: the name that a Trainer gives a precision.
* ``tuner.lr_finder._LRCallback.on_train_batch_end``: reads the loss of rank 0's own data only.
* ``PyTorchProfiler._register``: the hooks that it sets on all modules; ``_record_module_names``: whether it sets them.
* ``_checkpoint_connector._restore_modules_and_callbacks``: called before a strategy's setup or after all of it, never
  between the module's and the optimizers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.connector import _convert_precision_to_unified_args
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor
from torch.utils.data import default_collate
from torchmetrics import Metric

from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.data.loader import drop_repeated
from lightning_shard.torch_private import replaced

GATHERED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype to which autocast casts weights, by the name of the precision."""
PRECISIONS = ("32-true", "64-true", *GATHERED, "bf16-true", "16-true")


def named_precision(given: Any) -> str:
    """The name that a Trainer gives a precision: ``"bf16-mixed"`` for ``"bf16"``, ``"32-true"`` for 32.

    Raises:
        ConfigurationError: It isn't supported.
    """
    try:
        precision = _convert_precision_to_unified_args("32-true" if given is None else given)
    except (ValueError, TypeError):
        precision = given
    refuse_precision(precision)
    return str(precision)


def refuse_precision(precision: Any) -> None:
    if precision not in PRECISIONS:
        raise ConfigurationError(
            f"precision={precision!r} isn't supported by HybridShardStrategy: use one of {', '.join(PRECISIONS)}."
        )


def find_rates_by_all_data(trainer: pl.Trainer) -> None:
    """Have Lightning's learning rate finder, if it is running, use the mean loss over all data ranks."""

    def on_train_batch_end(callback: Any, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        if outputs:
            loss = outputs if isinstance(outputs, Tensor) else outputs["loss"]
            outputs = trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        _LRCallback.on_train_batch_end(callback, trainer, module, outputs, *args)

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _LRCallback):
            vars(callback)["on_train_batch_end"] = partial(on_train_batch_end, callback)


def skip_backward(trainer: pl.Trainer) -> None:
    trainer.fit_loop._skip_backward = True


def zero_gradients(trainer: pl.Trainer, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
    """Before the first accumulated batch, zero gradients as Lightning's closure does, with its hooks and counters."""
    if batch_idx % trainer.accumulate_grad_batches == 0:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        loop._on_before_zero_grad(optimizer)
        loop._optimizer_zero_grad(batch_idx, optimizer)


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether no optimizer step follows the current batch."""
    return trainer.fit_loop._should_accumulate()


def begins_accumulation(trainer: pl.Trainer) -> bool:
    """Whether the current batch is the first after an optimizer step."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def take_over_sampling(trainer: pl.Trainer) -> bool:
    """Keep Lightning from injecting its sampler; returns whether it would have."""
    connector = trainer._accelerator_connector
    wanted = connector.use_distributed_sampler
    connector.use_distributed_sampler = False
    return wanted


class PostponedRestoring:
    """Restores module, datamodule and callbacks from ``ckpt_path`` when it is called, rather than where Lightning does.

    In one process they are restored before ``configure_optimizers`` and ``on_fit_start``, which may depend on them.
    Here they can be when the module is laid out, in the strategy's setup.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._connector: Any = trainer._checkpoint_connector
        self._arguments: tuple[Any, ...] | None = None
        vars(self._connector)["_restore_modules_and_callbacks"] = self._note

    def _note(self, *arguments: Any) -> None:
        del vars(self._connector)["_restore_modules_and_callbacks"]
        self._arguments = arguments

    def __call__(self) -> None:
        arguments, self._arguments = self._arguments, None
        if arguments is not None:
            self._connector._restore_modules_and_callbacks(*arguments)


def forbid_inference_mode(trainer: pl.Trainer) -> None:
    for loop in (
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
        trainer.fit_loop.epoch_loop.val_loop,
    ):
        loop.inference_mode = False


def evaluating(trainer: pl.Trainer) -> Any:
    """The evaluation loop that is running."""
    if trainer.predicting:
        return trainer.predict_loop
    if trainer.testing:
        return trainer.test_loop
    return trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == TrainerFn.FITTING else trainer.validate_loop


def dataloaders(loop: Any) -> list[Any]:
    """The loaders that a loop reads."""
    loaders: list[Any] = loop._combined_loader.flattened
    return loaders


def _reading(trainer: pl.Trainer) -> Any:
    """The loop that is reading batches."""
    return trainer.fit_loop if trainer.training else evaluating(trainer)


def samples_drawn(trainer: pl.Trainer) -> int | None:
    """The number of samples in a rank's batch, if all loaders of the current loop have a batch sampler and agree."""
    loop = _reading(trainer)
    samplers = [getattr(loader, "batch_sampler", None) for loader in dataloaders(loop)]
    sizes = {getattr(sampler, "batch_size", None) for sampler in samplers}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def stacks_samples(trainer: pl.Trainer) -> bool:
    """Whether all loaders use torch's ``default_collate``: then no list inside a batch is a list of samples."""
    loop = _reading(trainer)
    return all(getattr(loader, "collate_fn", None) is default_collate for loader in dataloaders(loop))


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Whether no batch follows the current one in this epoch or evaluation; before the first: whether there is none."""
    if trainer.training and trainer.fit_loop.epoch_loop._num_ready_batches_reached():
        return True
    return bool(_reading(trainer)._data_fetcher.done)


def next_batch(trainer: pl.Trainer) -> tuple[Any, int] | None:
    """The prefetched batch after the current one, as it was read, and its loader's index; ``None`` if none was read.

    Always ``None`` for loaders with a length, since only some stages prefetch from those (``steps/look_ahead.py``).
    """
    fetcher = _reading(trainer)._data_fetcher
    if fetcher.length is not None or not fetcher.batches:
        return None
    batch, _, loader = fetcher.batches[0]
    return batch, loader


def has_trainer(module: Any) -> bool:
    """Whether a Trainer runs the module, and not a loop of Fabric's."""
    return getattr(module, "_trainer", None) is not None


@contextmanager
def logging_by(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Inside, send Lightning's ``self.log`` calls to ``log``, as (hook name, name, value, further arguments)."""
    results = None if module._trainer is None else module._trainer._results
    if results is None:  # nothing may be logged
        yield
        return
    with replaced((results, "log", log)):
        yield


@contextmanager
def logs_noted(module: pl.LightningModule, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside, call ``note`` with the name and value of all that is logged; of a metric, its value of the step."""
    results = None if module._trainer is None else module._trainer._results
    own = None if results is None else results.log

    def log(hook: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        assert own is not None
        note(name, value._forward_cache if isinstance(value, Metric) else value)
        own(hook, name, value, *args, **kwargs)

    with logging_by(module, log):
        yield


@contextmanager
def loggers_in_place(module: pl.LightningModule, stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, the loggers of a module's Trainer, if it has one, are these stand-ins for them."""
    trainer = module._trainer
    if trainer is None:
        yield
        return
    before = trainer.loggers
    trainer.loggers = [stand_in(logger) for logger in before]
    try:
        yield
    finally:
        trainer.loggers = before


def before_end_hooks(loop: Any, act: Callable[[], None]) -> None:
    """Call ``act`` whenever a loop has run its last step, before the hooks of its end."""

    def on_run_end() -> Any:
        act()
        return type(loop).on_run_end(loop)

    loop.on_run_end = on_run_end


def around_hooks_of_fit(
    trainer: pl.Trainer,
    after_batch: Callable[[], None],
    after_validation: Callable[[], None],
    after_epoch: Callable[[], None],
) -> None:
    """Call these after all hooks of a training batch, of the validation that may follow it, and of an epoch."""
    fit: Any = trainer.fit_loop
    epoch: Any = fit.epoch_loop

    def on_batch_end(*args: Any) -> None:
        after_batch()
        type(epoch).on_advance_end(epoch, *args)
        after_validation()

    def on_epoch_end() -> None:
        type(fit).on_advance_end(fit)
        after_epoch()

    epoch.on_advance_end, fit.on_advance_end = on_batch_end, on_epoch_end


def record_no_module_names(trainer: pl.Trainer) -> None:
    """Remove the hooks by which ``Trainer(profiler="pytorch")`` names modules: not all modules run on a stage."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if isinstance(profiler, PyTorchProfiler):
        profiler._record_module_names = False
        if profiler._register is not None:
            profiler._register.__exit__(None, None, None)
            profiler._register = None


def batches_started(trainer: pl.Trainer) -> int:
    """Training batches since the start of the run, the current one included; continues over resumes."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def run_within(trainer: pl.Trainer, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the loops of this and all later fits and evaluations inside such a context."""

    def run_stage() -> Any:
        with context():
            return type(trainer)._run_stage(trainer)

    trainer._run_stage = run_stage  # type: ignore[method-assign]


def write_no_predictions(trainer: pl.Trainer) -> None:
    """Leave Lightning's prediction writers nothing to write on this rank: another one has the same predictions."""
    for writer in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(writer, BasePredictionWriter):
            vars(writer).update(
                write_on_batch_end=lambda *_, **__: None, write_on_epoch_end=partial(_write_nothing_at_end, writer)
            )


def write_predictions_again(trainer: pl.Trainer) -> None:
    """Undo :func:`write_no_predictions`."""
    for writer in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(writer, BasePredictionWriter):
            for name in ("write_on_batch_end", "write_on_epoch_end"):
                vars(writer).pop(name, None)


def _write_nothing_at_end(writer: Any, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
    type(writer).write_on_epoch_end(writer, trainer, module, [], [])  # called, since it may be collective


def drop_repeated_predictions(trainer: pl.Trainer) -> None:
    """Drop predictions of batches that only pad the loader from what is returned and written at the end."""
    loop = trainer.predict_loop

    def on_epoch_end() -> Any:
        for place, dataloader in enumerate(dataloaders(loop)):
            for kept in (loop._predictions, loop.epoch_batch_indices):
                drop_repeated(kept[place], dataloader)
        return type(loop)._on_predict_epoch_end(loop)

    loop._on_predict_epoch_end = on_epoch_end  # type: ignore[method-assign]
