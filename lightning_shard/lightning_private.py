"""What is replaced in Lightning's modules and classes (lightning 2.6).

From Lightning's import on, so that sharded checkpoints are opened by their folders, in any store:

* ``pl_load`` (private), by which ``load_from_checkpoint`` and ``TorchCheckpointIO`` read a file. Files are read as
  before. A path that isn't a file, which was an error, is tried as a sharded checkpoint.
* ``_atomic_save`` (private), by which ``TorchCheckpointIO`` writes one: over a directory, it moves the file into it.
* Fabric's ``Strategy.load_checkpoint``, which knows no names of ours.
* ``LightningModule.load_state_dict``: parts that were compiled on one side only are matched.
* ``LightningCLI._parse_ckpt_path`` (private), which takes hyperparameters from files only.

For as long as it is needed:

* ``_AcceleratorConnector._validate_precision_choice``, from the making of a strategy until a Trainer has taken it:
  Lightning refuses ``64-true`` and ``16-mixed`` for each instance of a ``ModelParallelStrategy``, and no method of the
  strategy is called before.
* ``BaseFinetuning.filter_on_optimizer``, during a fit: it compares parameters by value, which for sharded ones is a
  collective call over the world, and stages would make different numbers of these.
* ``torchmetrics.Metric.__init__``, during a run: torchmetrics reduces over the world by default.
* The averaging callbacks' ``setup``, while it is called: it copies the module, which isn't sharded yet.
"""

from __future__ import annotations

import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_shard.torch_private import replaced

if TYPE_CHECKING:
    from torchmetrics import Metric

_waiting: weakref.WeakSet[Any] = weakref.WeakSet()
"""The strategies that no Trainer has taken yet."""
_validate_precision: Any = None
"""Lightning's own, while another is in its place."""


def open_folders(ours: Callable[[], Any]) -> None:
    """Install the readers, once ``LightningModule`` has been imported, and so all of these; imports nothing.

    Args:
        ours: Imports the module of what they do with folders, ``plugin/saving/plain_lightning.py``.
    """
    names = ("pytorch.core.module", "pytorch.core.saving", "fabric.plugins.io.torch_io", "fabric.strategies")
    modules: Any = (sys.modules[f"lightning.{name}"] for name in names)
    core, saving, files, strategies = modules
    module, strategy = core.LightningModule, strategies.Strategy
    read_file, write_file = files.pl_load, files._atomic_save
    load, load_states = strategy.load_checkpoint, module.load_state_dict

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
        with ours().out_of_the_way(path) if os.path.isdir(path) else nullcontext():
            write_file(checkpoint, filepath)

    @wraps(load)
    def load_checkpoint(
        self: Any, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        if os.path.isfile(path) or not ours().is_ours(path):
            return load(self, path, state, strict, weights_only)
        return ours().load_into(self, path, state, strict=strict)

    @wraps(load_states)
    def load_state_dict(self: Any, state_dict: Any, *arguments: Any, **named: Any) -> Any:
        names = (*state_dict, *(name for name, _ in self.named_modules()))
        if any("_orig_mod." in f"{name}." for name in names):
            state_dict = ours().matched(state_dict, self)
        return load_states(self, state_dict, *arguments, **named)

    saving.pl_load = files.pl_load = read
    files._atomic_save = write
    strategy.load_checkpoint, module.load_state_dict = load_checkpoint, load_state_dict


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
    global _validate_precision  # noqa: PLW0603
    _waiting.add(strategy)
    if _validate_precision is None:
        connector = _connector()
        _validate_precision = connector._validate_precision_choice
        connector._validate_precision_choice = _validate_by_strategy


def is_taken(strategy: Any) -> None:
    """A Trainer has taken the strategy."""
    global _validate_precision
    _waiting.discard(strategy)
    if not _waiting and _validate_precision is not None:
        _connector()._validate_precision_choice, _validate_precision = _validate_precision, None


def _connector() -> Any:
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    return _AcceleratorConnector


def _validate_by_strategy(connector: Any) -> None:
    if connector.strategy in _waiting:
        connector.strategy.check_precision(connector._precision_flag, connector._accelerator_flag)
    else:
        _validate_precision(connector)


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
