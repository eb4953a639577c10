"""Private parts of Lightning (2.6), and what is replaced in it. Imported before Lightning, which it imports in calls.

From Lightning's import on, so that sharded checkpoints are opened by their folders, in any store:

* ``pl_load`` (private), by which ``load_from_checkpoint`` and ``TorchCheckpointIO`` read a file: what isn't a file is
  tried as a sharded checkpoint.
* ``_atomic_save`` (private), by which ``TorchCheckpointIO`` writes one: over a directory, it moves the file into it.
* Fabric's ``Strategy.load_checkpoint``, which knows no names of ours.
* ``LightningCLI._parse_ckpt_path`` (private), which takes hyperparameters from files only.

For as long as it is needed:

* ``_AcceleratorConnector._validate_precision_choice``, until a Trainer has taken the strategy: Lightning refuses
  ``64-true`` and ``16-mixed`` for instances of ``ModelParallelStrategy``, and calls no method of theirs before.
* ``BaseFinetuning.filter_on_optimizer``, during a fit: it compares parameters by value, a collective call.
* ``torchmetrics.Metric.__init__``, during a run: torchmetrics reduces over the world by default.
* The averaging callbacks' ``setup``, while it is called: it copies the module, which isn't sharded yet.

Of one Trainer, its loops and its callbacks:

* ``fit_loop._skip_backward``: a pipelined ``training_step`` runs its backwards itself, so Lightning's closure must skip
  ``zero_grad`` and ``backward`` after it.
* ``_accelerator_connector.use_distributed_sampler``: Lightning's sampler shuffles, and distributes by global rank.
* ``*_loop.inference_mode``: DTensors don't work in inference mode.
* ``*_loop.on_run_end``: all-gathered parameters are freed around the hooks that it calls.
* ``_run_stage``: an error that leaves it is the one that callbacks, loggers and the user get.
* ``predict_loop._on_predict_epoch_end``: passes ``_predictions`` and ``epoch_batch_indices`` to prediction writers.
* ``_combined_loader``, ``_data_fetcher.done``, ``.batches``: a loop's loaders, and prefetched batches.
  ``_num_ready_batches_reached``: whether this batch ends the epoch.
* ``_results.log``, through the module's ``_trainer``: every ``self.log`` ends here.
* ``fabric.connector._convert_precision_to_unified_args``: the name that a Trainer gives a precision.
* ``tuner.lr_finder._LRCallback.on_train_batch_end``: reads the loss of rank 0's own data only.
* ``PyTorchProfiler._register``, ``_record_module_names``: the hooks that it sets on all modules.
* ``_checkpoint_connector._restore_modules_and_callbacks``: called before a strategy's setup or after all of it, never
  between the module's and the optimizers'.
* ``fabric.wrappers._in_fabric_backward``: a hook on what a module that Fabric wraps returns refuses other backwards.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_shard.errors import ConfigurationError
from lightning_shard.torch_private import replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torchmetrics import Metric

GATHERED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype to which autocast casts weights, by the name of the precision."""
PRECISIONS = ("32-true", "64-true", *GATHERED, "bf16-true", "16-true")

_waiting: weakref.WeakSet[Any] = weakref.WeakSet()
"""The strategies that no Trainer has taken yet."""
_while_waiting = ExitStack()


