"""What is replaced in Lightning's modules and classes (lightning 2.6), each for as long as it is needed.

* ``_AcceleratorConnector._validate_precision_choice``, from the making of a strategy until a Trainer has taken it:
  Lightning refuses ``64-true`` and ``16-mixed`` for each instance of a ``ModelParallelStrategy``, and no method of the
  strategy is called before.
* ``BaseFinetuning.filter_on_optimizer``, during a fit: it compares parameters by value, which for sharded ones is a
  collective call over the world, and stages would make different numbers of these.
* ``torchmetrics.Metric.__init__``, during a run: torchmetrics reduces over the world by default.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor
from torchmetrics import Metric

from lightning_shard.torch_private import replaced

_validate_precision: Any = _AcceleratorConnector._validate_precision_choice
_waiting: weakref.WeakSet[Any] = weakref.WeakSet()
"""The strategies that no Trainer has taken yet."""


def choose_precision_by(strategy: Any) -> None:
    """Have a Trainer call the method ``check_precision`` of a strategy that it is given, with its precision."""
    _waiting.add(strategy)
    connector: Any = _AcceleratorConnector
    connector._validate_precision_choice = _validate_by_strategy


def is_taken(strategy: Any) -> None:
    """A Trainer has taken the strategy."""
    _waiting.discard(strategy)
    if not _waiting:
        connector: Any = _AcceleratorConnector
        connector._validate_precision_choice = _validate_precision


def _validate_by_strategy(connector: Any) -> None:
    if connector.strategy in _waiting:
        connector.strategy.check_precision(connector._precision_flag, connector._accelerator_flag)
    else:
        _validate_precision(connector)


def filtering_parameters_by(
    new_ones: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
) -> AbstractContextManager[None]:
    """Inside, finetuning callbacks add what ``new_ones`` returns of an optimizer's parameters and others."""

    def filter_on_optimizer(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        return new_ones([p for group in optimizer.param_groups for p in group["params"]], list(params))

    return replaced((BaseFinetuning, "filter_on_optimizer", staticmethod(filter_on_optimizer)))


def told_of_new_metrics(tell: Callable[[Metric], None]) -> AbstractContextManager[None]:
    """Inside, ``tell`` is called with each metric that is made, other than those in which Lightning holds logs."""
    own: Any = Metric.__init__

    @wraps(own)
    def made(metric: Metric, *args: Any, **kwargs: Any) -> None:
        own(metric, *args, **kwargs)
        if not type(metric).__module__.startswith("lightning."):
            tell(metric)

    return replaced((Metric, "__init__", made))