def open_folders(ours: Callable[[], Any]) -> None:
    """Install the readers, once ``LightningModule`` has been imported, and so all of these; imports nothing.

    Args:
        ours: Imports the module of what they do with folders, ``plugin/saving/plain_lightning.py``.
    """
    names = ("pytorch.core.saving", "fabric.plugins.io.torch_io", "fabric.strategies")
    modules: Any = (sys.modules[f"lightning.{name}"] for name in names)
    saving, files, strategies = modules
    read_file, write_file, load = files.pl_load, files._atomic_save, strategies.Strategy.load_checkpoint

    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        is_path = isinstance(path, (str, os.PathLike))
        if is_path and os.path.basename(path) == "manifest.json":
            path = os.path.dirname(path) or "."  # a sharded checkpoint, by the path of its manifest
        try:
            return read_file(path, map_location=map_location, weights_only=weights_only)
        except (OSError, EOFError):  # a directory, which stores may open as an empty file; or no such file
            found = ours().read(path, map_location) if is_path else None
            if found is None:
                raise
            return found

    def write(checkpoint: dict[str, Any], filepath: Any) -> None:
        path = os.fspath(filepath).removeprefix("file://")
        if os.path.isdir(path) and ours().is_ours(path):
            ours().replace_folder(path, partial(write_file, checkpoint))
        else:
            write_file(checkpoint, filepath)

    @wraps(load)
    def load_checkpoint(
        self: Any, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        if os.path.isfile(path) or not ours().is_ours(path):
            return load(self, path, state, strict, weights_only)
        return ours().load_into(self, path, state, strict=strict)

    saving.pl_load = files.pl_load = read
    files._atomic_save = write
    strategies.Strategy.load_checkpoint = load_checkpoint


def take_hyperparameters(ours: Callable[[], Any]) -> None:
    """Have LightningCLI take hyperparameters from a sharded checkpoint as it does from a file.

    Imports the strategy: jsonargparse finds a class by its bare name, as in ``--trainer.strategy=HybridShardStrategy``,
    only among those that are imported.
    """
    importlib.import_module("lightning_shard.plugin.strategy")
    cli: Any = sys.modules["lightning.pytorch.cli"].LightningCLI
    parse_file = cli._parse_ckpt_path

    def parse(self: Any) -> None:
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        is_folder = path and path not in ("best", "last", "hpc", "registry") and not os.path.isfile(path)
        kept = ours().hyperparameters(path) if is_folder else None
        if kept is None:
            parse_file(self)
        elif kept:
            self.config = self.parser.parse_object({command: {"model": kept}}, self.config)

    cli._parse_ckpt_path = parse


def choose_precision_by(strategy: Any) -> None:
    """Have a Trainer call the method ``check_precision`` of a strategy that it is given, with its precision."""
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    own = _AcceleratorConnector._validate_precision_choice

    def validate(connector: Any) -> None:
        if connector.strategy in _waiting:
            connector.strategy.check_precision(connector._precision_flag, connector._accelerator_flag)
        else:
            own(connector)

    if not _waiting:
        _while_waiting.enter_context(replaced((_AcceleratorConnector, "_validate_precision_choice", validate)))
    _waiting.add(strategy)


def is_taken(strategy: Any) -> None:
    """A Trainer has taken the strategy."""
    _waiting.discard(strategy)
    if not _waiting:
        _while_waiting.close()


def filtering_parameters_by(
    new_ones: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
) -> AbstractContextManager[None]:
    """Inside, finetuning callbacks add what ``new_ones`` returns of an optimizer's parameters and others."""
    from lightning.pytorch.callbacks import BaseFinetuning

    def filter_on_optimizer(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        return new_ones([p for group in optimizer.param_groups for p in group["params"]], list(params))

    return replaced((BaseFinetuning, "filter_on_optimizer", staticmethod(filter_on_optimizer)))


def told_of_new_metrics(tell: Callable[[Metric], None]) -> AbstractContextManager[None]:
    """Inside, ``tell`` is called with each metric that is made, other than those in which Lightning holds logs."""
    from torchmetrics import Metric

    own: Any = Metric.__init__

    @wraps(own)
    def made(metric: Metric, *args: Any, **kwargs: Any) -> None:
        own(metric, *args, **kwargs)
        if not type(metric).__module__.startswith("lightning."):
            tell(metric)

    return replaced((Metric, "__init__", made))


def averages_postponed() -> AbstractContextManager[None]:
    """Inside, averaging callbacks' own setup does nothing."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

    return replaced(*((kind, "setup", lambda *_, **__: None) for kind in (StochasticWeightAveraging, WeightAveraging)))


def named_precision(given: Any) -> str:
    """The name that a Trainer gives a precision: ``"bf16-mixed"`` for ``"bf16"``, ``"32-true"`` for 32.

    Raises:
        ConfigurationError: It isn't supported.
    """
    from lightning.fabric.connector import _convert_precision_to_unified_args

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
    from lightning.pytorch.tuner.lr_finder import _LRCallback

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


def zero_gradients(trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Before the first accumulated batch, zero gradients as Lightning's closure does, with its hooks and counters."""
    if begins_accumulation(trainer):
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
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
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop.inference_mode = False


def evaluating(trainer: pl.Trainer) -> Any:
    """The evaluation loop that is running."""
    if trainer.predicting:
        return trainer.predict_loop
    if trainer.testing:
        return trainer.test_loop
    return trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop


def dataloaders(loop: Any) -> list[Any]:
    """The loaders that a loop reads."""
    return loop._combined_loader.flattened  # type: ignore[no-any-return]


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

    Always ``None`` for loaders with a length, since only some stages prefetch from those (``look_ahead.py``).
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
def logging_by(module: Any, log: Callable[..., None]) -> Iterator[None]:
    """Inside, send Lightning's ``self.log`` calls to ``log``, as (hook name, name, value, further arguments)."""
    results = module._trainer._results if has_trainer(module) else None
    if results is None:  # nothing may be logged
        yield
        return
    with replaced((results, "log", log)):
        yield


@contextmanager
def logs_noted(module: Any, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside, call ``note`` with the name and value of all that is logged; of a metric, its value of the step."""
    from torchmetrics import Metric

    results = module._trainer._results if has_trainer(module) else None
    own = None if results is None else results.log

    def log(hook: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        assert own is not None
        note(name, value._forward_cache if isinstance(value, Metric) else value)
        own(hook, name, value, *args, **kwargs)

    with logging_by(module, log):
        yield


@contextmanager
def loggers_in_place(module: Any, stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, the loggers of a module's Trainer, if it has one, are these stand-ins for them."""
    if not has_trainer(module):
        yield
        return
    trainer = module._trainer
    before = trainer.loggers
    trainer.loggers = [stand_in(logger) for logger in before]
    try:
        yield
    finally:
        trainer.loggers = before


def around_end_hooks(loop: Any, act: Callable[[], None]) -> None:
    """Call ``act`` whenever a loop has run its last step, before the hooks of its end and after them."""

    def on_run_end() -> Any:
        act()
        result = type(loop).on_run_end(loop)
        act()
        return result

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
    from lightning.pytorch.profilers import PyTorchProfiler

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
    for writer in _prediction_writers(trainer):
        vars(writer).update(
            write_on_batch_end=lambda *_, **__: None, write_on_epoch_end=partial(_write_nothing_at_end, writer)
        )


def write_predictions_again(trainer: pl.Trainer) -> None:
    """Undo :func:`write_no_predictions`."""
    for writer in _prediction_writers(trainer):
        for name in ("write_on_batch_end", "write_on_epoch_end"):
            vars(writer).pop(name, None)


def _prediction_writers(trainer: pl.Trainer) -> list[Any]:
    from lightning.pytorch.callbacks import BasePredictionWriter

    return [each for each in trainer.callbacks if isinstance(each, BasePredictionWriter)]  # type: ignore[attr-defined]


def _write_nothing_at_end(writer: Any, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
    type(writer).write_on_epoch_end(writer, trainer, module, [], [])  # called, since it may be collective


def drop_predictions(trainer: pl.Trainer, drop: Callable[[list[Any], Any], None]) -> None:
    """Have ``drop`` take from a loader's predictions what isn't to be returned and written at the end."""
    loop = trainer.predict_loop

    def on_epoch_end() -> Any:
        for place, dataloader in enumerate(dataloaders(loop)):
            for kept in (loop._predictions, loop.epoch_batch_indices):
                drop(kept[place], dataloader)
        return type(loop)._on_predict_epoch_end(loop)

    loop._on_predict_epoch_end = on_epoch_end  # type: ignore[method-assign]


def within_fabrics_backward() -> AbstractContextManager[None]:
    """Inside, what a module that Fabric wraps returns takes a backward that isn't ``fabric.backward``'s."""
    from lightning.fabric import wrappers

    return replaced((wrappers, "_in_fabric_backward", True))
